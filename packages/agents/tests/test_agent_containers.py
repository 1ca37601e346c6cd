"""Programs in containers: the command lines, with a script in place of podman, docker and Apptainer."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.config.rollout import AgentConfig
from megatron_dppo.errors import GenerateError
from megatron_dppo.types import Completion, SamplingParams
from megatron_dppo_agents.containers import check_images, choose_image
from megatron_dppo_agents.generate import AgentFunction
from test_agent_isolation import CALL
from tests.unit.scripted import TASK, World

IMAGE = "localhost/megatron-dppo-test:python"
SCRIPT = f"""#!{sys.executable} -S
import json, os, sys
arguments = sys.argv[1:]
with open(os.environ["CONTAINERS_LOG"], "a") as file:
    file.write(json.dumps([arguments, dict(os.environ)]) + "\\n")
if arguments[:2] == ["image", "inspect"]:
    sys.exit("gone" in arguments)
if arguments[0] in ("run", "exec"):
    if "broken" in arguments:
        print("no such file")
        sys.exit(127)
    for name, value in os.environ.copy().items():
        if name.startswith("APPTAINERENV_"):
            os.environ[name.removeprefix("APPTAINERENV_")] = value
    program = arguments.index("-c")
    os.execv(sys.executable, [sys.executable, *arguments[program:]])
