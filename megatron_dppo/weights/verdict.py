"""The probe's verdict: what a server answered, against what the trainer computes for the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_dppo.weights.agreement import (
    Array,
    Distance,
    Explanation,
    better_explanation,
    decimals,
    distance,
    missing_from_best,
)
from megatron_dppo.weights.probe_requests import Expectation, ProbeAnswer, ProbeError, Reading, RouteCounts


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How far apart the two programs may be (``docs/probe.md`` has the measurements)."""

    mean: float
    """of the mean |log p - log q|"""
    largest: float
    """of that of one token"""
    probability: float
    """of the mean |p - q|"""
    odds: float
    """of ``Distance.odds``"""
    unexplained: float
    """``Distance.odds`` up to which a better explanation is not looked for"""
    routes: float
    """share of rows (a token in a layer) with other experts"""
    topk: float
    """of the mean |log p - log q| of the Top-K, and of what the ids miss of the best ones"""


TOLERANCES = {
    # Two programs that add up in another order differ by some 1e-6 a token; large models add longer sums.
    "fp32": Tolerance(mean=3e-5, largest=1e-4, probability=3e-5, odds=3e-4, unexplained=3e-4, routes=0.02, topk=3e-4),
    # 11 bits: an eighth of bf16's rounding, and as much room for tokens that go to another expert as half of bf16's.
    "fp16": Tolerance(
        mean=0.25, largest=float("inf"), probability=0.05, odds=0.2, unexplained=0.015, routes=0.2, topk=0.3
    ),
    # 8 bits of mantissa: 0.4 % of each logit. A token near the border of two experts may go to the other one, which
    # moves its log-probability by any amount; so no single token is looked at.
    "bf16": Tolerance(
        mean=0.5, largest=float("inf"), probability=0.1, odds=0.4, unexplained=0.03, routes=0.4, topk=0.6
    ),
}
"""By the coarser dtype of server and trainer. In half precision a probe cannot tell the weights of one step from those
of the next: that is what versions and checksums are for."""

_RAW = {
    "sglang": "start the server without SGLANG_RETURN_ORIGINAL_LOGPROB=1 in its environment",
    "vllm": "start the server with --logprobs-mode processed_logprobs",
}
_FILTERED = {
    "sglang": "a gateway in between sets top_p, top_k or min_p: give the URL of the server itself",
    "vllm": "the server's defaults filter (generation_config.json): start it with --generation-config vllm",
}
_GATEWAY = "Something between here and the server rewrites answers: give the URL of the server itself"


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """How well server and trainer agree."""

    logprobs: Distance
    """with the trainer's own choice of experts"""
    replayed: Distance | None
    """with the server's; None without routes"""
    topk: Distance | None
    routes: float | None
    """share of rows with other experts"""


def judge(answer: ProbeAnswer, expected: Expectation, readings: Sequence[Reading]) -> ProbeResult:
    """Compare what a server answered with what the trainer computes.

    Args:
        answer: what ``ask`` gave.
        expected: what ``ask`` got.
        readings: one for each response of the answer.

    Raises:
        ProbeError: they differ by more than the dtype explains, or something else explains the answer better; the
            message names the likely cause and the fix.
    """
    verdict = _Judge(answer, expected, readings).verdict()
    if answer.breach is not None:
        raise ProbeError(answer.url, answer.breach)
    return verdict


