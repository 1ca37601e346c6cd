"""``megatron-dppo examples`` and ``convert`` from a checkout; from a wheel: tests/e2e/test_demo.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron_dppo.commands.main import main
from megatron_dppo.commands.shipped import TOOLS
from megatron_dppo.errors import UserError
from megatron_dppo.files import shipped_folder

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


@pytest.mark.parametrize("name", TOOLS)
def test_a_conversion_is_the_tool_with_all_arguments(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "megatron_dppo"
    tools = package / "shipped/tools"
    tools.mkdir(parents=True)
    (tools / TOOLS[name]).write_text("import sys\nassert __name__ == '__main__'\nsys.exit(len(sys.argv) * 10)\n")
    monkeypatch.setattr("megatron_dppo.commands.shipped.shipped_folder", lambda folder: shipped_folder(folder, package))
    monkeypatch.setattr(sys, "argv", ["before"])
    with pytest.raises(SystemExit) as ended:
        main(["convert", name, "--help", "FROM", "--dtype", "fp32"])
    assert ended.value.code == 50 and sys.argv[1:] == ["--help", "FROM", "--dtype", "fp32"]
    assert (ROOT / "tools" / TOOLS[name]).is_file()


def test_a_folder_beside_an_installed_package_is_somebody_elses(tmp_path: Path) -> None:
    (tmp_path / "megatron_dppo").mkdir()
    (tmp_path / "examples").mkdir()
    with pytest.raises(UserError, match="install the package again"):
        shipped_folder("examples", tmp_path / "megatron_dppo")
    (tmp_path / "setup.py").touch()
    assert shipped_folder("examples", tmp_path / "megatron_dppo") == tmp_path / "examples"
