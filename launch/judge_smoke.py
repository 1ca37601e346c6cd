"""The verdict of launch/smoke.sh on the run that it stopped and resumed: one line for each part."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NUM_STEPS = 4
MAX_DISAGREEMENT = 0.05
"""Share of token-layers in which the trainer's routers would choose other experts than the server's did."""


def judge(folder: Path, first_code: int, second_code: int) -> Iterator[tuple[str, bool, str]]:
    """Yield part, whether it is good, and what was seen.

    Args:
        folder: Folder of the run.
        first_code: Exit code of the start that was ended by SIGTERM.
        second_code: Exit code of the one that resumed.
    """
    # A sync whose weights the server does not prove to have ends the run, as does a failed probe.
    yield "train, sync and proof of weights", first_code == 0, f"exit code {first_code} of the first start"
    yield "resume, sync and proof of weights", second_code == 0, f"exit code {second_code} of the second start"
    lines = _read_lines(folder / "metrics.jsonl")
    steps = [line for line in lines if line.get("step", 0) > 0 and "rollout/reward" in line]
    numbers = [line["step"] for line in steps]
    yield "steps", numbers == list(range(1, NUM_STEPS + 1)), f"steps {numbers}, expected 1 to {NUM_STEPS}"
    starts = _read_lines(folder / "starts.jsonl")
    resumed = starts[-1].get("resumed_step") if starts else None
    yield "save at SIGTERM and resume", len(starts) == 2 and bool(resumed), f"the second start resumed step {resumed}"
    for name, limit in (("train/router_missing", 0.0), ("train/router_disagreement", MAX_DISAGREEMENT)):
        values = [step.get(name, math.nan) for step in steps]
        is_good = bool(values) and all(value <= limit for value in values)
        yield f"router replay: {name}", is_good, f"{max(values, default=math.nan):.3g}, at most {limit:g}"
    differences = [step.get("train/abs_prob_diff_first", math.nan) for step in steps]
    is_finite = bool(differences) and all(map(math.isfinite, differences))
    yield "log-probabilities of both programs", is_finite, f"mean |pi - mu| {max(differences, default=math.nan):.2g}"
    norms = [step.get("train/grad_norm", math.nan) for step in steps]
    yield "gradients", any(norm > 0 for norm in norms) and all(map(math.isfinite, norms)), f"norms {_list(norms)}"
    exported = sorted(path.name for path in (folder / "hf").glob("*.safetensors"))
    yield "exported model", bool(exported), ", ".join(exported) or "no safetensors in hf/"


def _read_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _list(values: list[float]) -> str:
    return ", ".join(f"{value:.2g}" for value in values)


def main() -> int:
    """Print the verdict; return 1 if a part is not good."""
    results = list(judge(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
    print(f"\nsmoke: {sys.argv[1]}")
    for part, is_good, text in results:
        print(f"{'ok    ' if is_good else 'FAILED'}  {part}: {text}")
    return 0 if all(is_good for _, is_good, _ in results) else 1


if __name__ == "__main__":
    sys.exit(main())
