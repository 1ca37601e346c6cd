"""Versions of engines, torch and NCCL: one file, which checks, extras, CI's tools, containers and pages agree with."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
from pathlib import Path
from unittest.mock import patch

import pytest
from packaging.requirements import Requirement

from megatron_dppo_engines.serving.collectives import NCCL_OF_TORCH, TESTED, TORCH_OF_ENGINE, pinned_versions

ROOT = Path(__file__).parents[3]
RECORDED: dict[str, dict[str, str]] = json.loads((ROOT / "tests/data/engine_pins.json").read_text())["resolved"]
"""Packages that a resolver installs with a package: recorded with the package index, by engine or torch and version."""
NCCL = "nvidia-nccl-cu13"
LOCK = dict(re.findall(r"^([a-z0-9-]+)==([^ ;\n]+)", (ROOT / "requirements/lock.txt").read_text(), re.M))


def test_the_file_says_what_a_resolver_installs() -> None:
    for package, installed in RECORDED.items():
        name, _, version = package.partition("==")
        if name == "torch":
            assert NCCL_OF_TORCH[version.rpartition(".")[0]] == installed[NCCL], package
        else:
            assert TORCH_OF_ENGINE[name][version] == installed["torch"], package  # type: ignore[index]
            assert pinned_versions(name, version).nccl == installed[NCCL], package  # type: ignore[arg-type]
    known = {f"{engine}=={version}" for engine, versions in TORCH_OF_ENGINE.items() for version in versions}
    assert known == {package for package in RECORDED if not package.startswith("torch")}


def test_the_tested_trainer_and_its_servers_have_one_nccl() -> None:
    assert TESTED.keys() == {"torch", "sglang", "vllm", "sglang_newest"}
    packages = ("torch", "sglang", "vllm")
    assert {RECORDED[f"{name}=={TESTED[name]}"][NCCL] for name in packages} == {LOCK[NCCL]}
    assert {RECORDED[f"{name}=={TESTED[name]}"]["torch"] for name in packages} == {LOCK["torch"]}


def extras() -> dict[str, list[str]]:
    captured: dict[str, dict[str, list[str]]] = {}
    with patch("setuptools.setup", captured.update):
        runpy.run_path(str(ROOT / "setup.py"))
    return captured["extras_require"]


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_the_extra_of_a_trainer_pins_the_torch_of_its_servers(engine: str) -> None:
    pins = extras()
    (torch,) = [each for each in map(Requirement, pins[f"train-{engine}"]) if each.name == "torch"]
    assert str(torch.specifier) == "==" + RECORDED[f"{engine}=={TESTED[engine]}"]["torch"]
    assert set(pins["train"]) < set(pins[f"train-{engine}"]) and len(pins[f"train-{engine}"]) == len(pins["train"]) + 1


def test_no_extra_brings_an_engine() -> None:
    """uv resolves all extras with the pins of the lock, which no released engine takes: it would not end."""
    named = {Requirement(each).name for requirements in extras().values() for each in requirements}
    assert not named & {"sglang", "vllm"}


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_ci_installs_the_tested_versions(engine: str) -> None:
    listed = (ROOT / f"tools/engines/{engine}_requirements.txt").read_text()
    assert re.findall(r"^torch==(.+)$", listed, re.M) == [TESTED["torch"]]
    # The scripts and make read the file; a version that they cannot read would be empty.
    script = (ROOT / f"tools/engines/{engine}.sh").read_text().replace("set -euo pipefail", "set -eu", 1)
    head = script[: script.index("root=")].replace('$(dirname "$0")', str(ROOT / "tools/engines"))
    shown = subprocess.run(["bash", "-c", head + '\necho "$version"', "x", "install"], capture_output=True, text=True)
    assert shown.stdout.strip() == TESTED["sglang_newest" if engine == "sglang" else engine], shown.stderr
    planned = subprocess.run(["make", "-n", "engines"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert f"sglang.sh install {TESTED['sglang']} " in planned


def test_every_file_that_installs_or_starts_an_engine_names_a_tested_version() -> None:
    """Also prose: the versions of a page are those that CI runs."""
    allowed = {"sglang": {TESTED["sglang"], TESTED["sglang_newest"]}, "vllm": {TESTED["vllm"]}}
    calls = re.compile(r"""(sglang|vllm)\.sh"?,? "?(?:install|serve)"?,? "?(\d+\.\d+\.\d+)""")
    files = [ROOT / "Makefile", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*"), *ROOT.glob("launch/**/*")]
    files += [*ROOT.glob("tools/**/*.sh"), *ROOT.glob("tests/**/*.py"), *ROOT.glob("benchmarks/**/*.py")]
    named = 0
    for file in files:
        if file.suffix in ("", ".md", ".toml", ".sh", ".py") and file.is_file():
            for engine, version in calls.findall(file.read_text(errors="ignore")):
                named += 1
                assert version in allowed[engine], f"{file}: {engine} {version}"
    assert named >= 4, "the pattern finds nothing"


@pytest.mark.parametrize(
    "file",
    [
        "docs/two_nodes.md",
        "examples/qwen3_30b_a3b/README.md",
        "launch/containers/Dockerfile",
        "launch/containers/apptainer.def",
    ],
)
def test_commands_for_the_servers_environment_name_the_tested_version(file: str) -> None:
    text = (ROOT / file).read_text()
    versions = re.findall(r"(?:sglang==|SGLANG=)(\d[\d.]*)", text)
    assert versions and set(versions) == {TESTED["sglang"]}


def test_the_page_has_every_set() -> None:
    page = (ROOT / "docs/setup.md").read_text()
    rows = {line.split(" | ")[0].strip("| "): line for line in page.splitlines() if line.startswith("| 2.")}
    for package, installed in RECORDED.items():
        version = package.partition("==")[2]
        if not package.startswith("torch==2.11"):
            assert version in rows[installed[NCCL]], package
    for engine in ("sglang", "vllm"):
        assert f"pip install '{engine}=={TESTED[engine]}'" in page and f"[train-{engine}]" in page
    (main,) = [line for line in page.splitlines() if line.startswith("| main ")]
    assert f"{TESTED['torch']}+cpu" in main and f"{TESTED['sglang']}, {TESTED['sglang_newest']}" in main
