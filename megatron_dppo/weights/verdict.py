"""Verdict of the probe: a server's response compared with what the trainer computes for the same tokens."""

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
from megatron_dppo.weights.probe_requests import (
    ProbeError,
    ProbeExpectation,
    ProbeResponse,
    RouteCounts,
    TrainerReading,
)


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Largest differences between server and trainer that pass (``docs/probe.md`` has the measurements)."""

    mean: float
    """Bound of the mean |log p - log q|, in nats."""
    largest: float
    """Bound of |log p - log q| of one token, in nats."""
    probability: float
    odds: float
    unexplained: float
    """``Distance.odds`` up to which no other explanation is considered."""
    routes: float
    """Bound of the share of rows (a token in a layer) with other experts."""
    layer_routes: float
    """Bound of that share in each layer."""
    topk: float
    """Bound of the mean |log p - log q| of the Top-K, and of how far its ids fall short of the best ones."""


TOLERANCES = {
    # Programs that sum in another order differ by about 1e-6 per token; large models have longer sums.
    "fp32": Tolerance(
        mean=3e-5, largest=1e-4, probability=3e-5, odds=3e-4, unexplained=3e-4, routes=0.02, layer_routes=0.1, topk=3e-4
    ),
    # 11 bits of mantissa: an eighth of bf16's rounding, and half of bf16's margin for tokens that change their expert.
    "fp16": Tolerance(
        mean=0.25,
        largest=float("inf"),
        probability=0.05,
        odds=0.2,
        unexplained=0.015,
        routes=0.2,
        layer_routes=0.35,
        topk=0.3,
    ),
    # 8 bits of mantissa: 0.4 % of each logit. A token between two experts may go to the other one, which moves its
    # log-probability by any amount. So there is no bound for a single token.
    "bf16": Tolerance(
        mean=0.5,
        largest=float("inf"),
        probability=0.1,
        odds=0.4,
        unexplained=0.03,
        routes=0.4,
        layer_routes=0.5,
        topk=0.6,
    ),
}
"""Tolerances by the coarser dtype of server and trainer.

In half precision a probe cannot distinguish the weights of one step from those of the next. Versions and digests do.
"""
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
    """Agreement of server and trainer."""

    logprobs: Distance
    """Distance with the trainer's own choice of experts."""
    replayed: Distance | None
    """Distance with the server's choice of experts. None: no routes."""
    topk: Distance | None
    routes: float | None
    """Share of rows with other experts. None: no routes."""


def verify_response(
    response: ProbeResponse, expected: ProbeExpectation, readings: Sequence[TrainerReading]
) -> ProbeResult:
    """Compare a server's response with what the trainer computes, one reading for each generation.

    A ProbeError names the likely cause and the fix, if they differ by more than the dtype explains, or another
    explanation fits better.
    """
    result = _ResponseCheck(response, expected, readings).result()
    if response.breach is not None:
        raise ProbeError(response.url, response.breach)
    return result


