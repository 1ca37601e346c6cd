"""Agents whose programs run in containers, by the command line of podman, docker or Apptainer.

A container has none of the trainer's variables, files and processes. It is removed when its episode ends, and when the
trainer ends in any way, by a process of its own (``_WATCHER``). Containers that survive both, such as those of a
machine that was switched off, are removed when the run starts again.
"""

import asyncio
import hashlib
import os
import secrets
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_dppo.config.container import ENDPOINT_NETWORK
from megatron_dppo.config.rollout import AgentConfig
from megatron_dppo.errors import GenerateError
from megatron_dppo_agents.loopback_network import LoopbackNetwork
from megatron_dppo_agents.runner import (
    AgentExit,
    AgentTask,
    endpoint_variables,
    exit_of_program,
    program_variables,
    run_program,
    stop_signals_unblocked,
)

_RUN_LABEL = "megatron-dppo.run"
"""Label with a digest of the run's folder, by which its containers are listed: a filter of podman takes no comma."""
_FOLDER_LABEL = "megatron-dppo.folder"
"""Label with the folder, for people."""
_OWNER_LABEL = "megatron-dppo.owner"
"""Label with the process that started the container (``_identify_process``)."""
_TOOL_VARIABLES = ("DOCKER_", "CONTAINER", "APPTAINER_", "XDG_", "DBUS_")
"""Beginnings of the trainer's variables that the tool gets. They are not passed to the program in the container."""
_NOT_STARTED = range(125, 128)
"""Exit statuses of the tools if they cannot start the program."""
_REMOVE = {"podman": ["rm", "--force", "--time", "0"], "docker": ["rm", "--force"]}
_TOOL_SECONDS = 120.0
_IMAGES_AT_ONCE = 50
# Its standard input ends with the trainer, also after SIGKILL. Containers that were being created then appear later.
_WATCHER = """
trap "" INT TERM HUP
label=$1
shift
cat > /dev/null
for pause in 0 2; do
    sleep "$pause"
    for id in $("$1" ps --all --quiet --filter "label=$label"); do "$@" "$id"; done
done > /dev/null 2>&1
"""


class ContainerAgent:
    """A program that is started for each episode, in a container of its own."""

    def __init__(self, command: Sequence[str], config: AgentConfig, run_folder: Path) -> None:
        self._command = list(command)
        self._config = config
        self._tool = config.isolation
        self._folder = str(run_folder.absolute())
        self._run = hashlib.sha256(self._folder.encode()).hexdigest()[:16]
        self._owner = _identify_process(os.getpid())
        self._watcher: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        check_images(config, [] if config.container.image is None else [config.container.image])
        self.network = _make_network(config) if config.container.network == ENDPOINT_NETWORK else None
        """Network in which the endpoint must listen. None: that of this process."""

    async def run(self, task: AgentTask) -> AgentExit:
        """See ``runner.Agent``."""
        try:
            image = choose_image(self._config, task.metadata)
        except GenerateError as error:
            return AgentExit(None, str(error))
        name = f"megatron-dppo-{secrets.token_hex(8)}"
        variables = {each: os.environ[each] for each in self._config.pass_env if each in os.environ}
        variables |= endpoint_variables(task, with_keys=True)
        if self._tool == "apptainer":
            environment = {f"APPTAINERENV_{each}": value for each, value in variables.items()}
        else:
            environment = variables
        has_ended = False
        try:
            command = self._start_command(name, image, variables)
            status, output = await run_program(command, _tool_environment() | environment, task)
            has_ended = True
        except OSError as error:
            return AgentExit(None, f"{self._tool} cannot be started: {error}")
        finally:
            # The tool removes a container whose program has ended. Apptainer's ends with the tool.
            if not has_ended and self._tool != "apptainer":
                await asyncio.to_thread(_run_tool, [self._tool, *_REMOVE[self._tool], name])
        result = exit_of_program(self._command[0], status, output, task)
        if status in _NOT_STARTED:
            # Not the reward 0 of an exit status, because the program has not run.
            return AgentExit(None, f"{self._tool} cannot start a container of {image}: {result.failure}")
        return result

    async def start(self) -> None:
        """Remove what an earlier start of the run left behind, and watch over the containers of this one."""
        await asyncio.to_thread(self._start)

    def close(self) -> None:
        """Remove all containers of this process."""
        if self._watcher is not None:
            assert self._watcher.stdin is not None
            self._watcher.stdin.close()
            self._watcher.wait()
        if self.network is not None:
            self.network.close()

    def _start(self) -> None:
        with self._lock:
            if self._watcher is not None or self._tool == "apptainer":
                return
            _remove_leftovers(self._tool, self._run)
            remove = [self._tool, *_REMOVE[self._tool]]
            with stop_signals_unblocked():
                self._watcher = subprocess.Popen(
                    ["sh", "-c", _WATCHER, "watcher", f"{_OWNER_LABEL}={self._owner}", *remove],
                    stdin=subprocess.PIPE,
                    env=_tool_environment(),
                    start_new_session=True,
                )

    def _start_command(self, name: str, image: str, variables: Iterable[str]) -> list[str]:
        """Return the command that runs the program. It has the names of variables, and the tool has their values."""
        config, container = self._config, self._config.container
        limits = {} if config.max_memory_gb is None else {"memory": f"{int(config.max_memory_gb * 2**30)}b"}
        if container.max_cpus is not None:
            limits["cpus"] = f"{container.max_cpus:g}"
        if self._tool != "apptainer" or "max_processes" in container.changed_keys():
            # Apptainer can limit only where a user may set up control groups.
            limits["pids-limit"] = str(container.max_processes)
        options = [f"--{key}={value}" for key, value in limits.items()]
        if self._tool == "apptainer":
            options += ["--containall", "--no-privs"] + ([] if container.read_only else ["--writable-tmpfs"])
            return ["apptainer", "exec", *options, *container.options, image, *self._command]
        network = container.network if self.network is None else f"ns:{self.network.path}"
        options += ["--rm", "--interactive", "--pull=never", "--log-driver=none", f"--name={name}"]
        labels = {_RUN_LABEL: self._run, _FOLDER_LABEL: self._folder, _OWNER_LABEL: self._owner}
        options += [f"--label={key}={value}" for key, value in labels.items()]
        options += [f"--network={network}", "--cap-drop=all", "--security-opt=no-new-privileges"]
        options += [f"--env={each}" for each in variables]
        if self._tool == "podman":
            options.append("--http-proxy=false")
        if config.max_cpu_seconds is not None:
            options.append(f"--ulimit=cpu={config.max_cpu_seconds}:{config.max_cpu_seconds}")
        if container.user:
            options.append(f"--user={container.user}")
        if container.read_only:
            options += ["--read-only", "--tmpfs=/tmp"]
        # Replaces the image's entry point, to which the command would otherwise be arguments.
        entry = f"--entrypoint={self._command[0]}"
        return [self._tool, "run", *options, *container.options, entry, image, *self._command[1:]]