class _Judge:
    """One answer under examination; each method looks at one part of it."""

    def __init__(self, answer: ProbeAnswer, expected: Expectation, readings: Sequence[Reading]) -> None:
        self._answer, self._expected, self._readings = answer, expected, readings
        self._tolerance = TOLERANCES[expected.dtype]
        self._reported = [g.logprobs.double().numpy() for g in answer.generations]

    def verdict(self) -> ProbeResult:
        """The order matters: wrong weights make everything else look wrong too."""
        live = [reading.logprobs for reading in self._readings]
        found = distance(np.concatenate(self._reported), np.concatenate(live))
        self._meaning(live, found)
        replayed = [r.replayed_logprobs for r in self._readings if r.replayed_logprobs is not None]
        if not replayed:
            if not self._within(found):
                self._refuse(self._cause(found))
            return ProbeResult(logprobs=found, replayed=None, topk=self._topk(), routes=None)
        counts = sum((r.routes for r in self._readings if r.routes is not None), RouteCounts())
        with_routes = distance(np.concatenate(self._reported), np.concatenate(replayed))
        self._routes(counts, found, with_routes)
        return ProbeResult(logprobs=found, replayed=with_routes, topk=self._topk(), routes=counts.share)

    def _refuse(self, text: str) -> None:
        raise ProbeError(self._answer.url, text)

    def _numbers(self, found: Distance) -> str:
        tolerance, count = self._tolerance, sum(map(len, self._reported))
        largest = "" if tolerance.largest == float("inf") else f", {found.largest:.2g} at most"
        allowed = "" if tolerance.largest == float("inf") else f", {tolerance.largest:g}"
        return (
            f"its log-probabilities differ from the trainer's by {found.mean:.2g} on average{largest}, its "
            f"probabilities by {found.probability:.2g}, its log-odds by {found.odds:.2g} in the median over {count} "
            f"tokens; {self._expected.dtype} allows {tolerance.mean:g}{allowed}, {tolerance.probability:g} and "
            f"{tolerance.odds:g}"
        )

    def _meaning(self, live: list[Array], found: Distance) -> None:
        """Whether the sampled tokens' log-probabilities are what they should be: robust against single tokens."""
        reported, computed = np.concatenate(self._reported), np.concatenate(live)
        if (count := decimals(reported, computed)) is not None:
            self._refuse(f"rounded log-probabilities: the server reports {count} decimals. {_GATEWAY}")
        raw = [reading.raw_logprobs for reading in self._readings]
        tolerance = self._tolerance
        better = better_explanation(self._reported, live, raw, live, tolerance.unexplained)
        if better is not None:
            self._refuse(self._misread("log-probabilities", better, self._numbers(found)))
        if not found.odds <= tolerance.odds:
            self._refuse(self._cause(found))

    def _misread(self, what: str, better: Explanation, numbers: str) -> str:
        if better.name == "raw":
            return (
                f"raw {what}: the server reports those at temperature 1, not at the sampling temperature "
                f"{self._expected.temperature:g} ({numbers}). {_RAW[self._answer.info.engine]}"
            )
        if better.name == "scaled":
            return (
                f"scaled {what}: the server reports {better.factor:.2g} times the trainer's ({numbers}), as at another "
                f"temperature than the {self._expected.temperature:g} that was asked for. {_GATEWAY}"
            )
        return f"shifted {what}: the server reports those of the {better.name} token ({numbers}). {_GATEWAY}"

    def _within(self, found: Distance) -> bool:
        tolerance = self._tolerance
        # Not a number compares as False: not within.
        close = found.mean <= tolerance.mean and found.largest <= tolerance.largest
        return close and found.probability <= tolerance.probability and found.odds <= tolerance.odds

    def _cause(self, found: Distance) -> str:
        info, numbers = self._answer.info, self._numbers(found)
        if self._looks_filtered():
            return (
                "filtered distribution: every token is at least as probable as in training, as after top-p, top-k or "
                f"min-p ({numbers}). {_FILTERED[info.engine]}"
            )
        cause = (
            f"wrong weights: {numbers}. The server serves {info.model!r}, version {info.policy_version}; compare it "
            "with model.path, and check that its weights were synced"
        )
        if found.mean < 10 * self._tolerance.mean:
            cause += (
                f". The difference is small: the server may compute in a coarser type than {self._expected.dtype} "
                "(--dtype, --quantization, --kv-cache-dtype)"
            )
        return cause

    def _looks_filtered(self) -> bool:
        """Whether the server's probabilities are the trainer's divided by what a filter kept, at most 1, at each token;
        or some of its Top-K can never be sampled."""
        kept = [g.topk_logprobs for g in self._answer.generations if g.topk_logprobs is not None]
        if any(bool((values == float("-inf")).any()) for values in kept):
            return True
        difference = np.concatenate(self._reported) - np.concatenate([r.logprobs for r in self._readings])
        noise = min(self._tolerance.mean, self._tolerance.unexplained) + 0.1 * np.abs(difference).mean()
        # No filter keeps less than an eighth of the probability at most tokens.
        return bool((difference >= -noise).all() and len(difference) >= 8 and np.median(difference) < 2)

    def _routes(self, counts: RouteCounts, live: Distance, replayed: Distance) -> None:
        """Which experts, and what they do to the probabilities: a token at the border of two experts may go to another
        one in the trainer, but not where it is told which one."""
        tolerance, share = self._tolerance, counts.share
        numbers = (
            f"of {counts.rows} rows (a token in a layer) {share:.0%} have other experts than the trainer's routers "
            f"choose, {self._expected.dtype} allows {tolerance.routes:.0%}; with the server's experts the "
            f"probabilities differ by {replayed.probability:.2g}, with the trainer's own by {live.probability:.2g}"
        )
        shifted = counts.shifted_share
        if counts.rows and share > tolerance.routes / 8 and shifted < share / 2:
            self._refuse(
                f"shifted routed experts: they fit a neighbouring token ({shifted:.0%} differ; {numbers}). {_GATEWAY}"
            )
        if not self._within(replayed) and not self._within(live):
            self._refuse(self._cause(replayed))
        if share > tolerance.routes or not self._within(replayed):
            self._refuse(
                f"wrong routed experts: {numbers}. Its log-probabilities are right, so it reports experts of other "
                f"tokens, layers or requests: update the server. {_GATEWAY}"
            )

    def _topk(self) -> Distance | None:
        """The Top-K: values at the server's ids, and whether those ids are the best ones."""
        if not self._expected.topk_logprobs:
            return None
        (reported, computed, raw, best), used = self._topk_columns()
        if not np.isfinite(np.concatenate(reported)).all():
            self._refuse(
                "filtered distribution: some of its Top-K have probability 0, as after top-p, top-k or min-p. "
                f"{_FILTERED[self._answer.info.engine]}"
            )
        tolerance = self._tolerance
        found = distance(np.concatenate(reported)[used], np.concatenate(computed)[used])
        below = missing_from_best(np.concatenate(computed), np.concatenate(best))
        numbers = (
            f"its Top-K log-probabilities differ from the trainer's at the same ids by {found.mean:.2g} on average, "
            f"by {found.odds:.2g} in the median of the log-odds, and the ids are {below:.2g} below the trainer's best "
            f"on average; {self._expected.dtype} allows {tolerance.topk:g}, {tolerance.odds:g} and {tolerance.topk:g}"
        )
        better = better_explanation(reported, computed, raw, best, tolerance.unexplained)
        if better is not None:
            self._refuse(self._misread("Top-K", better, numbers))
        if not (found.mean <= tolerance.topk and found.odds <= tolerance.odds and below <= tolerance.topk):
            self._refuse(f"wrong Top-K: {numbers}; the sampled tokens' log-probabilities are right. {_GATEWAY}")
        return found

    def _topk_columns(self) -> tuple[tuple[list[Array], ...], NDArray[np.bool_]]:
        """``[R, K]`` of each response, the server's most probable id first: what it reported, the trainer's at the same
        ids, those at temperature 1, and the trainer's own best; and which slots of all of them together are in use.

        A filter may leave fewer than K ids: behind them all have 0, a certainty that tells nothing.
        """
        columns: tuple[list[Array], ...] = ([], [], [], [])
        every = []
        for generation, reading in zip(self._answer.generations, self._readings, strict=True):
            assert generation.topk_logprobs is not None and generation.topk_token_ids is not None
            assert reading.best_logprobs is not None
            is_used = generation.topk_token_ids[:, :-1].numpy() >= 0
            reported = generation.topk_logprobs[:, :-1].double().numpy()
            order = np.argsort(np.where(is_used, -reported, np.inf), 1, kind="stable")
            is_used = np.take_along_axis(is_used, order, 1)
            for column, values in zip(
                columns, (reported, reading.topk_logprobs, reading.raw_topk_logprobs), strict=False
            ):
                assert values is not None
                column.append(np.where(is_used, np.take_along_axis(values, order, 1), 0.0))
            columns[-1].append(np.where(is_used, reading.best_logprobs, 0.0))
            every.append(is_used)
        return columns, np.concatenate(every)
