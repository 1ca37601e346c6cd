"""Results of a run without those that depend on the clock, and invariants right after a kill."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from megatron_dppo.setup.run_folder import UNSAVED
from tests.faults.kill_points.launcher import Ended

_CLOCK = {"starts.jsonl", ".megatron_dppo_run.json", "summary.json", ".metadata", "manifest.json"}
"""Files that tell when and how often the run was started, or that pickle sets: they have to be there. What a manifest
says is compared with the files instead."""
_COMPLETED = re.compile(r"rename checkpoints/(step_\d+)\.partial -> checkpoints/\1 \| after")
_ADDRESS = re.compile(rb"127\.0\.0\.1:\d+")
"""Names of the server, which has another port in each case."""
_RESUMED = re.compile(r"resumed  \S+ \(step (\d+),")


def left_behind(run: Path, *, evidence: str = "exact") -> dict[str, str]:
    """Each file of a run's folder and the digest of its content; ``evidence``: see ``Variant``."""
    # A start without a checkpoint keeps the metrics of the attempt before it, which an undisturbed run does not have.
    paths = [path for path in sorted(run.rglob("*")) if path.relative_to(run).parts[0] != UNSAVED]
    files = [path for path in paths if not path.is_dir()]
    return {path.relative_to(run).as_posix(): _content(path, run, evidence) for path in files} | {
        path.relative_to(run).as_posix() + "/": "" for path in paths if path.is_dir()
    }


def _content(path: Path, run: Path, evidence: str) -> str:
    name = path.relative_to(run).as_posix()
    if path.name in _CLOCK:
        return ""
    if name == "metrics.jsonl":
        records = [_untimed(json.loads(line)) for line in path.read_text().splitlines()]
        return _digest(json.dumps(records).encode())
    data = path.read_bytes()
    if path.name == "state.json" and evidence != "exact":
        state = json.loads(data)
        comparable = sorted if evidence == "names" else _rounded
        of_servers = state["guard"]["evidence"]
        state["guard"]["evidence"] = {server: comparable(statistics) for server, statistics in of_servers.items()}
        data = json.dumps(state).encode()
    content = _ADDRESS.sub(b"server", data)
    # Each case runs in a folder of its own, and a run records absolute paths.
    return _digest(content.replace(str(run.parent).encode(), b"folder"))


def _rounded(statistics: dict[str, list[float]]) -> dict[str, list[float]]:
    return {name: [round(value, 9) for value in values] for name, values in statistics.items()}


def _untimed(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if not key.startswith("perf/")}


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def differences(found: dict[str, str], expected: dict[str, str]) -> list[str]:
    """Return the files that are missing, additional, or have another content."""
    changed = sorted(name for name in found.keys() & expected.keys() if found[name] != expected[name])
    return [
        *(f"{name} is missing" for name in sorted(expected.keys() - found.keys())),
        *(f"{name} is left over" for name in sorted(found.keys() - expected.keys())),
        *(f"{name} has other content" for name in changed),
    ]


def manifest_problems(run: Path) -> list[str]:
    """Checkpoints whose files are not those of their manifest."""
    problems = []
    for checkpoint in sorted((run / "checkpoints").glob("step_*")):
        try:
            records = json.loads((checkpoint / "manifest.json").read_text())["files"]
            result = {
                path.name: [path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()]
                for path in checkpoint.iterdir()
                if path.name != "manifest.json"
            }
            problems += [f"{checkpoint.name}: the manifest is not that of the files"] if result != records else []
        except (OSError, ValueError, KeyError) as error:
            problems.append(f"{checkpoint.name}: {type(error).__name__}: {error}")
    return problems


def completed_step(trace: list[str]) -> int:
    """The newest checkpoint that had its name when the run was killed; 0 = none."""
    return max((int(match[1].removeprefix("step_")) for line in trace if (match := _COMPLETED.search(line))), default=0)


def resumed_step(ended: Ended) -> int:
    """Return the step from which a start continued. 0 is the beginning."""
    match = _RESUMED.search(ended.output)
    return int(match[1]) if match else 0
