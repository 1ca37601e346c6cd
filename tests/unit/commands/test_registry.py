"""Commands are entry points: which are there, who may offer them, and that only the one that is named is imported."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest

from megatron_dppo.commands import registry
from megatron_dppo.errors import ConfigError
from megatron_dppo.functions import packages
from source_folders import ROOT


def point(name: str, value: str) -> EntryPoint:
    return EntryPoint(name, value, registry.GROUP)


def offer(monkeypatch: pytest.MonkeyPatch, *points: EntryPoint) -> None:
    monkeypatch.setattr(packages, "entry_points", lambda group: points)


def test_each_installed_command_has_what_a_command_needs() -> None:
    points = registry.installed_commands()
    assert {"train", "plan", "port", "report"} <= points.keys() and list(points) == sorted(points)
    for each in points.values():
        command = registry.load_command(each)
        assert command.HELP and not command.HELP.endswith(".") and isinstance(command.HAS_OVERRIDES, bool)


def test_one_name_of_two_packages_is_an_error_and_the_same_module_twice_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    train = point("train", "megatron_dppo.commands.train")
    offer(monkeypatch, train, train, point("mine", "a"))
    assert [*registry.installed_commands()] == ["mine", "train"]
    offer(monkeypatch, train, point("train", "elsewhere.train"))
    with pytest.raises(ConfigError, match=r"megatron_dppo.commands: megatron_dppo.commands.train"):
        registry.installed_commands()


def test_a_source_folder_without_an_installation_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, point("mine", "a"))
    with pytest.raises(ConfigError, match="pip install -e"):
        registry.installed_commands()


def test_a_module_that_lacks_a_part_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "half_a_command", SimpleNamespace(HELP="x", run=print))
    with pytest.raises(ConfigError, match="half_a_command has no HAS_OVERRIDES, add_arguments"):
        registry.load_command(point("half", "half_a_command"))


def test_only_the_command_that_is_named_is_imported() -> None:
    program = (
        "import sys\nfrom megatron_dppo.commands.main import main\ncode = main(['help', 'loss.name'])\n"
        "others = [m for m in sys.modules if m.startswith('megatron_dppo_') or 'commands.serve' in m]\n"
        "print(code, others, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    # The errors, and the names of a key's values, are of the lowest package.
    below = [f"megatron_dppo_engines{part}" for part in ("", ".errors", ".serving")]
    assert done.stdout.splitlines()[-1] == f"0 {below} False"