"""
"""Stands in for a container tool: logs its calls, and runs the program outside of any container."""


@pytest.fixture
def world(world: World) -> World:
    world.script = {"assistant\n": "ok"}
    return world


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """File to which the scripts that stand in for the tools write their calls."""
    for tool in ("podman", "docker", "apptainer"):
        (tmp_path / tool).write_text(SCRIPT)
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("CONTAINERS_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("SECRET_OF_TRAINER", "s")
    monkeypatch.setenv("WANTED", "w")
    return tmp_path / "log"


def play(world: World, code: str, metadata: Any = None, **settings: Any) -> Completion:
    container = {"image": IMAGE, "network": "host", **settings.pop("container", {})}
    settings = {"reward": "exit", "isolation": "podman", "container": container, **settings}
    engine = world.engine(["python3", "-c", CALL + code], **settings)
    (result,) = engine.generate([replace(TASK, metadata=metadata or {})], SamplingParams(max_new_tokens=400, seed=1))
    return result


def calls(log: Path, first: str) -> list[tuple[list[str], dict[str, str]]]:
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    return [(arguments, variables) for arguments, variables in entries if arguments[0] == first]


def test_the_command_has_limits_and_no_value_of_a_variable(world: World, log: Path) -> None:
    container = {"user": "5:6", "read_only": True, "max_cpus": 1.5, "max_processes": 9, "options": ["--volume=/a:/b"]}
    settings = {"container": container, "max_memory_gb": 2.0, "max_cpu_seconds": 7, "pass_env": ["WANTED", "ABSENT"]}
    result = play(world, "sys.exit(os.environ['WANTED'] != 'w')", **settings)
    assert (result.reward, result.failure) == (1.0, "")
    ((arguments, variables),) = calls(log, "run")
    before, after = arguments[: arguments.index(IMAGE)], arguments[arguments.index(IMAGE) + 1 :]
    names = ["WANTED", "OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY"]
    assert [each for each in before if each.startswith("--env")] == [f"--env={name}" for name in names]
    assert {"--memory=2147483648b", "--cpus=1.5", "--pids-limit=9", "--ulimit=cpu=7:7", "--user=5:6"} <= {*before}
    assert {"--rm", "--pull=never", "--cap-drop=all", "--security-opt=no-new-privileges", "--network=host"} <= {*before}
    assert {"--read-only", "--tmpfs=/tmp", "--http-proxy=false"} <= {*before}
    assert before[-2:] == ["--volume=/a:/b", "--entrypoint=python3"] and after[0] == "-c"
    assert variables["OPENAI_API_KEY"] not in " ".join(arguments) and "SECRET_OF_TRAINER" not in variables
    assert not calls(log, "rm"), "the tool itself removes a container whose program ends"


def test_apptainer_gets_variables_by_their_prefix(world: World, log: Path, tmp_path: Path) -> None:
    image = tmp_path / "agent.sif"
    image.touch()
    settings: dict[str, Any] = {"isolation": "apptainer", "container": {"image": str(image)}, "pass_env": ["WANTED"]}
    assert play(world, "sys.exit(os.environ['WANTED'] != 'w')", **settings).reward == 1.0
    ((arguments, variables),) = calls(log, "exec")
    options = arguments[1 : arguments.index(str(image))]
    assert options == ["--containall", "--no-privs", "--writable-tmpfs"]
    assert {"OPENAI_API_KEY", "WANTED"}.isdisjoint(variables) and variables["APPTAINERENV_WANTED"] == "w"
    with pytest.raises(GenerateError, match=r"no.sif"):
        check_images(AgentConfig(command=["a"], isolation="apptainer", container=_container("no.sif")), ["no.sif"])


def test_each_row_names_its_image(world: World, log: Path) -> None:
    container = {"image": None, "image_column": "docker_image"}
    assert play(world, "", {"docker_image": "one:1"}, container=container, isolation="docker").reward == 1.0
    ((arguments, _),) = calls(log, "run")
    assert "one:1" in arguments and not calls(log, "image")
    failure = play(world, "", container=container, isolation="docker").failure
    assert re.search(r"column 'docker_image'.*got None", failure)
    config = AgentConfig(command=["a"], isolation="docker", container=_container(image_column="i"))
    assert [choose_image(config, each) for each in ({}, {"i": "x"})] == ["a", "x"]
    for bad in ("--privileged", "", 3):
        with pytest.raises(GenerateError, match="an image"):
            choose_image(config, {"i": bad})


def test_missing_images_are_named_before_the_run_and_never_pulled(log: Path) -> None:
    config = AgentConfig(command=["a"], isolation="podman", container=_container("gone"))
    with pytest.raises(GenerateError, match=r"'gone'.*podman pull"):
        AgentFunction(config, {})
    images = [f"image:{number}" for number in range(120)]
    check_images(config, images)
    assert [len(arguments) - 2 for arguments, _ in calls(log, "image")][-3:] == [50, 50, 20]
    with pytest.raises(GenerateError, match=r"'gone' does not"):
        check_images(config, [*images, "gone"])


def test_a_program_that_cannot_be_started_has_no_reward(world: World, log: Path) -> None:
    result = play(world, "", {}, container={"options": ["broken"]})
    assert result.reward is None and "podman cannot start a container of" in result.failure
    assert "no such file" in result.failure


def test_a_container_that_takes_too_long_is_removed(world: World, log: Path) -> None:
    result = play(world, "time.sleep(60)", timeout_seconds=1.0, isolation="docker")
    assert "took longer" in result.failure
    ((arguments, _),) = calls(log, "run")
    (name,) = (each.removeprefix("--name=") for each in arguments if each.startswith("--name="))
    assert [each for each, _ in calls(log, "rm")] == [["rm", "--force", name]]


def _container(image: str = "a", **settings: Any) -> Any:
    return {"image": image, "network": "host", **settings}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"container": {"image": "a"}}, "no effect with agent.isolation = 'landlock'"),
        ({"isolation": "podman"}, "an image; set agent.container.image"),
        ({"isolation": "docker", "container": {"image": "a"}}, "network = 'endpoint'"),
        ({"isolation": "apptainer", "container": {"image": "a"}}, "Set it to 'host'"),
        ({"isolation": "apptainer", "container": _container(user="1")}, r"agent.container.user with"),
        ({"isolation": "apptainer", "container": _container(), "max_cpu_seconds": 1}, r"agent.max_cpu_seconds with"),
        ({"isolation": "podman", "command": None, "function": "a:b", "container": _container()}, r"needs agent.comm"),
    ],
)
def test_settings_that_a_tool_cannot_keep_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AgentConfig(**{"command": ["a"], **settings})
