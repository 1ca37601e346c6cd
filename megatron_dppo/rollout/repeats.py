"""Sums that show whether responses repeat more often than their probabilities say.

A response equals one of its earlier siblings with the sum of their probabilities. ``run.sampling_test`` accumulates the
sums over a run.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_dppo.types import Completion, RolloutGroup
from megatron_dppo_engines.sums import Sums, add_by_key


@dataclass(frozen=True, kw_only=True)
class RepeatSums(Sums):
    """Sums over the responses of groups."""

    responses: float = 0.0
    repeats: float = 0.0
    """Number of responses that equal an earlier sibling."""
    expected: float = 0.0


def repeat_sums(groups: Iterable[RolloutGroup]) -> dict[str, RepeatSums]:
    """Return the sums by the server that sampled the first token of a response.

    Given its earlier siblings, a response equals one of them with the sum of the probabilities of the distinct ones. So
    the difference of ``repeats`` and ``expected`` is a martingale.
    """
    result: dict[str, RepeatSums] = {}
    for group in groups:
        add_by_key(result, _sum_repeats([rollout.completion for rollout in group.rollouts]))
    return result


def _sum_repeats(siblings: Sequence[Completion]) -> Mapping[str, RepeatSums]:
    probability_by_tokens: dict[bytes, float] = {}
    result: dict[str, RepeatSums] = {}
    for completion in siblings:
        if completion.logprobs is None or completion.failure:
            continue
        tokens = completion.token_ids.numpy().tobytes()
        spans = completion.policy_versions
        server = spans[0].server if spans else ""
        # Rounding can bring the sum of the distinct responses above 1.
        expected = min(sum(probability_by_tokens.values()), 1.0)
        sums = RepeatSums(responses=1.0, repeats=float(tokens in probability_by_tokens), expected=expected)
        add_by_key(result, {server: sums})
        # Tokens that were not sampled have log-probability 0. With a tool's tokens this is an upper bound.
        probability_by_tokens[tokens] = float(np.exp(completion.logprobs.double().sum().item()))
    return result
