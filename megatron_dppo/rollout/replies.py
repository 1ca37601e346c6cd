"""Parts of an inference server's answer that SGLang and vLLM have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_dppo.errors import ServerError
from megatron_dppo.types import KeptSets

INCOMPLETE = "incomplete"
"""The version while an update is under way. If the trainer dies now, nobody takes the weights for good ones."""


def version_name(version: int) -> str:
    """A policy version as servers keep it."""
    return str(version)


def never_below(values: NDArray[np.float32], limit: float) -> NDArray[np.float32]:
    """Log-probabilities of -inf where they are at or below what an engine writes for that."""
    return np.where(values <= limit, np.float32("-inf"), values)


def with_sampled(
    ids: NDArray[np.int32], values: NDArray[np.float32], tokens: NDArray[np.int32], logprobs: NDArray[np.float32]
) -> tuple[Tensor, Tensor]:
    """Put the sampled token in a last slot where it is not one of the K: both [R, K+1] (see ``Completion``).

    Args:
        ids: [R, K] the most probable tokens.
        values: [R, K] their log-probabilities.
        tokens: [R] the sampled ones.
        logprobs: [R] theirs.
    """
    sampled = tokens[:, None]
    outside = ~(ids == sampled).any(1, keepdims=True)
    last_id = np.where(outside, sampled, np.int32(-1))
    last_value = np.where(outside, logprobs[:, None], np.float32(0))
    return (
        torch.from_numpy(np.concatenate([ids, last_id], 1)),
        torch.from_numpy(np.concatenate([values, last_value], 1)),
    )


def of_kept(
    kept: KeptSets, ids: NDArray[np.int32], values: NDArray[np.float32]
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The most probable tokens [R, K] without those that a filter cut; -1 and 0 stand behind the others."""
    is_kept = np.zeros(ids.shape, dtype=np.bool_)
    for row, own in enumerate(np.split(kept.ids.numpy(), kept.counts.numpy().cumsum()[:-1])):
        is_kept[row] = np.isin(ids[row], own)
    order = np.argsort(~is_kept, axis=1, kind="stable")
    ids, values = np.where(is_kept, ids, np.int32(-1)), np.where(is_kept, values, np.float32(0))
    return np.take_along_axis(ids, order, 1), np.take_along_axis(values, order, 1)


def checked_success(answer: Any, url: str) -> Mapping[str, Any]:
    """The answer of a control call.

    Raises:
        ServerError: the server answers 200 and says that it failed.
    """
    if not isinstance(answer, dict):
        return {}
    if answer.get("success") is False:
        raise ServerError(url, str(answer.get("message") or "the server says that it failed"))
    return answer
