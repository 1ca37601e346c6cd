"""Reader of rollouts that other stacks wrote to disk: token ids, log-probabilities, and optional columns."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_dppo.data.json_values import parse_object
from megatron_dppo.data.sources import parquet_rows
from megatron_dppo.data.training_samples import to_training_sample
from megatron_dppo.errors import DataError
from megatron_dppo.types import SamplingMask, TrainingSample
from megatron_dppo_doctor.diagnose.columns import DumpRow

_PROMPT_COLUMNS = ("prompt_ids", "prompt_token_ids", "prompts")
_RESPONSE_COLUMNS = ("completion_ids", "response_ids", "response_token_ids", "responses")
_LOGPROB_COLUMNS = ("rollout_log_probs", "sampling_per_token_logps", "sampling_logps", "rollout_logprobs", "logprobs")
_MASK_COLUMNS = ("loss_mask", "response_mask", "completion_mask", "loss_masks")
_TRAINER_LOGPROB_COLUMNS = ("old_log_probs", "old_per_token_logps", "log_probs")
_ARRAY_DTYPES = ("i1", "u1", "i2", "i4", "i8", "f4", "f8")
_ROUTE_COLUMNS = ("rollout_routed_experts", "routed_experts")
_MASK_IDS_COLUMN = "rollout_top_p_token_ids"
_MASK_OFFSETS_COLUMN = "rollout_top_p_token_offsets"
_PARQUET_BATCH_ROWS = 64
"""Rows read from Parquet at a time. A row may hold the experts of every token."""
_FORMATS = (".jsonl", ".parquet", ".pt", ".pth")


@dataclass(frozen=True)
class DumpedSample:
    """Response of a dump."""

    sample: TrainingSample
    """Sample with log-probabilities, and with sampling masks if the dump has them."""
    routes: Tensor | None
    """Experts of each input token in the dump, ``[num_tokens, num_layers, top_k]``. None without them."""
    trained: Tensor | None
    """Log-probabilities of that stack's trainer, ``[num_tokens]``, 0 for tokens without a loss. None without them."""
    responses: int
    """Length of the response in tokens."""
    location: str
    """File, and line or row, for error messages."""


def read_dump(path: Path, limit: int | None = None, vocab_size: int | None = None) -> list[DumpedSample]:
    """Read the samples of a dump. The file name determines the format.

    Rows behind the first ``limit`` samples are not checked.
    """
    _check_file(path)
    dumped: list[DumpedSample] = []
    for location, values in _rows(path):
        if not isinstance(values, Mapping):
            raise DataError(f"{location}: expected a row with named columns, got {type(values).__name__}")
        row = DumpRow(location, values, vocab_size)
        is_slime = "response_length" in values and "tokens" in values
        dumped.append(_read_slime_row(row) if is_slime else _read_column_row(row))
        if len(dumped) == limit:
            break
    usable = [each for each in dumped if bool(each.sample.loss_mask.any())]
    if not usable:
        raise DataError(
            f"{path} has {len(dumped)} responses, but no token with a loss. Fix: write a loss mask that is 1 on "
            "trained tokens"
        )
    return usable


def _check_file(path: Path) -> None:
    named = f"--rollouts {str(path)!r}"
    try:
        if path.is_dir():
            raise DataError(f"{named} is a folder; give one file in it ({', '.join(_FORMATS)})")
        if not path.exists():
            raise DataError(f"{named}: no such file")
        if not path.is_file():
            raise DataError(f"{named} is not a regular file; give a file ({', '.join(_FORMATS)})")
        with path.open("rb") as file:
            is_empty = not file.read(1)
    except OSError as error:
        raise DataError(f"{named} cannot be opened: {error.strerror}") from error
    if path.suffix not in _FORMATS:
        more = f". {_VERL_BATCH_FIX}" if path.suffix == ".dp" else ""
        raise DataError(f"{path} has an unsupported format; supported are ({', '.join(_FORMATS)}){more}")
    if is_empty:
        raise DataError(
            f"{path} is empty; expected a row for each response. Fix: wait until the program that writes it has "
            "finished"
        )


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the location and the content of each row."""
    if path.suffix == ".jsonl":
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    location = f"{path}, line {number}"
                    yield location, parse_object(location, line, non_finite=True)
        return
    rows = parquet_rows(path, _PARQUET_BATCH_ROWS) if path.suffix == ".parquet" else _torch_rows(path)
    for number, row in enumerate(rows, 1):
        yield f"{path}, row {number} (counted from 1)", row


def _torch_rows(path: Path) -> Sequence[Any]:
    """Return ``samples`` of slime's file. Loading it executes no code from the file."""
    # The function by which a pickle rebuilds an array.
    rebuild = np.empty(0).__reduce__()[0]
    # Numpy's classes of an array, under the module names of version 2 and of version 1.
    arrays: list[Any] = [np.ndarray, np.dtype, *(type(np.dtype(kind)) for kind in _ARRAY_DTYPES)]
    arrays += [(rebuild, f"numpy.{module}.multiarray._reconstruct") for module in ("_core", "core")]
    try:
        with torch.serialization.safe_globals(arrays):
            values = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise DataError(
            f"{path} cannot be read as plain data (weights_only): {type(error).__name__}: {error}. Only numbers, "
            "texts, tensors and arrays are read from a torch file. Fix: write one without objects (slime: "
            "--save-debug-rollout-data, with its tensors in the file)"
        ) from error
    if not isinstance(values, dict) or not isinstance(values.get("samples"), list):
        raise DataError(f"{path} has no list 'samples', which slime's --save-debug-rollout-data writes")
    return values["samples"]


