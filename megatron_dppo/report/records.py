"""Readers of a run's JSONL files, and the summary at the end of a run."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_dppo.errors import DataError
from megatron_dppo.files import read_regular_file, write_synced

Record = dict[str, Any]

DAMAGED = ".damaged"
"""End of the name of the file that gets the damaged lines."""

RENAMED_METRICS: Mapping[str, str] = {
    "rollout/breaches": "rollout/invalid_responses",
    "rollout/lost_servers": "rollout/evicted_servers",
    "rollout/kept_ids": "rollout/allowed_ids",
    "rollout/left_out/no_signal": "rollout/dropped_groups/no_signal",
    "rollout/left_out/surplus": "rollout/dropped_groups/surplus",
    "rollout/left_out/given_up": "rollout/dropped_groups/canceled",
    "train/anchor_abs_prob_diff": "train/recomputed_abs_prob_diff",
}
"""Name of each renamed metric, by its name in runs of older versions."""

Check = Callable[[Record], str]
"""Function that returns what is wrong with a record, or an empty text."""


def metric_problem(record: Record) -> str:
    """Return what is wrong with a record of ``metrics.jsonl``, or an empty text."""
    step = record.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step <= _MAX_STEP:
        return f"expected an integer of at least 0 as step, got {step!r}"
    for name, value in record.items():
        # Also false for NaN, which Python's JSON reads.
        if value is not None and not (isinstance(value, int | float) and abs(value) <= _MAX_VALUE):
            return f"expected a finite number or null as {name}, got {value!r}"
    return ""


def read_records(path: Path, check: Check = lambda record: "", *, skip_damaged: bool = False) -> list[Record]:
    """Return the objects of a file; none if the file does not exist. An incomplete last line is ignored.

    With ``skip_damaged`` lines are left out that are not such objects. A run reads its own logs this way, since a log
    must not decide whether the run goes on.
    """
    records, damaged = _read_lines(path, check)
    if damaged and not skip_damaged:
        number, _, problem = damaged[0]
        raise DataError(
            f"{path}, line {number}: {problem}. A run never writes such a line; fix or remove it, or move the file away"
        )
    return [record for _, record in records]


def read_metrics(path: Path, *, skip_damaged: bool = False) -> list[Record]:
    """Return the records of a ``metrics.jsonl``, see ``read_records``. Renamed metrics have their current names."""
    return [
        {RENAMED_METRICS.get(name, name): value for name, value in record.items()}
        for record in read_records(path, metric_problem, skip_damaged=skip_damaged)
    ]


def set_damaged_lines_aside(path: Path, check: Check) -> str:
    """Move damaged lines to the end of ``NAME.damaged``, so that a run can append; return a warning, or no text."""
    records, damaged = _read_lines(path, check)
    if not damaged:
        return ""
    aside = path.with_name(path.name + DAMAGED)
    with aside.open("ab") as file:
        file.write(b"".join(line + b"\n" for _, line, _ in damaged))
        file.flush()
        os.fsync(file.fileno())
    write_synced(path, "".join(line.decode() + "\n" for line, _ in records))
    number, _, problem = damaged[0]
    return (
        f"warning  {path} had {len(damaged)} damaged lines (line {number}: {problem}). The run continues without them; "
        f"they are in {aside}"
    )


_Read = tuple[list[tuple[bytes, Record]], list[tuple[int, bytes, str]]]
"""Lines with their objects, and number, line and problem of the damaged ones."""


def missing_records(folder: Path, step: int) -> str:
    """Return a note if ``metrics.jsonl`` lacks steps that the resumed checkpoint has. Empty if it lacks none."""
    recorded = {record["step"] for record in read_metrics(folder / "metrics.jsonl")}
    missing = sorted(set(range(1, step + 1)) - recorded)
    if not missing:
        return ""
    return (
        f"warning  {folder / 'metrics.jsonl'} has no record of {len(missing)} steps up to step {step}, from "
        f"step {missing[0]} on: it was deleted or cut. The run continues, and these records stay missing"
    )


def _read_lines(path: Path, check: Check) -> _Read:
    try:
        content = read_regular_file(path, _MAX_BYTES)
    except FileNotFoundError:
        return [], []
    except OSError as error:
        problem = f"cannot be read ({error.strerror})" if path.is_file() else "is not a file"
        raise DataError(f"{path} {problem}, but a run writes one with that name; move it away") from error
    records: list[tuple[bytes, Record]] = []
    damaged: list[tuple[int, bytes, str]] = []
    *lines, last = content.split(b"\n")
    for number, line in enumerate([*lines, last], start=1):
        if not line.strip():
            continue
        record, problem = _parse(line, check)
        if record is not None:
            records.append((line, record))
        # A complete line ends with a line break, so a bad last line was interrupted by a crash.
        elif number <= len(lines):
            damaged.append((number, line, problem))
    return records, damaged


_MAX_BYTES = 2**32
_MAX_STEP = 10**9
_MAX_VALUE = 1e300
"""Largest metric. The squares and sums of the charts stay finite numbers with far smaller ones."""


def _parse(line: bytes, check: Check) -> tuple[Record | None, str]:
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        return None, f"not JSON: {str(error)[:100]}"
    if not isinstance(record, dict):
        return None, f"expected a JSON object, got {type(record).__name__}"
    problem = check(record)
    return (None, problem) if problem else (record, "")


_WINDOW = 10
"""Steps averaged for the last reward. The first reward is that of step 1, sampled before any update."""


def summarize(
    folder: Path, *, world_size: int, layout: str, policy_updates: int, total_seconds: float
) -> dict[str, object]:
    """Write ``summary.json`` from the run's metrics and return it."""
    records = read_metrics(folder / "metrics.jsonl", skip_damaged=True)
    steps = [r for r in records if "perf/step_seconds" in r]
    rewards = [r["rollout/reward"] for r in steps if r.get("rollout/reward") is not None]
    evaluations = [r["eval/accuracy"] for r in records if r.get("eval/accuracy") is not None]
    train_seconds = sum(r["perf/step_seconds"] for r in steps)
    tokens = sum(r["perf/tokens"] for r in steps)
    summary = {
        "eval_before": evaluations[0] if evaluations else None,
        "eval_after": evaluations[-1] if evaluations else None,
        "reward_first": rewards[0] if rewards else None,
        "reward_last": mean(rewards[-_WINDOW:]),
        "train_seconds": round(train_seconds, 2),
        "total_seconds": round(total_seconds, 2),
        "world_size": world_size,
        "layout": layout,
        "policy_updates": policy_updates,
        "tokens_per_second": round(tokens / train_seconds, 1) if train_seconds else None,
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return summary


_MAX_CHARACTERS = 100


def mean(values: Sequence[float]) -> float | None:
    """Return the mean; None of no values."""
    return sum(values) / len(values) if values else None


def before_after_table(folder: Path, eval_score_name: str = "accuracy") -> str:
    """Return a table of the first and last value of the main metrics."""
    records = read_metrics(folder / "metrics.jsonl", skip_damaged=True)
    rows = [
        (f"held-out {eval_score_name} (greedy)", "eval/accuracy"),
        ("training reward", "rollout/reward"),
        ("response length", "rollout/response_length"),
        ("entropy", "train/entropy"),
        ("mean |pi - mu|", "train/abs_prob_diff"),
    ]
    lines = [f"{'':<28}{'before':>10}{'after':>10}"]
    for label, key in rows:
        values = [r[key] for r in records if r.get(key) is not None]
        if not values:
            continue
        recent = values[-1:] if key.startswith("eval/") else values[-_WINDOW:]
        lines.append(f"{label:<28}{values[0]:>10.4g}{sum(recent) / len(recent):>10.4g}")
    return "\n".join(lines)


def compare_responses(before: Sequence[Mapping[str, object]], after: Sequence[Mapping[str, object]]) -> str:
    """Return the responses to the same held-out problems before and after training, as text."""
    lines = []
    for old, new in zip(before, after, strict=False):
        lines.append(f"  {_one_line(old['prompt'])}   (answer: {old['label']})")
        lines.append(f"    before  {_mark(old)} {_one_line(old['response'])}")
        lines.append(f"    after   {_mark(new)} {_one_line(new['response'])}")
    return "\n".join(lines)


def _one_line(text: object) -> str:
    """Return the end of a text, where a prompt has its question and a response its answer."""
    words = " ".join(str(text).split())
    return words if len(words) <= _MAX_CHARACTERS else f"... {words[-_MAX_CHARACTERS:]}"


def _mark(record: Mapping[str, Any]) -> str:
    return "right" if record["reward"] >= 1 else "wrong"


def list_output_files(folder: Path) -> str:
    """Return the paths of the files that a run leaves, one per line."""
    descriptions = {
        "metrics.jsonl": "one record per step",
        "tensorboard": "TensorBoard events",
        "curves.png": "training curves",
        "rollouts": "samples of steps as Parquet, for megatron-dppo report and replay",
        "checkpoints": "Megatron checkpoints, to resume from",
        "hf": "the model as a Hugging Face folder",
        "hf-adapter": "the adapters as a folder for PEFT",
        "samples.jsonl": "responses at each evaluation",
        "summary.json": "the numbers above",
        "config.toml": "the resolved configuration",
        "starts.jsonl": "every start of the run, with its configuration",
    }
    return "\n".join(
        f"  {folder / name!s:<32} {text}" for name, text in descriptions.items() if (folder / name).exists()
    )
