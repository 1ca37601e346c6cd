"""Advice of agents' containers and sandboxes, of doctor and of plan, followed from the state that prints it."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.config.reward_options import CodeOptions
from megatron_dppo.config.rollout import AgentConfig
from megatron_dppo.errors import ConfigError, GenerateError, RewardError, UserError
from megatron_dppo.rewards import code
from megatron_dppo.rewards.code import Code
from megatron_dppo_agents import containers, generate
from megatron_dppo_agents.containers import check_images, choose_image
from megatron_dppo_agents.generate import AgentFunction
from megatron_dppo_doctor.doctor import command
from megatron_dppo_plan.machine import get_machine
from megatron_dppo_plan.plan import PlannedModel
from megatron_dppo_plan.search import parse_axes
from test_agent_containers import IMAGE, log
from tests.unit.configs import config

__all__ = ["log"]
ROOT = Path(__file__).parents[3]


def agent(**settings: Any) -> AgentConfig:
    return AgentConfig(**{"command": ["python3"], **settings})


def refuse(*_: Any, **__: Any) -> None:
    raise OSError("unshare: Operation not permitted")


def test_an_image_is_accepted_where_the_message_wants_it(log: Path) -> None:
    container = {"image_column": "image", "network": "host"}
    with pytest.raises(GenerateError) as error:
        choose_image(agent(isolation="docker", container=container), {"other": 1})
    assert "in the row's column 'image'" in str(error.value) and "or set agent.container.image" in str(error.value)
    assert choose_image(agent(isolation="docker", container=container), {"image": "a"}) == "a"
    assert choose_image(agent(isolation="docker", container=container | {"image": "b"}), {"other": 1}) == "b"


def test_a_tool_and_an_image_that_were_installed_are_enough(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    podman = agent(isolation="podman", container={"image": IMAGE, "network": "host"})
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "/nowhere")
        with pytest.raises(GenerateError, match="such program in PATH"):
            AgentFunction(podman, {})
    AgentFunction(podman, {}).close()
    image = tmp_path / "agent.sif"
    apptainer = agent(isolation="apptainer", container={"image": str(image), "network": "host"})
    with pytest.raises(GenerateError, match="`apptainer build`"):
        AgentFunction(apptainer, {})
    image.touch()
    AgentFunction(apptainer, {}).close()
    with pytest.raises(GenerateError, match="`podman pull`"):
        check_images(podman, ["gone"])
    check_images(podman, [IMAGE])


def test_without_the_right_to_make_a_network_the_hosts_is_accepted(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containers, "LoopbackNetwork", refuse)
    with pytest.raises(GenerateError, match=r"root.*'host'"):
        AgentFunction(agent(isolation="podman", container={"image": IMAGE}), {})
    for network in ("host", "agents"):
        AgentFunction(agent(isolation="podman", container={"image": IMAGE, "network": network}), {}).close()


def test_without_namespaces_or_landlock_the_weaker_isolation_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "landlock_version", lambda: 4)
    monkeypatch.setattr(generate, "isolated_command", lambda *_: ["false"])
    with pytest.raises(GenerateError, match=r"agent.isolation = 'namespace': .*or set agent.isolation = 'landlock'"):
        AgentFunction(agent(isolation="namespace"), {})
    AgentFunction(agent(isolation="landlock"), {}).close()
    monkeypatch.setattr(generate, "landlock_version", lambda: 0)
    with pytest.raises(GenerateError, match=r"agent.isolation = 'none'"):
        AgentFunction(agent(isolation="landlock"), {})
    AgentFunction(agent(isolation="none"), {}).close()


def test_a_program_is_found_by_its_path_or_in_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin/solve"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    with pytest.raises(GenerateError, match="put it in PATH"):
        AgentFunction(agent(command=["solve"], isolation="none"), {})
    AgentFunction(agent(command=[str(program)], isolation="none"), {}).close()
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    AgentFunction(agent(command=["solve"], isolation="none"), {}).close()


def test_a_machine_without_sandboxes_gets_commands_that_sysctl_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "probe", lambda sandbox: "unshare: not permitted" if sandbox.namespaces else "")
    with pytest.raises(RewardError) as error:
        Code(CodeOptions(), "reward")
    text = str(error.value)
    (command,) = re.findall(r"`(sysctl [^`]+)`", text)
    settings = [command.split()[-1], *re.findall(r"kernel\.\w+=\S+", text.replace(";", " ").replace(",", " "))]
    assert len(settings) == 3 and all(re.fullmatch(r"[a-z_.]+=\d+", each) for each in settings), text
    help_text = subprocess.run(["sysctl", "--help"], capture_output=True, text=True).stdout if _has("sysctl") else ""
    if "--dry-run" in help_text:  # prints what it would set
        done = subprocess.run([*command.split(), "--dry-run"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    Code(CodeOptions(network="allowed"), "reward")
    monkeypatch.setattr(code, "probe", lambda sandbox: "no")
    with pytest.raises(RewardError) as error:
        Code(CodeOptions(network="allowed"), "reward")
    assert "megatron-dppo doctor" not in str(error.value), "doctor tries no sandbox"
    with pytest.raises(RewardError, match="Python interpreter"):
        Code(CodeOptions(python="/nowhere"), "reward")
    monkeypatch.setattr(code, "probe", lambda sandbox: "")
    Code(CodeOptions(python=sys.executable), "reward")


def _has(program: str) -> bool:
    return shutil.which(program) is not None


def doctor(*words: str) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_known_args(["--no-self-test", *words])


@pytest.mark.parametrize(
    ("words", "advice", "mended"),
    [
        (["--run.seed=3"], "put its file", ["{config}", "--run.seed=3"]),
        (["--json", "{new}"], "leave it out", []),
        (["--servers", "http://[::1"], "expected URLs as http://host:port", ["--servers", "http://127.0.0.1:9"]),
    ],
)
def test_doctors_advice_is_accepted_by_doctor(
    words: list[str], advice: str, mended: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"config": str(ROOT / "examples/chain_sum/dppo.toml"), "new": str(tmp_path / "r.json")}
    with pytest.raises(ConfigError, match=re.escape(advice)):
        command.run(*doctor(*(word.format(**places) for word in words)))
    command.run(*doctor(*(word.format(**places) for word in mended)))
    assert "megatron-dppo" in capsys.readouterr().out


def test_plans_advice_is_accepted_by_plan() -> None:
    with pytest.raises(UserError, match="expected KEY=VALUE,VALUE such as ") as error:
        parse_axes(["tensor-model-parallel-size"])
    assert parse_axes([str(error.value).split("such as ")[1]]) == {"tensor-model-parallel-size": ["1", "2"]}
    with pytest.raises(UserError, match="expected one of ") as error:
        get_machine("cray")
    names = str(error.value).split("expected one of ")[1].split(", ")
    assert names and all(get_machine(name) for name in names)
    model = str(ROOT / "examples/chain_sum/model")
    with pytest.raises(UserError, match=r"--model\.provider builtin"):
        PlannedModel.from_config(config(model={"path": model, "provider": "megatron-bridge"}))
    assert PlannedModel.from_config(config(model={"path": model, "provider": "builtin"})).parameters > 0