def _read_slime_row(row: DumpRow) -> DumpedSample:
    """Read a ``Sample`` of slime, which has prompt and response together in ``tokens``."""
    tokens = row.ids("tokens")
    if not row.has("rollout_log_probs"):
        raise row.error(
            "slime's sample has no rollout_log_probs: its engine did not return them. SGLang returns them with "
            "return_logprob (slime's own rollout function asks); a custom generate function has to set them"
        )
    count = row.length("response_length", len(tokens))
    sampled = _read_mask(row, ("loss_mask",), count)
    # slime's mark of a sample that is not trained on.
    if row.flag("remove_sample"):
        sampled = [False] * count
    prompt, response = tokens[:-count], tokens[-count:]
    has_masks = row.has(_MASK_IDS_COLUMN) and row.has(_MASK_OFFSETS_COLUMN)
    sampling_mask = row.sampling_mask(_MASK_IDS_COLUMN, _MASK_OFFSETS_COLUMN, response, sampled) if has_masks else None
    return _make_sample(row, prompt, response, sampled, sampling_mask)


def _read_column_row(row: DumpRow) -> DumpedSample:
    prompt, response = row.first(_PROMPT_COLUMNS), row.first(_RESPONSE_COLUMNS)
    if prompt is None or response is None or any(isinstance(row.values[name], str) for name in (prompt, response)):
        raise row.error(_missing_ids_text(row))
    if row.first(_LOGPROB_COLUMNS) is None:
        raise row.error(
            f"there are token ids but no log-probabilities of the rollout; expected one of the columns "
            f"{', '.join(_LOGPROB_COLUMNS)}, found {', '.join(row.names)}. verl makes rollout_log_probs with "
            "actor_rollout_ref.rollout.calculate_log_probs = true, TRL sampling_per_token_logps with use_vllm = true"
        )
    ids = row.ids(response)
    return _make_sample(row, row.ids(prompt), ids, _read_mask(row, _MASK_COLUMNS, len(ids)), None)


def _read_mask(row: DumpRow, names: Sequence[str], count: int) -> list[bool]:
    name = row.first(names)
    return [True] * count if name is None else row.mask(name, count)


def _make_sample(
    row: DumpRow, prompt: list[int], response: list[int], sampled: list[bool], sampling_mask: SamplingMask | None
) -> DumpedSample:
    logprobs = row.first(_LOGPROB_COLUMNS)
    trainer_logprobs = row.first(_TRAINER_LOGPROB_COLUMNS)
    experts = row.first(_ROUTE_COLUMNS)
    assert logprobs is not None
    sample = to_training_sample(
        prompt, response, row.logprobs(logprobs, sampled), 1.0, None, None, sampled, sampling_mask
    )
    trained = None
    if trainer_logprobs is not None:
        trained = torch.zeros(sample.num_tokens)
        trained[-len(response) :] = torch.tensor(row.logprobs(trainer_logprobs, sampled))
    routes = None if experts is None else row.routes(experts, sample.num_tokens)
    return DumpedSample(sample, routes, trained, len(response), row.location)


_VERL_BATCH_FIX = (
    "verl keeps ids and log-probabilities in its batch, which skip.rollout (skip.rollout.dump_dir) writes as "
    "gen_batch.dp, a pickle that only verl can read: turn it into JSONL there by the lines in docs/diagnose.md, with "
    "actor_rollout_ref.rollout.calculate_log_probs = true"
)


def _missing_ids_text(row: DumpRow) -> str:
    """Return the error of a row without token ids, with a fix for the stack that writes such columns."""
    names = ", ".join(row.names)
    if {"input", "output", "score"} <= row.values.keys():
        return (
            f"verl's trainer.rollout_data_dir holds texts ({names}), no ids and no log-probabilities. {_VERL_BATCH_FIX}"
        )
    if {"prompt", "completion", "step"} <= row.values.keys():
        return (
            f"TRL's log_completions holds texts ({names}), no ids and no log-probabilities. Let a reward function add "
            "them by log_extra('prompt_ids', ...), log_extra('completion_ids', ...), log_extra('sampling_logps', ...), "
            "whose values a rollout_func returns as further fields (docs/diagnose.md)"
        )
    return (
        f"no token ids: expected one of the columns {', '.join(_PROMPT_COLUMNS)} and one of "
        f"{', '.join(_RESPONSE_COLUMNS)} with lists of numbers, found {names}"
    )
