"""Rollouts that other stacks have written to disk, as samples: token ids, log-probabilities, and what else there is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_dppo.commands.diagnose.columns import DumpRow
from megatron_dppo.data.json_values import parse_object
from megatron_dppo.data.sources import parquet_rows
from megatron_dppo.data.training_samples import to_training_sample
from megatron_dppo.errors import DataError
from megatron_dppo.types import SamplingMask, TrainingSample

_PROMPT = ("prompt_ids", "prompt_token_ids", "prompts")
_RESPONSE = ("completion_ids", "response_ids", "response_token_ids", "responses")
_LOGPROBS = ("rollout_log_probs", "sampling_per_token_logps", "sampling_logps", "rollout_logprobs", "logprobs")
_MASK = ("loss_mask", "response_mask", "completion_mask", "loss_masks")
_TRAINED = ("old_log_probs", "old_per_token_logps", "log_probs")
_NUMBERS = ("i1", "u1", "i2", "i4", "i8", "f4", "f8")
_ROUTES = ("rollout_routed_experts", "routed_experts")
_SET_IDS, _SET_OFFSETS = "rollout_top_p_token_ids", "rollout_top_p_token_offsets"
_BATCH_ROWS = 64
"""Of Parquet: a row may hold the experts of every token"""
_FORMATS = (".jsonl", ".parquet", ".pt", ".pth")


@dataclass(frozen=True)
class DumpedSample:
    """One response of a dump."""

    sample: TrainingSample
    """with its log-probabilities; its sampling masks, if the dump has them"""
    routes: Tensor | None
    """``[T, L, k]`` the experts of each input token, as they stand in the dump"""
    trained: Tensor | None
    """[T] what the trainer of that stack computed, 0 outside the loss"""
    responses: int
    """R"""
    place: str
    """file, and line or row, for messages"""


def read_dump(path: Path, limit: int | None = None, vocab_size: int | None = None) -> list[DumpedSample]:
    """The samples of a dump; the format is told by the file's name.

    Args:
        path: ``.jsonl`` or ``.parquet`` with a row a response, or a torch file as slime writes.
        limit: first samples that are read, 1 or more; None = all. What comes after them is not looked at.
        vocab_size: of the model that the ids have to fit; None = they are not compared with one.

    Raises:
        DataError: no such file, of no known format, not readable as what its name says, a row that is none or holds
            values that cannot be (with line, column and value), or without token ids or log-probabilities: what
            writes them. Also a Parquet file without pyarrow.
    """
    _check_file(path)
    found: list[DumpedSample] = []
    for place, values in _rows(path):
        if not isinstance(values, Mapping):
            raise DataError(f"{place}: expected a row with named columns, got {type(values).__name__}")
        row = DumpRow(place, values, vocab_size)
        found.append(_of_slime(row) if "response_length" in values and "tokens" in values else _of_columns(row))
        if len(found) == limit:
            break
    usable = [dumped for dumped in found if bool(dumped.sample.loss_mask.any())]
    if not usable:
        raise DataError(f"{path} has {len(found)} responses, and none with a token that trains")
    return usable


def _check_file(path: Path) -> None:
    named = f"--rollouts {str(path)!r}"
    try:
        if path.is_dir():
            raise DataError(f"{named} is a folder; give one file in it ({', '.join(_FORMATS)})")
        if not path.exists():
            raise DataError(f"{named}: no such file")
        if not path.is_file():
            raise DataError(f"{named} is no plain file; give one ({', '.join(_FORMATS)})")
        with path.open("rb") as file:
            is_empty = not file.read(1)
    except OSError as error:
        raise DataError(f"{named} cannot be opened: {error.strerror}") from error
    if path.suffix not in _FORMATS:
        more = f". {_VERL_BATCH}" if path.suffix == ".dp" else ""
        raise DataError(f"{path} is of no format that is read here ({', '.join(_FORMATS)}){more}")
    if is_empty:
        raise DataError(
            f"{path} is empty; expected a row for each response. Was it cut short, or is its writer at work?"
        )


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Where each row stands, and what stands there."""
    if path.suffix == ".jsonl":
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    place = f"{path}, line {number}"
                    yield place, parse_object(place, line, non_finite=True)
        return
    rows = parquet_rows(path, _BATCH_ROWS) if path.suffix == ".parquet" else _torch_rows(path)
    for number, row in enumerate(rows, 1):
        yield f"{path}, row {number} (counted from 1)", row


