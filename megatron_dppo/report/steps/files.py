"""Files of a run's recorded steps, such as ``rollouts/step_000010.parquet``."""

import json
import re
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from megatron_dppo.errors import ConfigError, DataError
from megatron_dppo.files import disk_errors, fsync, require_space
from megatron_dppo.report.steps.rows import RankSamples, step_columns
from megatron_dppo.types.stored_record import StoredRecord
from megatron_dppo.types.token_columns import record_types

FOLDER = "rollouts"
_NAME = re.compile(r"step_(\d{6,})\.parquet")
_META = b"megatron_dppo"
_TOKEN_BYTES = 17
"""Bytes per token: id, log mu, log pi and advantage with four bytes each, and three masks of one bit."""
_SAMPLE_BYTES = 1000
"""Bytes per sample: text and ids of the prompt, and all scalar columns."""


class StepMeta(NamedTuple):
    """Settings under which the step was trained."""

    step: int
    """Number of the step, as in ``metrics.jsonl``."""
    policy_version: int
    """Version of the weights at the start of its first update."""
    dp: int
    world_size: int
    layout: str
    loss: str
    run_id: str = ""
    """Id of the run's folder. Empty if unknown."""


def require_pyarrow(reason: str) -> ModuleType:
    """Return the module ``pyarrow``."""
    try:
        import_module("pyarrow.parquet")
        return import_module("pyarrow")
    except ImportError as error:
        raise ConfigError(f"{reason} needs the package pyarrow: pip install 'megatron-dppo[data]'") from error


def estimate_step_bytes(samples: int, tokens: int, *, more: int = 0) -> int:
    """Return the maximum size of a step's file in bytes, before compression.

    Example:
        >>> estimate_step_bytes(256, 1000)
        4608000
    """
    return samples * (_SAMPLE_BYTES + tokens * (_TOKEN_BYTES + more))


def write_step(run: Path, meta: StepMeta, parts: Iterable[RankSamples]) -> Path:
    """Write the file of a step; an existing one is replaced atomically."""
    arrow = require_pyarrow("log.rollouts_every")
    parquet = import_module("pyarrow.parquet")
    columns = step_columns(meta.step, parts)
    schema = _schema(arrow).with_metadata({_META: json.dumps(meta._asdict())})
    table = arrow.table({name: arrow.array(columns[name], schema.field(name).type) for name in schema.names}, schema)
    target = run / FOLDER / f"step_{meta.step:06d}.parquet"
    with disk_errors(target, "the step's rollouts"):
        target.parent.mkdir(exist_ok=True)
        require_space(target, table.nbytes, "the step's rollouts")
        # Write beside the target and rename, so that a crash leaves no incomplete file.
        partial = target.with_name(target.name + ".partial")
        parquet.write_table(table, partial, compression="zstd")
        fsync(partial)
        partial.replace(target)
        fsync(target.parent)
    return target


def recorded_steps(run: Path) -> dict[int, Path]:
    """Return the files of a run by step, in order."""
    folder = run / FOLDER
    names = folder.iterdir() if folder.is_dir() else ()
    by_step = {int(match[1]): file for file in names if (match := _NAME.fullmatch(file.name))}
    return dict(sorted(by_step.items()))


def delete_steps_after(run: Path, step: int) -> None:
    """Delete the files of later steps, because a run that resumes from ``step`` writes new ones."""
    for number, file in recorded_steps(run).items():
        if number > step:
            with disk_errors(file, "the step's rollouts"):
                file.unlink()


def read_meta(file: Path) -> StepMeta:
    """Return the settings of a file's step."""
    schema = _open(file).schema_arrow
    try:
        return _checked(StepMeta(**json.loads((schema.metadata or {})[_META])))
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{file} was not written by log.rollouts_every: it has no record of its step") from error


def _checked(meta: StepMeta) -> StepMeta:
    """Return the settings if they have the types and sizes that a run writes."""
    counts = (meta.step, meta.policy_version, meta.dp, meta.world_size)
    texts = (meta.layout, meta.loss, meta.run_id)
    if not all(type(count) is int and 0 <= count <= _MAX_COUNT for count in counts):
        raise TypeError(f"{counts} are not four counts")
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("layout, loss or run_id is no text")
    return meta


_MAX_COUNT = 10**9


def read_rows(file: Path) -> list[StoredRecord]:
    """Return the samples of a file, in order."""
    opened = _open(file)
    try:
        return opened.read().to_pylist()
    except (require_pyarrow("reading rollouts").ArrowException, OSError, KeyError) as error:
        raise DataError(f"{file} cannot be read: {error}") from error


def _open(file: Path) -> Any:
    arrow = require_pyarrow("reading rollouts")
    try:
        return import_module("pyarrow.parquet").ParquetFile(file)
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"{file} cannot be read as Parquet: {error}") from error


def _schema(arrow: Any) -> Any:
    text = arrow.string()
    ids = arrow.list_(arrow.int32())
    floats = arrow.list_(arrow.float32())
    flags = arrow.list_(arrow.bool_())
    numbers_of_span = [(name, arrow.int32()) for name in ("policy_version", "start", "end")]
    span = arrow.struct([*numbers_of_span, ("server", text)])
    part = arrow.struct([("name", text), ("value", arrow.float64())])
    greedy = arrow.struct(
        [("reward", arrow.float64()), ("reward_failed", arrow.bool_()), ("num_tokens", arrow.int32())]
    )
    tool_time = arrow.struct([("position", arrow.int32()), ("seconds", arrow.float64()), ("tools", arrow.list_(text))])
    credit = arrow.struct([("agent", text), ("run", arrow.int32()), ("reward", arrow.float64())])
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
        "tool_times": arrow.list_(tool_time),
        "update": arrow.int32(),
        "trained_policy_version": arrow.int32(),
        **dict.fromkeys(("prompt_ids", "segment_lengths", *tokens["int32s"]), ids),
        # The order of existing files: rollout_logprobs precedes the columns of the update.
        **dict.fromkeys(("rollout_logprobs", "logprobs", "advantages", *tokens["float32s"]), floats),
        **dict.fromkeys(("loss_mask", "keep", *tokens["bools"]), flags),
        **dict.fromkeys(tokens["bytes"], arrow.binary()),
        "greedy": greedy,
        "segment_credits": arrow.list_(credit),
    }
    return arrow.schema(list(fields.items()))
