"""CPU seconds of a program and all its children at each record that it writes."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

_POLL_SECONDS = 0.005


@dataclass(frozen=True)
class Reading:
    """The state of a run at one record of its metrics file."""

    step: int
    """Completed rollout steps; 0 is just before the first rollout."""
    reward: float | None
    """Mean training reward of the rollout of that step."""
    cpu_seconds: float
    """User and system seconds of all processes since the start of the program."""
    wall_seconds: float
    """Wall seconds since the start of the program."""

    def as_dict(self) -> dict[str, float | int | None]:
        """Return the reading for JSON."""
        return asdict(self)


def cpu_seconds(process: psutil.Process) -> float:
    """Return user and system seconds of a process and its descendants, including ended ones."""
    total = 0.0
    for member in [process, *process.children(recursive=True)]:
        try:
            times = member.cpu_times()
        except psutil.NoSuchProcess:
            continue  # its parent counts it in children_user at the next reading
        total += times.user + times.system + times.children_user + times.children_system
    return total


def _end(program: psutil.Process) -> None:
    """End a program with all its descendants: torchrun puts each worker into a session of its own."""
    try:
        members = [*program.children(recursive=True), program]
    except psutil.NoSuchProcess:
        return
    for member in members:
        with suppress(psutil.NoSuchProcess):
            member.kill()


def run_metered(
    command: Sequence[str],
    environment: Mapping[str, str],
    metrics: Path,
    log: Path,
    reward_key: str,
    enough: Callable[[list[Reading]], bool],
) -> list[Reading]:
    """Start a program and read its CPU time at each new line of ``metrics``; end it when ``enough`` says so.

    Args:
        command: the program.
        environment: its whole environment.
        metrics: JSON lines with the keys ``step`` and, above step 0, ``reward_key``. Does not exist yet.
        log: gets everything that the program prints.
        reward_key: the key of the mean reward.
        enough: sees all readings so far.

    Raises:
        RuntimeError: the program ended with an error.
    """
    readings: list[Reading] = []
    started = time.perf_counter()
    with log.open("w") as output:
        program = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        tree = psutil.Process(program.pid)
        read = 0
        done = False
        try:
            while not done and program.poll() is None:
                time.sleep(_POLL_SECONDS)
                if not metrics.is_file() or metrics.stat().st_size <= read:
                    continue
                cpu, wall = cpu_seconds(tree), time.perf_counter() - started
                text = metrics.read_bytes()[read:]
                complete = text[: text.rfind(b"\n") + 1]
                read += len(complete)
                for line in complete.decode().splitlines():
                    record = json.loads(line)
                    readings.append(Reading(record["step"], record.get(reward_key), round(cpu, 3), round(wall, 3)))
                    # On a loaded machine several records can come at once; those behind the first enough do not count.
                    if done := enough(readings):
                        break
        finally:
            _end(tree)
            program.wait()
    if not done and program.returncode:
        raise RuntimeError(f"{' '.join(command[:4])} ... ended with exit code {program.returncode}; see {log}")
    return readings