class _ResponseCheck:
    """Comparison of one response; each method compares one part of it."""

    def __init__(self, response: ProbeResponse, expected: ProbeExpectation, readings: Sequence[TrainerReading]) -> None:
        self._response = response
        self._expected = expected
        self._readings = readings
        self._tolerance = TOLERANCES[expected.dtype]
        self._reported = [g.logprobs.double().numpy() for g in response.generations]
        self._all_reported = np.concatenate(self._reported)
        self._all_computed = np.concatenate([reading.logprobs for reading in readings])

    def result(self) -> ProbeResult:
        """Return the result, or raise the error of the first part that differs."""
        # The order matters: wrong weights make everything else look wrong, too.
        live = [reading.logprobs for reading in self._readings]
        measured = distance(self._all_reported, self._all_computed)
        self._check_meaning(live, measured)
        replayed = [r.replayed_logprobs for r in self._readings if r.replayed_logprobs is not None]
        if not replayed:
            if not self._is_within_tolerance(measured):
                self._refuse(self._describe_cause(measured))
            return ProbeResult(logprobs=measured, replayed=None, topk=self._check_topk(), routes=None)
        counts = sum((r.routes for r in self._readings if r.routes is not None), RouteCounts())
        with_routes = distance(self._all_reported, np.concatenate(replayed))
        self._check_routes(counts, measured, with_routes)
        return ProbeResult(logprobs=measured, replayed=with_routes, topk=self._check_topk(), routes=counts.share)

    def _refuse(self, text: str) -> None:
        raise ProbeError(self._response.url, text)

    def _describe_distance(self, measured: Distance) -> str:
        tolerance = self._tolerance
        largest = "" if tolerance.largest == float("inf") else f", {measured.largest:.2g} at most"
        allowed = "" if tolerance.largest == float("inf") else f", {tolerance.largest:g}"
        return (
            f"its log-probabilities differ from the trainer's by {measured.mean:.2g} on average{largest}, its "
            f"probabilities by {measured.probability:.2g}, its log-odds by {measured.odds:.2g} in the median over "
            f"{len(self._all_reported)} tokens; {self._expected.dtype} allows {tolerance.mean:g}{allowed}, "
            f"{tolerance.probability:g} and {tolerance.odds:g}"
        )

    def _check_meaning(self, live: list[Array], measured: Distance) -> None:
        """Check the meaning of the sampled tokens' log-probabilities, robustly against single tokens."""
        reported, computed = self._all_reported, self._all_computed
        # Rounding moves none by more than 1.
        if not reported.any() and computed.min() < -1:
            self._refuse(
                "filtered distribution: every sampled token has the reported probability 1, as after greedy decoding "
                f"or top-k 1 ({self._describe_distance(measured)}). {_FILTERED[self._response.info.engine]}"
            )
        if (count := decimals(reported, computed)) is not None:
            self._refuse(f"rounded log-probabilities: the server reports {count} decimals. {_GATEWAY}")
        raw = [reading.raw_logprobs for reading in self._readings]
        tolerance = self._tolerance
        better = better_explanation(self._reported, live, raw, live, tolerance.unexplained)
        if better is not None:
            # One number for all tokens that only about fits: a filter leaves each position another mass.
            is_loose = better.odds > max(tolerance.unexplained, better.other_odds / 2)
            meaning = self._describe_meaning("log-probabilities", better, self._describe_distance(measured))
            self._refuse(self._describe_cause(measured) if is_loose else meaning)
        if not measured.odds <= tolerance.odds:
            self._refuse(self._describe_cause(measured))

    def _describe_meaning(self, what: str, better: Explanation, numbers: str) -> str:
        if better.name == "raw":
            return (
                f"raw {what}: the server reports those at temperature 1, not at the sampling temperature "
                f"{self._expected.temperature:g} ({numbers}). {_RAW[self._response.info.engine]}"
            )
        if better.name == "offset":
            if better.offset < 0:
                return f"changed {what}: all are {-better.offset:.2g} nats too low ({numbers}). {_GATEWAY}"
            return (
                f"filtered distribution: {what} are all {better.offset:.2g} nats too high, as after top-p, top-k or "
                f"min-p or over a smaller vocabulary ({numbers}). {_FILTERED[self._response.info.engine]}"
            )
        if better.name == "scaled":
            return (
                f"scaled {what}: the server reports {better.factor:.2g} times the trainer's ({numbers}), as at another "
                f"temperature than the {self._expected.temperature:g} that was asked for. {_GATEWAY}"
            )
        return f"shifted {what}: the server reports those of the {better.name} token ({numbers}). {_GATEWAY}"

    def _is_within_tolerance(self, measured: Distance) -> bool:
        tolerance = self._tolerance
        # NaN compares as False, so it is not within.
        close = measured.mean <= tolerance.mean and measured.largest <= tolerance.largest
        return close and measured.probability <= tolerance.probability and measured.odds <= tolerance.odds

    def _describe_cause(self, measured: Distance) -> str:
        info = self._response.info
        numbers = self._describe_distance(measured)
        if self._looks_filtered():
            filtered = f"after top-p, top-k or min-p or over a smaller vocabulary ({numbers})."
            probable = "filtered distribution: every token is at least as probable as in training, as"
            if info.policy_version > 0:
                # A filter would have shown in the first probe. Samples of other weights are more probable under those.
                return (
                    f"stale response or {probable} in a response that earlier weights gave (a cache in between, a sync "
                    f"that had no effect), or {filtered} {_GATEWAY}. If it filters: {_FILTERED[info.engine]}"
                )
            return f"{probable} {filtered} {_FILTERED[info.engine]}"
        if self._differs_in_some_tokens(measured):
            return (
                f"wrong log-probabilities of some tokens: most tokens agree, so its weights are right ({numbers}). "
                f"{_GATEWAY}"
            )
        if self._is_permuted():
            return f"log-probabilities in another order: sorted, they agree with the trainer's ({numbers}). {_GATEWAY}"
        cause = (
            f"wrong weights: {numbers}. The server serves {info.model!r}, version {info.policy_version}; compare it "
            "with model.path, and check that its weights were synced, with the adapter of a LoRA. If they were, "
            "something in between gives other numbers (a cache, noise, another temperature): give the URL of the "
            "server itself"
        )
        if measured.mean < 10 * self._tolerance.mean:
            cause += (
                f". The difference is small: the server may compute in a coarser type than {self._expected.dtype} "
                "(--dtype, --quantization, --kv-cache-dtype)"
            )
        return cause

    def _differs_in_some_tokens(self, measured: Distance) -> bool:
        """Return True if most tokens agree to the dtype's rounding. Other weights move every token."""
        tolerance = self._tolerance
        # The log-odds count tokens that are not nearly certain; 0 means that there are too few of them.
        agrees = 0 < measured.odds <= tolerance.unexplained
        return bool(
            agrees
            and np.median(np.abs(self._all_reported - self._all_computed)) <= min(tolerance.mean, tolerance.unexplained)
        )

    def _is_permuted(self) -> bool:
        """Return True if the reported numbers are the trainer's in another order."""
        in_order = distance(np.sort(self._all_reported), np.sort(self._all_computed))
        return in_order.mean <= min(self._tolerance.mean, self._tolerance.unexplained)

    def _looks_filtered(self) -> bool:
        """Return True if the response looks like that of a filtered distribution.

        A filter divides the probabilities by the mass of the tokens that it allows, at most 1. Or some of the Top-K
        have probability 0.
        """
        topk = [g.topk_logprobs for g in self._response.generations if g.topk_logprobs is not None]
        if any(bool((values == float("-inf")).any()) for values in topk):
            return True
        difference = self._all_reported - self._all_computed
        noise = min(self._tolerance.mean, self._tolerance.unexplained) + 0.1 * np.abs(difference).mean()
        # At most tokens, a usual filter allows at least an eighth of the probability: exp(-2).
        return bool((difference >= -noise).all() and len(difference) >= 8 and np.median(difference) < 2)

    def _check_routes(self, counts: RouteCounts, live: Distance, replayed: Distance) -> None:
        """Check the routes, and that replaying them explains the probabilities."""
        tolerance = self._tolerance
        share = counts.share
        numbers = (
            f"of {counts.rows} rows (a token in a layer) {share:.0%} have other experts than the trainer's routers "
            f"choose, {self._expected.dtype} allows {tolerance.routes:.0%}; with the server's experts the "
            f"probabilities differ by {replayed.probability:.2g}, with the trainer's own by {live.probability:.2g}"
        )
        shifted = counts.shifted_share
        # Routes moved by one token fit the neighbours far better than their own.
        if counts.rows and share > tolerance.routes / 8 and shifted < share / 2:
            self._refuse(
                f"shifted routed experts: they fit a neighbouring token ({shifted:.0%} differ; {numbers}). {_GATEWAY}"
            )
        if not self._is_within_tolerance(replayed) and not self._is_within_tolerance(live):
            self._refuse(self._describe_cause(replayed))
        layer_share = counts.worst_layer_share
        if share <= tolerance.routes and layer_share > tolerance.layer_routes:
            self._refuse(
                f"wrong routed experts of a layer: {layer_share:.0%} of the rows of one layer have other experts than "
                f"the trainer's router chooses, {self._expected.dtype} allows {tolerance.layer_routes:.0%} in a layer "
                f"({numbers}). It reports those of another layer or token there: update the server. {_GATEWAY}"
            )
        if share > tolerance.routes or not self._is_within_tolerance(replayed):
            self._refuse(
                f"wrong routed experts: {numbers}. Its log-probabilities are right, so it reports experts of other "
                f"tokens, layers or requests: update the server. {_GATEWAY}"
            )

    def _check_topk(self) -> Distance | None:
        """Check the Top-K: the values at the server's ids, and that these ids are the best ones."""
        if not self._expected.topk_logprobs:
            return None
        (reported, computed, raw, best), is_used = self._topk_columns()
        if not np.isfinite(np.concatenate(reported)).all():
            self._refuse(
                "filtered distribution: some of its Top-K have probability 0, as after top-p, top-k or min-p. "
                f"{_FILTERED[self._response.info.engine]}"
            )
        tolerance = self._tolerance
        measured = distance(np.concatenate(reported)[is_used], np.concatenate(computed)[is_used])
        below = missing_from_best(np.concatenate(computed), np.concatenate(best))
        numbers = (
            f"its Top-K log-probabilities differ from the trainer's at the same ids by {measured.mean:.2g} on average, "
            f"by {measured.odds:.2g} in the median of the log-odds, and the ids are {below:.2g} below the trainer's "
            f"best on average; {self._expected.dtype} allows {tolerance.topk:g}, {tolerance.odds:g} and "
            f"{tolerance.topk:g}"
        )
        better = better_explanation(reported, computed, raw, best, tolerance.unexplained)
        if better is not None:
            self._refuse(self._describe_meaning("Top-K", better, numbers))
        if not (measured.mean <= tolerance.topk and measured.odds <= tolerance.odds and below <= tolerance.topk):
            self._refuse(f"wrong Top-K: {numbers}; the sampled tokens' log-probabilities are right. {_GATEWAY}")
        return measured

    def _topk_columns(self) -> tuple[tuple[list[Array], ...], NDArray[np.bool_]]:
        """Return the Top-K columns of each generation and the mask of the slots in use.

        The columns are ``[R, K]``, the server's most probable id first: the reported log-probabilities, the trainer's
        at the same ids, those at temperature 1, and the trainer's own best. A filter may leave fewer than K ids; unused
        slots are 0 in all columns, so that they do not differ.
        """
        columns: tuple[list[Array], ...] = ([], [], [], [])
        masks = []
        for generation, reading in zip(self._response.generations, self._readings, strict=True):
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
            masks.append(is_used)
        return columns, np.concatenate(masks)
