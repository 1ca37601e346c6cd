"""Every command in an environment with torch and pydantic alone names the extra that it needs, without a traceback."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from megatron_dppo.commands.registry import installed_commands
from megatron_dppo_lab.smollm2 import GGUF_SHA256
from source_folders import ROOT, SOURCES

# Python reads a module of this name at its start, in child processes too.
CUSTOMIZE = """
import json, os, sys

INSTALLED, KEPT = json.loads(os.environ["BASE_INSTALL"])

class Filtered:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        return None if top in INSTALLED and top not in KEPT else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Filtered(finder) for finder in sys.meta_path]
"""
RUN = """
import json, sys, traceback
from megatron_dppo.commands.main import main
for words in json.load(sys.stdin):
    print("##", words[0], file=sys.stderr, flush=True)
    try:
        code = main(words)
    except SystemExit as error:
        code = error.code
    print("exit", code, file=sys.stderr, flush=True)
"""
CONFIG = "examples/chain_sum/dppo.toml"
USABLE: dict[str, list[str]] = {
    "help": ["loss.name"],
    "examples": [],
    "serve": ["examples/chain_sum/sglang.toml", "--dry-run"],
}
"""Commands that work with the base install."""
NEEDS_MORE = {
    "base": ["task:chain_sum", "new"],
    "demo": [],
    "convert": ["hf-to-megatron", "a", "b"],
    "train": [CONFIG],
    "eval": [CONFIG],
    "generate": ["examples/chain_sum/model"],
    "plan": [CONFIG, "--world-size", "2"],
    "port": ["launch.sh"],
    "tinker": [CONFIG],
    "tasks": ["examples/agents/vf_sums/train.toml", "--to", "tasks.jsonl"],
    "experiment": ["decode", "--list"],
    "report": ["run"],
    "replay": ["run", "--step", "1"],
    "diagnose": ["run"],
}
OTHER = {"doctor", "restarts"}
"""``doctor`` has a test of its own; ``restarts`` is for launch scripts, which have trained before."""


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def base_modules() -> set[str]:
    """Return the top-level modules of torch, pydantic and what they require."""
    names, open_names = set[str](), ["torch", "pydantic"]
    while open_names:
        name = normal(open_names.pop())
        if name in names:
            continue
        try:
            requirements = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        names.add(name)
        open_names += [re.split(r"[^\w.-]", text)[0] for text in requirements if "extra ==" not in text]
    modules = metadata.packages_distributions().items()
    return {module for module, packages in modules if names & set(map(normal, packages))}


@pytest.fixture(scope="module")
def base_environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("base")
    (folder / "sitecustomize.py").write_text(CUSTOMIZE)
    kept = base_modules() | {*SOURCES, "setuptools", "_distutils_hack"}
    lists = json.dumps([list(metadata.packages_distributions()), sorted(kept)])
    path = ":".join(map(str, [folder, *dict.fromkeys(source.parent for source in SOURCES.values())]))
    return os.environ | {"PYTHONPATH": path, "BASE_INSTALL": lists, "PYTHONWARNINGS": "ignore"}


@pytest.fixture(scope="module")
def messages(base_environment: dict[str, str]) -> dict[str, str]:
    """Standard error of each command, with its exit code. One process runs all."""
    commands = [[name, *words] for name, words in (USABLE | NEEDS_MORE).items()] + [["train", CONFIG, "--dry-run"]]
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        input=json.dumps(commands),
        env=base_environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    parts = [part.partition("\n") for part in done.stderr.split("## ")[1:]]
    assert [name for name, _, _ in parts] == [words[0] for words in commands], done.stderr
    return {name: text for name, _, text in parts}


def test_all_commands_are_asked() -> None:
    assert {*USABLE, *NEEDS_MORE, *OTHER} == {*installed_commands()}


@pytest.mark.parametrize("name", USABLE)
def test_a_command_works_with_the_base_install(name: str, messages: dict[str, str]) -> None:
    assert messages[name] == "exit 0\n"


@pytest.mark.parametrize("name", NEEDS_MORE)
def test_a_command_names_the_extra(name: str, messages: dict[str, str]) -> None:
    assert "Traceback" not in messages[name] and messages[name].endswith("exit 2\n")
    assert f"error: megatron-dppo {name} needs the extra [train]" in messages[name], messages[name]
    assert "pip install '.[train]'" in messages[name]


def test_an_example_that_would_train_names_the_extra(base_environment: dict[str, str], tmp_path: Path) -> None:
    model = tmp_path / "megatron_dppo/models" / f"smollm2-135m-instruct-{GGUF_SHA256[:8]}"
    model.mkdir(parents=True)
    command = [sys.executable, "-m", "megatron_dppo.commands.main", "examples", "smollm2", "--to", str(tmp_path)]
    environment = base_environment | {"XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "megatron-dppo examples needs the extra [train]" in done.stderr


@pytest.mark.slow
def test_doctor_says_why_it_tests_nothing(base_environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "megatron_dppo.commands.main", "doctor"]
    done = subprocess.run(command, env=base_environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr, done.stderr
    assert "training needs the extra [train]; not installed: aiohttp, " in done.stdout
