"""Rollouts that other stacks have written to disk, as samples: token ids, log-probabilities, and what else there is."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_dppo.data.samples import to_training_sample
from megatron_dppo.errors import DataError
from megatron_dppo.types import KeptSets, TrainingSample

_PROMPT = ("prompt_ids", "prompt_token_ids", "prompts")
_RESPONSE = ("completion_ids", "response_ids", "response_token_ids", "responses")
_LOGPROBS = ("rollout_log_probs", "sampling_per_token_logps", "sampling_logps", "rollout_logprobs", "logprobs")
_MASK = ("loss_mask", "response_mask", "completion_mask", "loss_masks")
_TRAINED = ("old_log_probs", "old_per_token_logps", "log_probs")
_NUMBERS = ("i1", "u1", "i2", "i4", "i8", "f4", "f8")
_ROUTES = ("rollout_routed_experts", "routed_experts")


@dataclass(frozen=True)
class DumpedSample:
    """One response of a dump."""

    sample: TrainingSample
    """with its log-probabilities; its kept sets, if the dump has them"""
    routes: Tensor | None
    """``[T, L, k]`` the experts of each input token, as they stand in the dump"""
    trained: Tensor | None
    """[T] what the trainer of that stack computed, 0 outside the loss"""
    responses: int
    """R"""


def read_dump(path: Path, limit: int | None = None) -> list[DumpedSample]:
    """The samples of a dump; the format is told by the file.

    Args:
        path: ``.jsonl`` or ``.parquet`` with a row a response, or a torch file as slime writes.
        limit: first samples that are read.

    Raises:
        DataError: no such file, of no known format, or without token ids or log-probabilities: what writes them.
    """
    if not path.is_file():
        raise DataError(f"--rollouts {str(path)!r}: no such file")
    found: list[DumpedSample] = []
    for number, row in enumerate(_rows(path)):
        if limit is not None and len(found) == limit:
            break
        where = f"{path.name}, row {number}"
        try:
            found.append(_of_slime(row) if "response_length" in row and "tokens" in row else _of_columns(row))
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise DataError(f"{where}: {error}") from error
    usable = [dumped for dumped in found if bool(dumped.sample.loss_mask.any())]
    if not usable:
        raise DataError(f"{path} has {len(found)} responses, and none with a token that trains")
    return usable


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    if path.suffix == ".jsonl":
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines):
                if line.strip():
                    try:
                        yield json.loads(line)
                    except ValueError as error:
                        raise DataError(f"{path}, line {number + 1} is not JSON: {error}") from error
    elif path.suffix == ".parquet":
        from pyarrow import parquet

        for batch in parquet.ParquetFile(path).iter_batches(64):
            yield from batch.to_pylist()
    elif path.suffix in (".pt", ".pth"):
        yield from _torch_rows(path)
    else:
        more = f". {_VERL_BATCH}" if path.suffix == ".dp" else ""
        raise DataError(f"{path} is of no format that is read here (.jsonl, .parquet, .pt){more}")


def _torch_rows(path: Path) -> Sequence[Mapping[str, Any]]:
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
            f"{path} cannot be read as plain data (weights_only): {error}. Only numbers, texts, tensors and arrays are "
            "taken from a torch file; write one without objects (slime: --save-debug-rollout-data, with its tensors in "
            "the file)"
        ) from error
    if not isinstance(values, dict) or not isinstance(values.get("samples"), list):
        raise DataError(f"{path} has no list 'samples', which slime's --save-debug-rollout-data writes")
    return values["samples"]


def _of_slime(row: Mapping[str, Any]) -> DumpedSample:
    """A ``Sample`` of slime: prompt and response together in ``tokens``."""
    tokens, count = _list(row["tokens"]), int(row["response_length"])
    if row.get("rollout_log_probs") is None:
        raise ValueError(
            "slime's sample has no rollout_log_probs: its engine was not asked for them. SGLang returns them with "
            "return_logprob (slime's own rollout function asks); a custom generate function has to set them"
        )
    if not 0 < count < len(tokens):
        raise ValueError(f"response_length = {count} of {len(tokens)} tokens")
    dropped = bool(row.get("remove_sample"))
    mask = [0] * count if dropped else row.get("loss_mask")
    offsets = row.get("rollout_top_p_token_offsets")
    kept = None
    if offsets is not None and row.get("rollout_top_p_token_ids") is not None:
        ids = torch.as_tensor(row["rollout_top_p_token_ids"]).int()
        kept = KeptSets(ids, torch.as_tensor(offsets).diff().int())
    return _dumped(tokens[:-count], tokens[-count:], row, mask, kept)


def _of_columns(row: Mapping[str, Any]) -> DumpedSample:
    prompt, response = _first(row, _PROMPT), _first(row, _RESPONSE)
    if prompt is None or response is None or isinstance(prompt, str) or isinstance(response, str):
        raise ValueError(_no_ids(row))
    if _first(row, _LOGPROBS) is None:
        raise ValueError(
            f"there are token ids but no log-probabilities of the rollout; expected one of the columns "
            f"{', '.join(_LOGPROBS)}, found {', '.join(sorted(row))}. verl makes rollout_log_probs with "
            "actor_rollout_ref.rollout.calculate_log_probs = true, TRL sampling_per_token_logps with use_vllm = true"
        )
    return _dumped(_list(prompt), _list(response), row, _first(row, _MASK), None)


def _dumped(
    prompt: list[int], response: list[int], row: Mapping[str, Any], mask: Any, kept: KeptSets | None
) -> DumpedSample:
    count = len(response)
    sampled = None if mask is None else [bool(value) for value in _list(mask)]
    sample = to_training_sample(prompt, response, _list(_first(row, _LOGPROBS)), 1.0, None, None, sampled, kept)
    trained = _first(row, _TRAINED)
    if trained is not None:
        own = torch.zeros(sample.num_tokens)
        own[-count:] = torch.tensor(_list(trained), dtype=torch.float32)
        trained = own
    routes = _first(row, _ROUTES)
    if routes is not None:
        routes = torch.as_tensor(np.asarray(routes))
        if routes.dim() != 3 or len(routes) not in (sample.num_tokens, sample.num_tokens + 1):
            raise ValueError(
                f"routed experts of shape {tuple(routes.shape)} for {sample.num_tokens + 1} tokens; expected "
                "[tokens - 1, layers, k]"
            )
        routes = routes[: sample.num_tokens]
    return DumpedSample(sample, routes, trained, count)


def _first(row: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), None)


def _list(values: Any) -> list[Any]:
    return list(values.tolist() if hasattr(values, "tolist") else values)


_VERL_BATCH = (
    "verl keeps ids and log-probabilities in its batch, which skip.rollout (skip.rollout.dump_dir) writes as "
    "gen_batch.dp, a pickle that only verl can read: turn it into JSONL there by the lines in docs/diagnose.md, with "
    "actor_rollout_ref.rollout.calculate_log_probs = true"
)


def _no_ids(row: Mapping[str, Any]) -> str:
    """What to do about a dump of texts, by the stack that writes such columns."""
    names = ", ".join(sorted(row))
    if {"input", "output", "score"} <= row.keys():
        return f"verl's trainer.rollout_data_dir holds texts ({names}), no ids and no log-probabilities. {_VERL_BATCH}"
    if {"prompt", "completion", "step"} <= row.keys():
        return (
            f"TRL's log_completions holds texts ({names}), no ids and no log-probabilities. Let a reward function add "
            "them by log_extra('prompt_ids', ...), log_extra('completion_ids', ...), log_extra('sampling_logps', ...), "
            "whose values a rollout_func returns as further fields (docs/diagnose.md)"
        )
    return (
        f"no token ids: expected one of the columns {', '.join(_PROMPT)} and one of {', '.join(_RESPONSE)} with lists "
        f"of numbers, found {names}"
    )
