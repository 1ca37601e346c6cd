"""The files of a run's recorded steps: ``rollouts/step_000010.parquet``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from megatron_dppo.errors import ConfigError, DataError
from megatron_dppo.files import disk_errors, fsync, require_space
from megatron_dppo.report.steps.rows import RankPart, columns
from megatron_dppo.types.token_columns import record_types

FOLDER = "rollouts"
_NAME = re.compile(r"step_(\d{6,})\.parquet")
_META = b"megatron_dppo"
_TOKEN_BYTES = 17
"""id, log mu, log pi, advantage in four bytes each, and three masks of a bit"""
_SAMPLE_BYTES = 1000
"""a prompt's text and ids, and everything that there is once"""


class StepMeta(NamedTuple):
    """What the step was trained by."""

    step: int
    """after it, as in ``metrics.jsonl``"""
    policy_version: int
    """of the weights that its first update began with"""
    dp: int
    """data-parallel ranks"""
    world_size: int
    layout: str
    loss: str
    run_id: str = ""
    """of the run's folder; empty = unknown"""


def require_pyarrow(reason: str) -> Any:
    """The module ``pyarrow``.

    Args:
        reason: what needs it, for the message.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import_module("pyarrow.parquet")
        return import_module("pyarrow")
    except ImportError as error:
        raise ConfigError(f"{reason} needs the package pyarrow: pip install 'megatron-dppo[data]'") from error


def step_bytes(samples: int, tokens: int, *, more: int = 0) -> int:
    """What a file takes at most, before its compression.

    Args:
        samples: of the step.
        tokens: of a response, at most.
        more: bytes of a token's Top-K, sampling mask and experts, where the engine reports them.

    Example:
        >>> step_bytes(256, 1000)
        4608000
    """
    return samples * (_SAMPLE_BYTES + tokens * (_TOKEN_BYTES + more))


def write_step(run: Path, meta: StepMeta, parts: Iterable[RankPart]) -> Path:
    """Write a step's file; what stood there before is replaced at once.

    Raises:
        DiskError: it cannot be written.
        ConfigError: pyarrow is missing.
    """
    arrow = require_pyarrow("log.rollouts_every")
    parquet = import_module("pyarrow.parquet")
    found = columns(meta.step, parts)
    schema = _schema(arrow).with_metadata({_META: json.dumps(meta._asdict())})
    table = arrow.table({name: arrow.array(found[name], schema.field(name).type) for name in schema.names}, schema)
    target = run / FOLDER / f"step_{meta.step:06d}.parquet"
    with disk_errors(target, "the step's rollouts"):
        target.parent.mkdir(exist_ok=True)
        require_space(target, table.nbytes, "the step's rollouts")
        partial = target.with_name(target.name + ".partial")
        parquet.write_table(table, partial, compression="zstd")
        fsync(partial)
        partial.replace(target)
        fsync(target.parent)
    return target


def recorded_steps(run: Path) -> dict[int, Path]:
    """The files of a run by step, in order."""
    folder = run / FOLDER
    names = folder.iterdir() if folder.is_dir() else ()
    found = {int(match[1]): file for file in names if (match := _NAME.fullmatch(file.name))}
    return dict(sorted(found.items()))


def drop_after(run: Path, step: int) -> None:
    """Delete the files of later steps: a run that continues from ``step`` makes other ones."""
    for number, file in recorded_steps(run).items():
        if number > step:
            with disk_errors(file, "the step's rollouts"):
                file.unlink()


def read_meta(file: Path) -> StepMeta:
    """What a file says of its step.

    Raises:
        DataError: it is none of ours, or damaged.
    """
    schema = _opened(file).schema_arrow
    try:
        return StepMeta(**json.loads((schema.metadata or {})[_META]))
    except (KeyError, ValueError, TypeError) as error:
        raise DataError(f"{file} was not written by log.rollouts_every: it has no record of its step") from error


def read_rows(file: Path, names: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """The samples of a file, in order.

    Args:
        file: of ``recorded_steps``.
        names: of the columns that are read; None = all.

    Raises:
        DataError: it cannot be read.
    """
    opened = _opened(file)
    try:
        return opened.read(None if names is None else list(names)).to_pylist()
    except (require_pyarrow("reading rollouts").ArrowException, OSError, KeyError) as error:
        raise DataError(f"{file} cannot be read: {error}") from error


def _opened(file: Path) -> Any:
    arrow = require_pyarrow("reading rollouts")
    try:
        return import_module("pyarrow.parquet").ParquetFile(file)
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"{file} cannot be read as Parquet: {error}") from error


def _schema(arrow: Any) -> Any:
    text, ids, floats, flags = (
        arrow.string(),
        arrow.list_(arrow.int32()),
        arrow.list_(arrow.float32()),
        arrow.list_(arrow.bool_()),
    )
    span = arrow.struct([(name, arrow.int32()) for name in ("policy_version", "start", "end")])
    part = arrow.struct([("name", text), ("value", arrow.float64())])
    numbers = {name: arrow.int32() for name in ("step", "sample", "group", "dp_rank", "age", "policy_version")}
    texts = ("prompt_id", "prompt", "label", "response", "finish_reason", "failure", "prompt_metadata")
    tokens: dict[str, list[str]] = {}
    for name, kind in record_types().items():
        tokens.setdefault(kind, []).append(name)
    fields = {
        **numbers,
        **dict.fromkeys((*texts, "prompt_messages", *tokens["text"]), text),
        "reward": arrow.float64(),
        "eval_score": arrow.float64(),
        "reward_failed": arrow.bool_(),
        "is_task": arrow.bool_(),
        "reward_parts": arrow.list_(part),
        "policy_versions": arrow.list_(span),
        "update": arrow.int32(),
        **dict.fromkeys(("prompt_ids", *tokens["int32s"]), ids),
        # In the order of the files that are there: this one stands before those of the update.
        **dict.fromkeys(("rollout_logprobs", "logprobs", "advantages", *tokens["float32s"]), floats),
        **dict.fromkeys(("loss_mask", "keep", *tokens["bools"]), flags),
        **dict.fromkeys(tokens["bytes"], arrow.binary()),
    }
    return arrow.schema(list(fields.items()))
