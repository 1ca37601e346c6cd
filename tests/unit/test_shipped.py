"""``megatron-dppo examples`` and ``convert``, from a checkout; from a wheel: tests/e2e/test_demo.py."""

from __future__ import annotations

import runpy
import sys
import tomllib
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from megatron_dppo.commands.main import main
from megatron_dppo.errors import UserError
from megatron_dppo_convert.command import CONVERSIONS
from megatron_dppo_lab.shipped import shipped_folder
from source_folders import LIBRARIES, PACKAGES, SOURCES

ROOT = Path(__file__).parents[2]


def test_examples_are_copied_and_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["examples"]) == 0
    listed = capsys.readouterr().out
    assert "chain_sum" in listed and "dppo.toml" in listed and "torchrun.sh" in listed
    assert main(["examples", "rlhf", "launch", "--to", str(tmp_path)]) == 0
    copied, own = tmp_path / "examples/rlhf/dppo.toml", (ROOT / "examples/rlhf/dppo.toml").read_bytes()
    assert copied.read_bytes() == own and (tmp_path / "launch/torchrun.sh").stat().st_mode & 0o100
    copied.write_text("mine")
    for names, text in (
        (["losses", "rlhf"], "rlhf already exists"),
        (["losses", "rhlf"], "example 'rhlf'; expected some of"),
        (["losses", "--too", "x"], "unexpected argument '--too'"),
    ):
        assert main(["examples", *names, "--to", str(tmp_path)]) == 2
        assert text in capsys.readouterr().err
    assert copied.read_text() == "mine" and not (tmp_path / "examples/losses").exists()


@pytest.mark.parametrize("name", CONVERSIONS)
def test_each_conversion_says_what_it_takes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["convert", name, "--help"])
    printed = capsys.readouterr().out
    assert ended.value.code == 0 and f"usage: megatron-dppo convert {name} " in printed
    assert CONVERSIONS[name].description.splitlines()[0][:60] in printed


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("convert_hf_to_megatron", "hf-to-megatron"),
        ("convert_megatron_to_hf", "megatron-to-hf"),
        ("convert_adapter", "adapter"),
        ("convert_upcycle", "upcycle"),
        ("quantize_hf", "quantize"),
        ("check_conversion", "check"),
    ],
)
def test_the_scripts_of_earlier_versions_are_the_commands(
    script: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr("megatron_dppo.commands.main.main", lambda arguments: calls.append(arguments) or 7)
    monkeypatch.setattr(sys, "argv", [f"{script}.py", "FROM", "--dtype", "fp32"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "tools" / f"{script}.py"), run_name="__main__")
    assert ended.value.code == 7 and calls == [["convert", name, "FROM", "--dtype", "fp32"]]


def test_a_folder_beside_an_installed_package_is_somebody_elses(tmp_path: Path) -> None:
    (tmp_path / "megatron_dppo").mkdir()
    (tmp_path / "examples").mkdir()
    with pytest.raises(UserError, match="install the package"):
        shipped_folder("examples", tmp_path / "megatron_dppo")
    (tmp_path / "setup.py").touch()
    assert shipped_folder("examples", tmp_path / "megatron_dppo") == tmp_path / "examples"


def test_checker_and_tests_know_each_package() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    folders = {str(folder.parent.relative_to(ROOT)) for folder in PACKAGES.values()}
    assert set(settings["mypy"]["packages"]) == SOURCES.keys()
    assert set(settings["mypy"]["mypy_path"].split(":")) == folders
    assert folders <= set(settings["pytest"]["ini_options"]["pythonpath"])
    assert {f"packages/{name}/src" for name in LIBRARIES} <= folders


def test_every_data_file_of_the_package_is_in_a_wheel() -> None:
    captured: dict[str, Any] = {}
    with patch("setuptools.setup", captured.update):
        runpy.run_path(str(ROOT / "setup.py"))
    for name, folder in SOURCES.items():
        named = {pattern: set(folder.glob(pattern)) for pattern in captured["package_data"].get(name, ())}
        assert all(named.values()), named
        files = {f for f in folder.rglob("*") if f.is_file() and f.suffix not in (".py", ".pyc")}
        assert files <= set().union(*named.values())
