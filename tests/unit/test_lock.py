"""The pins of requirements/lock.txt and pyproject.toml, and how the set-up of a machine without GPU chooses torch."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from packaging.requirements import Requirement

from tools import newest_versions

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "requirements/lock.txt"
TOOL = runpy.run_path(str(ROOT / "tools/lock_requirements.py"))
CUDA = "nvidia-cublas==13.1.1.3; platform_system == 'Linux'"


def pins() -> list[str]:
    return [line for line in LOCK.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]


def declared() -> dict[str, Any]:
    captured: dict[str, Any] = {}
    with patch("setuptools.setup", captured.update):
        runpy.run_path(str(ROOT / "setup.py"))
    return captured


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_every_requirement_has_one_pin_that_it_takes(python: str) -> None:
    machine = {"python_version": python, "python_full_version": f"{python}.7", "sys_platform": "linux"}
    machine |= {"platform_system": "Linux", "platform_machine": "x86_64", "platform_python_implementation": "CPython"}
    mine = [pin for pin in map(Requirement, pins()) if pin.marker is None or pin.marker.evaluate(machine)]
    versions = {pin.name: str(pin.specifier).removeprefix("==") for pin in mine}
    assert len(versions) == len(mine) > 100, "two pins of one package"
    result = declared()
    wanted = result["install_requires"] + [r for extra in TOOL["EXTRAS"] for r in result["extras_require"][extra]]
    parsed = [each for each in map(Requirement, wanted) if each.marker is None or each.marker.evaluate(machine)]
    # python tools/lock_requirements.py writes the pins anew.
    assert not [str(each) for each in parsed if not _takes(each, versions)]
    assert versions["megatron-core"] == ("0.16.1" if python == "3.11" else "0.19.2")


def _takes(requirement: Requirement, versions: dict[str, str]) -> bool:
    name = requirement.name.lower()
    return name in versions and versions[name] in requirement.specifier


def test_pip_and_uv_read_the_same_pins_and_neither_file_has_an_address() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert TOOL["replace_pins"](text, pins()) == text
    project = tomllib.loads(text)
    assert project["tool"]["uv"] == {"constraint-dependencies": pins()}
    assert "://" not in LOCK.read_text(encoding="utf-8") + text
    assert project["project"]["requires-python"] == declared()["python_requires"]


def write_wheel(folder: Path, version: str, requires: str = "") -> None:
    info = f"torch-{version}.dist-info"
    needs = f"Requires-Dist: {requires}\n" if requires else ""
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n{needs}")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


@pytest.mark.parametrize(
    ("wheels", "pin", "said"),
    [
        ({"2.13.0": CUDA, "2.13.0+cpu": ""}, "torch==2.13.0", ""),
        ({"2.13.0": ""}, "torch==2.13.0", ""),  # such as those for macOS
        (
            {"2.13.0": CUDA, "2.9.0+cpu": "", "2.12.1+cpu": "", "2.5.0+cpu": ""},
            "torch==2.12.1+cpu",
            "taking torch 2.12.1+cpu",
        ),
        ({"2.13.0": CUDA, "2.5.0+cpu": ""}, "torch==2.13.0", "2.7 GB that this machine does not use"),
    ],
)
def test_a_machine_without_gpu_gets_a_cpu_build_where_one_is_offered(
    wheels: dict[str, str], pin: str, said: str, tmp_path: Path
) -> None:
    for version, requires in wheels.items():
        write_wheel(tmp_path, version, requires)
    lock, out = tmp_path / "lock.txt", tmp_path / "out.txt"
    lock.write_text("numpy==2.4.6\ntorch==2.13.0\ntriton==3.7.1 ; sys_platform == 'linux'\n")
    env = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    env |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}
    command = [sys.executable, str(ROOT / "tools/cpu_torch.py"), str(lock), str(out)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "" and said in done.stderr and bool(said) == bool(done.stderr.strip()), done.stderr
    chosen = out.read_text().splitlines()
    assert [line for line in chosen if line.startswith("torch")] == [pin] and "numpy==2.4.6" in chosen
    assert any(line.startswith("triton") for line in chosen) == (pin == "torch==2.13.0")


def test_the_requirement_of_torch_is_that_of_the_package() -> None:
    # Not imported: the tool runs in an environment that has pip alone.
    text = (ROOT / "tools/cpu_torch.py").read_text(encoding="utf-8")
    (wanted,) = [each for each in declared()["install_requires"] if each.startswith("torch")]
    assert re.search(r"^TORCH = (.*)$", text, re.M)[1] == json.dumps(wanted)  # type: ignore[index]


def test_the_newest_release_is_asked_for_every_python() -> None:
    assert newest_versions.pythons() == ["3.11", "3.12", "3.13"]
    pins = newest_versions.pinned()
    assert pins["megatron-core"] == {"0.16.1", "0.19.2"}, "one for each Python"
    assert {"0.5.20", "0.5.23"} <= pins["sglang"] and pins["verl"] and "torch" in pins
    releases = {("a", "3.11"): "0.3.0", ("b", "3.12"): "none", ("b", "3.11"): "none"}
    rows = newest_versions.table(
        {"a": {"0.4.0"}, "b": {"1.0"}, "c": {"0.9"}, "d": set()},
        ["3.11", "3.12"],
        lambda package, python: releases.get((package, python), "0.4.0"),
    )
    assert [row[-1] for row in rows[1:]] == ["differs by Python", "", "newer than the pin", ""]
    assert rows[1][:4] == ["a", "0.4.0", "0.3.0", "0.4.0"]


def test_a_registry_that_does_not_answer_is_not_a_package_without_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {
        "skyrl": ("skyrl (0.3.0)\n", ""),
        "old": ("", "ERROR: No matching distribution found for old"),
        "x": ("", "?"),
    }

    def run(command: list[str], **_: object) -> SimpleNamespace:
        assert command[-2:] == ["--python-version", "3.11"]
        out, error = answers[command[command.index("versions") + 1]]
        return SimpleNamespace(stdout=out, stderr=error)

    monkeypatch.setattr(newest_versions.subprocess, "run", run)
    assert newest_versions.newest("skyrl", "3.11") == "0.3.0"
    assert newest_versions.newest("old", "3.11") == "none"
    with pytest.raises(SystemExit, match="pip cannot ask"):
        newest_versions.newest("x", "3.11")