def choose_image(config: AgentConfig, metadata: Mapping[str, Any]) -> str:
    """Return the image for a data row; ``GenerateError`` if neither the row nor ``agent.container.image`` names one."""
    container = config.container
    image = metadata.get(container.image_column) if container.image_column is not None else None
    image = container.image if image is None else image
    # A name that begins with a dash would be an option of the tool.
    if not isinstance(image, str) or not image or image.startswith("-"):
        raise GenerateError(
            f"expected the name of an image in the row's column {container.image_column!r} "
            f"(agent.container.image_column), got {image!r:.80}; add it, or set agent.container.image"
        )
    return image


def check_images(config: AgentConfig, images: Sequence[str]) -> None:
    """Check that images exist on this machine; ``GenerateError`` if some do not, or there is no tool."""
    if shutil.which(config.isolation) is None:
        raise GenerateError(f"agent.isolation = {config.isolation!r}: there is no such program in PATH; install it")
    if config.isolation == "apptainer":
        missing = [image for image in images if not Path(image).exists()]
        fix = "build it by `apptainer build`"
    else:
        missing = _missing(config.isolation, images)
        fix = f"get it by `{config.isolation} pull`"
    if missing:
        suffix = f" and {len(missing) - 1} others of {len(images)}" if len(missing) > 1 else ""
        raise GenerateError(
            f"agent.isolation = {config.isolation!r}: the image {missing[0]!r}{suffix} does not exist here, and a run "
            f"pulls none; {fix}"
        )


def _missing(tool: str, images: Sequence[str]) -> list[str]:
    missing: list[str] = []
    for start in range(0, len(images), _IMAGES_AT_ONCE):
        part = images[start : start + _IMAGES_AT_ONCE]
        # One call for all costs as much as one for each, so each is asked for only if any is missing.
        if _run_tool([tool, "image", "inspect", *part]).returncode:
            missing += [each for each in part if _run_tool([tool, "image", "inspect", each]).returncode]
    return missing


def _make_network(config: AgentConfig) -> LoopbackNetwork:
    try:
        return LoopbackNetwork()
    except OSError as error:
        raise GenerateError(
            f"agent.container.network = {ENDPOINT_NETWORK!r} needs root, or the capability SYS_ADMIN: {error}. Set it "
            "to 'host', or to a network of podman that reaches agent.host"
        ) from error


def _remove_leftovers(tool: str, run: str) -> None:
    """Remove containers of the run whose processes on this machine have ended."""
    listed = _run_tool([tool, "ps", "--all", "--quiet", "--filter", f"label={_RUN_LABEL}={run}"])
    if listed.returncode:
        raise GenerateError(f"agent.isolation = {tool!r}: it cannot list containers: {listed.stderr.strip()[-300:]}")
    label = f'{{{{index .Config.Labels "{_OWNER_LABEL}"}}}}'
    for container in listed.stdout.split():
        owner = _run_tool([tool, "inspect", "--type=container", "--format", label, container]).stdout.strip()
        host, _, process = owner.partition(":")
        pid = process.partition(":")[0]
        if host == socket.gethostname() and pid.isdigit() and _identify_process(int(pid)) != owner:
            _run_tool([tool, *_REMOVE[tool], container])


def _identify_process(pid: int) -> str:
    """Return machine, id and start time of a process. An id alone is used again after its process has ended."""
    try:
        start = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[19]
    except OSError:
        start = "ended"
    return f"{socket.gethostname()}:{pid}:{start}"


def _tool_environment() -> dict[str, str]:
    tool = {name: value for name, value in os.environ.items() if name.startswith(_TOOL_VARIABLES)}
    return program_variables(()) | tool


def _run_tool(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    with stop_signals_unblocked():
        return subprocess.run(
            command, capture_output=True, text=True, env=_tool_environment(), timeout=_TOOL_SECONDS, check=False
        )
