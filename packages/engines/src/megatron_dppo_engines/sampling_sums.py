"""Sums that show whether tokens are drawn from the distribution that a server reports. They need no trainer.

Two statistics have a known expectation if each token is drawn from the reported probabilities p:

- *Rank*: order the vocabulary by p and give each token the middle of its interval of cumulated probability. The middle
  of the sampled token is 1/2 on average. Greedy decoding, a filter or a lower temperature move it down, a higher
  temperature up. The K most probable tokens and the sampled one suffice: all others form one last interval.
- *Repeats*: a response equals one of its earlier siblings with the sum of their probabilities.

``run.sampling_test`` accumulates both over a run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megatron_dppo_engines.sums import Sums

if TYPE_CHECKING:
    from megatron_dppo_engines.server import GenerateRequest, Generation

_CONFIDENT = 0.9
"""Probability of the most probable token from which on usual filters leave no other one."""


@dataclass(frozen=True, kw_only=True)
class RankSums(Sums):
    """Sums over sampled tokens."""

    tokens: float = 0.0
    shift: float = 0.0
    """Sum of (middle of the sampled token - 1/2), each between -1/2 and 1/2. Its expectation is 0."""
    variance: float = 0.0
    """Variance of ``shift``."""
    best: float = 0.0
    """Number of tokens that were the most probable one."""
    best_expected: float = 0.0
    """Expectation of ``best``."""
    rare: float = 0.0
    """Number of tokens that were not the most probable one, where that had a probability of at least 0.9."""
    rare_expected: float = 0.0
    """Expectation of ``rare``."""


def rank_sums(generation: Generation, request: GenerateRequest) -> RankSums:
    """Return the sums of a response that keeps the contract; all are 0 if its tokens cannot be judged.

    Greedy requests are not drawn. With filters the K most probable tokens are those before the filters (SGLang).
    """
    params = request.params
    if params.temperature == 0 or params.has_filters or not len(generation.token_ids):
        return RankSums()
    echo = generation.echo
    if generation.topk_token_ids is not None and generation.topk_logprobs is not None:
        # The last slot is for a sampled token outside of the Top-K.
        ids = generation.topk_token_ids[:, :-1].numpy()
        logprobs = generation.topk_logprobs[:, :-1].numpy()
    elif echo is not None and echo.best_token_ids is not None and echo.best_logprobs is not None:
        ids = echo.best_token_ids[:, None]
        logprobs = echo.best_logprobs[:, None]
    else:
        return RankSums()
    return sum_ranks(generation.token_ids.numpy(), ids, np.exp(logprobs.astype(np.float64)))


def sum_ranks(sampled: NDArray[np.int32], ids: NDArray[np.int32], probabilities: NDArray[np.float64]) -> RankSums:
    """Return the sums for tokens [R] and their K most probable tokens, the best first, with probabilities, [R, K]."""
    below = np.cumsum(probabilities, axis=1)
    remaining = np.maximum(1.0 - below[:, -1:], 0.0)
    # The last column is the interval of all tokens outside of the Top-K.
    middles = np.concatenate([below - probabilities / 2, 1.0 - remaining / 2], axis=1) - 0.5
    masses = np.concatenate([probabilities, remaining], axis=1)
    is_sampled = ids == sampled[:, None]
    slot = np.where(is_sampled.any(1), is_sampled.argmax(1), ids.shape[1])
    best = masses[:, 0]
    is_best = slot == 0
    is_confident = best >= _CONFIDENT
    return RankSums(
        tokens=float(len(sampled)),
        shift=float(middles[np.arange(len(sampled)), slot].sum()),
        # The expectation of a middle is 0, so the mean square is the variance.
        variance=float((masses * np.square(middles)).sum()),
        best=float(is_best.sum()),
        best_expected=float(best.sum()),
        rare=float((is_confident & ~is_best).sum()),
        rare_expected=float((1.0 - best[is_confident]).sum()),
    )
