"""Versions of NCCL of trainer and servers, which must be equal for weights that are broadcast.

NCCL compares its version on all ranks of a communicator and refuses a mixture ("Mismatched NCCL version detected",
init.cc). Each torch brings a version of its own, and engines pin a torch.
"""

import json
import os
import shutil
import subprocess
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron_dppo_engines.errors import ConfigError

Engine = Literal["sglang", "vllm"]
_VERSIONS = tomllib.loads(Path(__file__).with_name("versions.toml").read_text(encoding="utf-8"))
TESTED: Mapping[str, str] = _VERSIONS["tested"]
"""Versions that CI runs: ``torch``, ``sglang`` and ``vllm`` with one NCCL, and ``sglang_newest``."""
NCCL_OF_TORCH: Mapping[str, str] = _VERSIONS["nccl_of_torch"]
"""NCCL that the wheels of torch require, by torch's major and minor version (metadata of the Python package index)."""
TORCH_OF_ENGINE: Mapping[Engine, Mapping[str, str]] = _VERSIONS["torch_of_engine"]
"""Torch that each version of an engine requires (metadata of the Python package index)."""
STATED_NCCL = "MEGATRON_DPPO_SERVER_NCCL"
"""Environment variable with the NCCL of servers that do not report it, such as SGLang in a container."""
_PROGRAM = """
import json, torch
nccl = torch.cuda.nccl.version() if torch.version.cuda else None
print(json.dumps({"torch": torch.__version__, "nccl": nccl and ".".join(map(str, nccl[:3]))}))
"""
_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class CollectiveVersions:
    """Versions and variables of one side of a communicator."""

    torch: str | None
    nccl: str | None
    """Version of NCCL. None on a CPU, or if it is unknown."""
    source: str = ""
    """Origin of the versions, if the program did not report them itself."""
    variables: Mapping[str, str | None] = field(default_factory=dict)
    """Known values of ``TRANSFER_VARIABLES``; None if a variable is not set."""

    def __str__(self) -> str:
        origin = f", {self.source}" if self.source else ""
        return f"NCCL {self.nccl or 'unknown'} (torch {self.torch or 'unknown'}{origin})"


def parse_versions(answer: Mapping[str, Any]) -> CollectiveVersions:
    """Return the versions of the JSON object that a vLLM worker or an interpreter returns."""
    variables = answer.get("variables")
    return CollectiveVersions(
        torch=answer["torch"], nccl=answer["nccl"], variables=variables if isinstance(variables, Mapping) else {}
    )


def assumed_versions(engine: Engine, version: str) -> CollectiveVersions:
    """Return the versions of a server that reports none: those that the user states, or else those that it pins."""
    if stated := os.environ.get(STATED_NCCL):
        return CollectiveVersions(torch=None, nccl=stated, source=STATED_NCCL)
    return pinned_versions(engine, version)


def pinned_versions(engine: Engine, version: str) -> CollectiveVersions:
    """Return what pip installs with a version of an engine; unknown versions give None."""
    torch = TORCH_OF_ENGINE[engine].get(version)
    nccl = None if torch is None else NCCL_OF_TORCH.get(".".join(torch.split(".")[:2]))
    return CollectiveVersions(torch=torch, nccl=nccl, source=f"which {engine} {version} pins" if torch else "")


def interpreter_versions(command: Sequence[str]) -> CollectiveVersions | None:
    """Return the versions in the environment of a command, or None if no Python of this machine starts it."""
    program = shutil.which(command[0]) if command else None
    if program is None or not Path(program).name.startswith("python"):
        return None
    try:
        query = [program, "-c", _PROGRAM]
        result = subprocess.run(query, capture_output=True, text=True, timeout=_SECONDS, check=True)
        return parse_versions(json.loads(result.stdout))
    except (OSError, subprocess.SubprocessError, ValueError, KeyError):
        return None


def find_mismatches(engine: Engine, server: CollectiveVersions, trainer: CollectiveVersions) -> Iterator[str]:
    """Yield why the server cannot join a communicator of the trainer, and the fix. What is unknown is no problem."""
    if server.nccl is not None and trainer.nccl is not None and server.nccl != trainer.nccl:
        hint = f". If it has another NCCL, as in a container, state it in {STATED_NCCL}" if server.source else ""
        yield (
            f"{server}, but the trainer has {trainer}: NCCL refuses a communicator of two versions, so "
            "rollout.weight_sync.method = 'distributed' would fail at the first weights. Fix: "
            f"{_pip_lines(engine, server, trainer)}; or set the method to 'disk'{hint}"
        )
    for name, value in server.variables.items():
        # NCCL's own default is on.
        if (value == "0") != ((wanted := trainer.variables.get(name)) == "0"):
            yield (
                f"{name} is {_shown(value)} in the server and {_shown(wanted)} in the trainer, and all ranks of a "
                "communicator need the same. Fix: start both with one value (megatron-dppo serve and launch/*.sh set 0)"
            )


def require_equal_versions(engine: Engine, command: Sequence[str], python: str) -> CollectiveVersions | None:
    """Compare the environment of a server's command with that of the trainer's Python, before servers start.

    Returns the versions of the servers; None if they are unknown, or both use one environment. Raises ``ConfigError``
    if NCCL differs.
    """
    server = interpreter_versions(command)
    trainer = None if server is None else interpreter_versions([python])
    if server is None or trainer is None:
        return None
    for problem in find_mismatches(engine, server, trainer):
        raise ConfigError(f"rollout.servers.command = {command[0]!r}: its environment has {problem}")
    return server


def _pip_lines(engine: Engine, server: CollectiveVersions, trainer: CollectiveVersions) -> str:
    fitting = [version for version in TORCH_OF_ENGINE[engine] if pinned_versions(engine, version).nccl == trainer.nccl]
    lines = [f"pip install '{engine}=={fitting[-1]}' in the servers' environment"] if fitting else []
    if server.torch is not None:
        lines.append(f"pip install 'torch=={server.torch.partition('+')[0]}' in the trainer's")
    return ", or ".join(lines) or f"install torch with NCCL {server.nccl} in the trainer's environment"


def _shown(value: str | None) -> str:
    return "not set" if value is None else value