def _torch_rows(path: Path) -> Sequence[Any]:
    """``samples`` of slime's file, read without running anything that it holds."""
    rebuild = np.empty(0).__reduce__()[0]
    # Numpy's own parts of an array, under the names of its version 2 and of those before.
    arrays: list[Any] = [np.ndarray, np.dtype, *(type(np.dtype(kind)) for kind in _NUMBERS)]
    arrays += [(rebuild, f"numpy.{room}.multiarray._reconstruct") for room in ("_core", "core")]
    try:
        with torch.serialization.safe_globals(arrays):
            values = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise DataError(
            f"{path} cannot be read as plain data (weights_only): {type(error).__name__}: {error}. Only numbers, "
            "texts, tensors and arrays are taken from a torch file; write one without objects (slime: "
            "--save-debug-rollout-data, with its tensors in the file)"
        ) from error
    if not isinstance(values, dict) or not isinstance(values.get("samples"), list):
        raise DataError(f"{path} has no list 'samples', which slime's --save-debug-rollout-data writes")
    return values["samples"]


def _of_slime(row: DumpRow) -> DumpedSample:
    """A ``Sample`` of slime: prompt and response together in ``tokens``."""
    tokens = row.ids("tokens")
    if not row.has("rollout_log_probs"):
        raise row.error(
            "slime's sample has no rollout_log_probs: its engine was not asked for them. SGLang returns them with "
            "return_logprob (slime's own rollout function asks); a custom generate function has to set them"
        )
    count = row.length("response_length", len(tokens))
    sampled = _sampled(row, ("loss_mask",), count)
    if row.flag("remove_sample"):
        sampled = [False] * count
    prompt, response = tokens[:-count], tokens[-count:]
    has_sets = row.has(_SET_IDS) and row.has(_SET_OFFSETS)
    sampling_mask = row.sampling_mask(_SET_IDS, _SET_OFFSETS, response, sampled) if has_sets else None
    return _dumped(row, prompt, response, sampled, sampling_mask)


def _of_columns(row: DumpRow) -> DumpedSample:
    prompt, response = row.first(_PROMPT), row.first(_RESPONSE)
    if prompt is None or response is None or any(isinstance(row.values[name], str) for name in (prompt, response)):
        raise row.error(_no_ids(row))
    if row.first(_LOGPROBS) is None:
        raise row.error(
            f"there are token ids but no log-probabilities of the rollout; expected one of the columns "
            f"{', '.join(_LOGPROBS)}, found {', '.join(row.names)}. verl makes rollout_log_probs with "
            "actor_rollout_ref.rollout.calculate_log_probs = true, TRL sampling_per_token_logps with use_vllm = true"
        )
    ids = row.ids(response)
    return _dumped(row, row.ids(prompt), ids, _sampled(row, _MASK, len(ids)), None)


def _sampled(row: DumpRow, names: Sequence[str], count: int) -> list[bool]:
    name = row.first(names)
    return [True] * count if name is None else row.mask(name, count)


def _dumped(
    row: DumpRow, prompt: list[int], response: list[int], sampled: list[bool], sampling_mask: SamplingMask | None
) -> DumpedSample:
    logprobs, own, experts = row.first(_LOGPROBS), row.first(_TRAINED), row.first(_ROUTES)
    assert logprobs is not None
    sample = to_training_sample(
        prompt, response, row.logprobs(logprobs, sampled), 1.0, None, None, sampled, sampling_mask
    )
    trained = None
    if own is not None:
        trained = torch.zeros(sample.num_tokens)
        trained[-len(response) :] = torch.tensor(row.logprobs(own, sampled))
    routes = None if experts is None else row.routes(experts, sample.num_tokens)
    return DumpedSample(sample, routes, trained, len(response), row.place)


_VERL_BATCH = (
    "verl keeps ids and log-probabilities in its batch, which skip.rollout (skip.rollout.dump_dir) writes as "
    "gen_batch.dp, a pickle that only verl can read: turn it into JSONL there by the lines in docs/diagnose.md, with "
    "actor_rollout_ref.rollout.calculate_log_probs = true"
)


def _no_ids(row: DumpRow) -> str:
    """What to do about a dump of texts, by the stack that writes such columns."""
    names = ", ".join(row.names)
    if {"input", "output", "score"} <= row.values.keys():
        return f"verl's trainer.rollout_data_dir holds texts ({names}), no ids and no log-probabilities. {_VERL_BATCH}"
    if {"prompt", "completion", "step"} <= row.values.keys():
        return (
            f"TRL's log_completions holds texts ({names}), no ids and no log-probabilities. Let a reward function add "
            "them by log_extra('prompt_ids', ...), log_extra('completion_ids', ...), log_extra('sampling_logps', ...), "
            "whose values a rollout_func returns as further fields (docs/diagnose.md)"
        )
    return (
        f"no token ids: expected one of the columns {', '.join(_PROMPT)} and one of {', '.join(_RESPONSE)} with lists "
        f"of numbers, found {names}"
    )
