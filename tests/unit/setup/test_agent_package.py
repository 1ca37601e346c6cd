"""The package that runs agents is found by its entry point; without one, or with two, ``[agent]`` is refused."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

import megatron_dppo_agents.trainer
from megatron_dppo.errors import ConfigError
from megatron_dppo.functions import packages
from megatron_dppo.setup import agents


def test_the_installed_package_is_loaded() -> None:
    assert agents.load_agent_package() is megatron_dppo_agents.trainer


@pytest.mark.parametrize(("values", "named"), [([], r"\[agent\] needs .* got"), (["a", "b"], "a of .* and b of")])
def test_none_and_two_are_refused(values: list[str], named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    points = [EntryPoint("agent", value, agents.GROUP) for value in values]
    monkeypatch.setattr(packages, "entry_points", lambda group: points)
    with pytest.raises(ConfigError, match=named):
        agents.load_agent_package()
