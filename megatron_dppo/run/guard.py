"""Guard of each step's first update, against rollouts that do not fit the policy.

Before the first update the policy and the rollout engine have the same weights, so their probabilities differ by
rounding alone. A larger difference means wrong data. The server that sent it is left out from then on. Without another
server the run stops before it learns from such data.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import ClassVar

import torch

from megatron_dppo.config.model import ModelConfig
from megatron_dppo.config.rollout import RolloutConfig
from megatron_dppo.config.train import TrainConfig
from megatron_dppo.errors import TrainingStopped
from megatron_dppo.parallel.platform import coarser
from megatron_dppo.policy.server_sums import FAR_EVIDENCE, FAR_PROB_DIFF, ServerSums, SumsBySource, TokenSource
from megatron_dppo.run.evidence import ServerEvidence, normal_evidence
from megatron_dppo.run.sampling_test import SamplingTest, SelectionShares
from megatron_dppo.types import Metric, RolloutGroup

_MAX_PROB_DIFF = {
    # One limit per dtype, for every engine: the engines differ by less than the distance to these limits.
    # docs/probe.md has the measurements.
    "fp32": 1e-3,
    "fp16": 0.015,
    "bf16": 0.06,
}
"""Default limit of the mean |pi - mu| of an on-policy update, by the coarser dtype of engine and trainer."""

_USUAL_PROB_DIFF = {"fp32": 1e-4, "fp16": 1e-3, "bf16": 4e-3}
"""Mean |pi - mu| up to which a difference is never called unusual for a run."""
_USUAL_FACTOR = 5.0
"""Factor over what is usual from which on a difference is unusual."""
_STALE_FACTOR = 10.0
"""Factor over the largest of the last steps: a policy that diverges moves faster from step to step, but not so fast."""
_STALE_HISTORY = 8
_USUAL_STALE_PROB_DIFF = 0.02
"""Mean |pi - mu| of tokens from older weights up to which a difference is never called unusual."""
_MAX_STALE_PROB_DIFF = 0.3
"""Limit of the mean |pi - mu| of tokens from older weights: what a run learns in a few steps moves it by less."""
_MAX_TOPK_DIVERGENCE = 0.15
"""Limit of the mean Top-K divergence of an on-policy update: the default threshold of the mask."""
_MAX_LAYER_DISAGREEMENT = {"fp32": 0.1, "fp16": 0.35, "bf16": 0.5}
"""Limit of the share of tokens in one layer whose live experts differ from the replayed ones."""
_FEW_DEVIATIONS = 3.0
"""Standard errors by which a mean must exceed the limit of the dtype: nine tokens with another expert are no lie."""
_DEVIATIONS = 6.0
"""Standard errors by which a mean must exceed a limit that follows from the run itself."""
_HISTORY = 32
"""Steps whose median is the run's own noise."""
_PROB_DIFF_RATES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Rates of the evidence of |pi - mu|: exponents of 1 / limit. The best rate is 1 / limit for differences of all tokens,
and 1 for a few tokens with the largest one."""
_SIGN_RATES = (0.3, 1.0, 3.0, 10.0, 30.0)
_FAR_RATE = 0.75
_ROUTE_RATES = (0.1, 0.3, 1.0)

_DROPPED_CAUSES = (
    "Likely causes: overflow in the engine's half precision (try rollout.dtype = 'fp32', or bf16 instead of fp16, and "
    "resume with --allow-changed rollout.dtype), a sampling filter, or a proxy that rewrites the server's responses"
)
_DIFFERENCE_CAUSES = (
    "Likely causes: log-probabilities, tokens or routed experts of another position or request; log-probabilities at "
    "another temperature, over a smaller vocabulary, or that something changes (noise, a shift, single tokens far too "
    "low); other weights than were sent (a cache of responses, a missing adapter); a coarser type in the engine than "
    "rollout.dtype says (quantized weights or cache, TF32). Run the probe after every sync "
    "(rollout.weight_sync.probe_every = 1) and use the URLs of the servers themselves, without a gateway. If the "
    "engine is meant to be that coarse, raise train.max_first_prob_diff"
)


class GuardEvidence(ServerEvidence):
    """Evidence of all steps that a server's numbers are not the policy's."""

    num_products: ClassVar[int] = len(_PROB_DIFF_RATES) + 4 * len(_SIGN_RATES) + 1 + len(_ROUTE_RATES)

    def add_prob_diff(self, server: str, tokens: ServerSums, limit: float) -> bool:
        """Add the sum of |pi - mu| against its limit, and return True if it is too much."""
        excess = tokens.prob_diff - limit * tokens.tokens
        rates = [limit**-exponent for exponent in _PROB_DIFF_RATES]
        squares = tokens.prob_diff_square - 2 * limit * tokens.prob_diff + limit**2 * tokens.tokens
        return self._exceeds(server, "prob_diff", normal_evidence(rates, excess, squares))

    def add_signs(self, server: str, tokens: ServerSums) -> bool:
        """Add two statistics of the sign of d = log pi - log mu, and return True if they have one.

        - Rounding has no sign: then the mean of d is -KL(mu || pi), about minus half the mean of d^2. Half of the
          squares follows from rounding; the rest is margin.
        - q = |pi - mu| is at most |d|, and half of it belongs to either sign, but for the squares: the smaller of the
          two sums of |d| by sign is at least that. It holds for any d, also for one that is far away by itself.
        """
        allowed = 0.75 * tokens.log_diff_square + 0.1 * tokens.abs_log_diff
        smaller = (tokens.abs_log_diff - abs(tokens.log_diff)) / 2
        one_sided = 0.4 * tokens.prob_diff - 0.75 * tokens.prob_diff_square - smaller
        exceeds = []
        for sign in (-1.0, 1.0):
            name = "low" if sign < 0 else "high"
            excess = sign * tokens.log_diff - allowed
            exceeds.append(
                self._exceeds(server, f"sign_{name}", normal_evidence(_SIGN_RATES, excess, tokens.log_diff_square))
            )
            # The sum belongs to the larger sign; the other one has no evidence.
            excess = one_sided if sign * tokens.log_diff > 0 else -tokens.prob_diff / 2
            squares = tokens.prob_diff_square / 4
            exceeds.append(self._exceeds(server, f"side_{name}", normal_evidence(_SIGN_RATES, excess, squares)))
        return any(exceeds)

    def add_far_responses(self, server: str, tokens: ServerSums) -> bool:
        """Add the responses that are far away as a whole, and return True if they are too many."""
        # The mean of exp(rate * evidence beyond e) is at most 1 + exp(-e) * rate / (1 - rate).
        cost = math.log1p(math.exp(-FAR_EVIDENCE) * _FAR_RATE / (1 - _FAR_RATE))
        return self._exceeds(server, "far", [_FAR_RATE * tokens.far_responses - cost * tokens.responses])

    def add_routes(self, server: str, tokens: ServerSums, limit: float) -> float | None:
        """Add the rows of each layer with other experts, and return the largest share if a layer has too many."""
        counts = list(zip(tokens.routes.rows, tokens.routes.differ, strict=True))
        # Bennett's inequality of a sum of indicators.
        evidence = [rate * differ - rows * limit * math.expm1(rate) for rows, differ in counts for rate in _ROUTE_RATES]
        is_exceeded = bool(counts) and self._exceeds(server, "routes_by_layer", evidence, choices=len(counts))
        return tokens.routes.largest_share if is_exceeded else None


@dataclass
class GuardHistory:
    """Basis of the limits: means of the run's earlier steps, which are part of a checkpoint, and the probe's."""

    prob_diffs: list[float] = field(default_factory=list)
    """Mean |pi - mu| of the on-policy tokens of each of the last first updates."""
    stale_prob_diffs: list[float] = field(default_factory=list)
    """The same of tokens from older weights."""
    probed: dict[str, float] = field(default_factory=dict)
    """Mean |p - q| of each server's last probe, by URL."""
    evidence: GuardEvidence = field(default_factory=GuardEvidence)

    def add(self, sums: Sequence[tuple[bool, ServerSums]]) -> None:
        """Add the means of a step that passed. Each entry says whether its tokens are stale."""
        for wants_stale, values in ((False, self.prob_diffs), (True, self.stale_prob_diffs)):
            tokens = sum(each.tokens for is_stale, each in sums if is_stale == wants_stale)
            if tokens:
                values.append(sum(each.prob_diff for is_stale, each in sums if is_stale == wants_stale) / tokens)
                del values[:-_HISTORY]

    @property
    def usual(self) -> float | None:
        """Median of the last on-policy steps. None before the first one."""
        return statistics.median(self.prob_diffs) if self.prob_diffs else None

    @property
    def usual_stale(self) -> float | None:
        """Largest of the last steps with older tokens. None before the first one."""
        return max(self.stale_prob_diffs[-_STALE_HISTORY:], default=None)


@dataclass(frozen=True, kw_only=True)
class FirstUpdateGuard:
    """Limits that the first update of a step must keep."""

    max_prob_diff: float | None
    """Limit of the mean |pi - mu| of tokens from the current weights. None disables this and all limits that follow
    from the run itself."""
    is_on_policy: bool
    """True if the current weights sampled every token of the step."""
    follows_run: bool
    """True if the run's own noise is a limit, too."""
    max_nonfinite_fraction: float | None
    """Limit of ``nonfinite_fraction``. None disables the check."""
    nonfinite_fraction: float
    """Share of this step's sampled tokens without a finite rollout log-probability, over all ranks."""
    engine: str
    """Name of the rollout engine, for the message."""
    dtype: str
    """The coarser dtype of engine and trainer."""
    noise: float = 0.0
    """``train.layer_noise.std``, which the policy's probabilities include."""
    is_topk: bool = False
    """True if the loss compares the Top-K of both policies."""
    history: GuardHistory = field(default_factory=GuardHistory)
    sampling: SamplingTest | None = None
    """Test of the servers' sampling. None disables it."""
    selection: SelectionShares = field(default_factory=SelectionShares)
    """Shares of the sampled responses that are not trained on."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Reasons of the servers that this step has left out already, by URL: a stop names them, too."""
    _tested: set[str] = field(default_factory=set)
    """Servers whose tokens of this step are evidence already: a second check must not count them twice."""

    @classmethod
    def from_config(
        cls,
        train: TrainConfig,
        rollout: RolloutConfig,
        model: ModelConfig,
        *,
        nonfinite_fraction: float,
        is_on_policy: bool,
        is_topk: bool = False,
        history: GuardHistory | None = None,
        sampling: SamplingTest | None = None,
        selection: SelectionShares | None = None,
        left_out: Mapping[str, str] | None = None,
    ) -> FirstUpdateGuard:
        """Return the guard of one step. None starts an empty history, and leaves nothing out."""
        dtype = coarser(rollout.rounding_dtype, model.dtype)
        # A perturbed engine differs on purpose; the trainer's own model must agree to the bit.
        default = None if rollout.perturbation.is_active else _MAX_PROB_DIFF[dtype]
        if rollout.batch_invariant:
            default = 0.0
        configured = train.max_first_prob_diff
        limit = default if configured == "auto" else None if configured == "off" else configured
        return cls(
            max_prob_diff=limit,
            is_on_policy=is_on_policy,
            follows_run=configured == "auto" and limit is not None and not train.layer_noise.std,
            max_nonfinite_fraction=None if train.max_nonfinite_fraction == "off" else train.max_nonfinite_fraction,
            nonfinite_fraction=nonfinite_fraction,
            engine=rollout.engine,
            dtype=dtype,
            noise=train.layer_noise.std,
            is_topk=is_topk,
            history=history or GuardHistory(),
            sampling=sampling,
            selection=selection or SelectionShares(),
            left_out=dict(left_out or {}),
        )

    def __call__(self, metrics: Mapping[str, float], sums: SumsBySource | None = None) -> dict[str, str]:
        """Check the reduced metrics of the first update before it is applied. They are the same on every rank.

        Without a token in the loss there is nothing to check. Without ``sums`` the servers are not told apart. Return
        the reasons of the servers that must be left out, by URL.

        Raises:
            TrainingStopped: A limit is exceeded, and no server without a problem is left.
        """
        step = self._step_problems(metrics) + self._overall_problems(metrics, sums)
        by_server = {} if sums is None else self._server_problems(sums)
        if step and sums is not None and not by_server:
            by_server = self._wrong_routes(sums)
        good = {source: each for source, each in (sums or {}).items() if each.tokens and source.server not in by_server}
        # "" stands for an engine without servers, which cannot be left out.
        if by_server and good and "" not in by_server:
            # The step is checked once more without them: a problem of the whole step may be theirs.
            self.left_out.update(by_server)
            return by_server
        if by_server or step:
            # All at once: they may have one cause.
            named = self.left_out | by_server
            _stop([f"{server}: {problem}" if server else problem for server, problem in named.items()] + step)
        self.history.add([(source.is_stale, each) for source, each in good.items() if not self._is_suspect(source)])
        return {}

    def _is_suspect(self, source: TokenSource) -> bool:
        is_suspect = self.history.evidence.is_suspect(source.server)
        return is_suspect or (self.sampling is not None and self.sampling.is_suspect(source.server))

    def _overall_problems(self, metrics: Mapping[str, float], sums: SumsBySource | None) -> list[str]:
        """Return what is wrong with the mean over all servers: the only number without sums by server."""
        difference = metrics.get("abs_prob_diff")
        if not self.is_on_policy or self.max_prob_diff is None or difference is None:
            return []
        allowed = self.max_prob_diff + self._slack(list((sums or {}).values()))
        # Written as `not a <= b` so that NaN counts as exceeded, as in all checks below.
        return [] if difference <= allowed else [self._difference_problem(difference, self.max_prob_diff)]

    def _slack(self, sums: Sequence[ServerSums]) -> float:
        """Return by how much the mean |pi - mu| of tokens may exceed the limit of the dtype by chance.

        A limit that the user has set, and that of batch-invariant engines, are as they are.
        """
        tokens = sum(each.tokens for each in sums)
        if not self.follows_run or not self.max_prob_diff or not tokens:
            return 0.0
        slack = _FEW_DEVIATIONS * math.sqrt(sum(each.prob_diff_square for each in sums)) / tokens
        return slack if math.isfinite(slack) else 0.0

    def _step_problems(self, metrics: Mapping[str, float]) -> list[str]:
        """Return what is wrong with the step whatever server sent it."""
        problems = []
        if self.max_nonfinite_fraction is not None and not self.nonfinite_fraction <= self.max_nonfinite_fraction:
            problems.append(
                f"{self.nonfinite_fraction:.2%} of the sampled tokens have no finite rollout log-probability and would "
                f"be dropped from the loss; train.max_nonfinite_fraction = {self.max_nonfinite_fraction:g}. "
                f"{_DROPPED_CAUSES}"
            )
        disagreement = metrics.get("router_live_disagreement_max", 0.0)
        limit = _MAX_LAYER_DISAGREEMENT[self.dtype]
        if self.is_on_policy and self.max_prob_diff is not None and not disagreement <= limit:
            problems.append(self._routes_problem(disagreement))
        return problems

    def _wrong_routes(self, sums: SumsBySource) -> dict[str, str]:
        """Return the servers without which the step's routes keep their limit; none if no server is left."""
        limit = _MAX_LAYER_DISAGREEMENT[self.dtype]
        remaining = {source.server: each.routes for source, each in sums.items()}
        problems: dict[str, str] = {}
        while remaining and reduce(add, remaining.values()).excess(limit) > 0:
            worst = max(remaining, key=lambda server: remaining[server].excess(limit))
            problems[worst] = self._routes_problem(remaining.pop(worst).largest_share)
        return problems if remaining else {}

    def _routes_problem(self, share: float) -> str:
        return (
            f"in one layer the routers choose other experts than the engine reported for {share:.0%} of the tokens "
            f"(train/router_live_disagreement_max); {self.dtype} allows {_MAX_LAYER_DISAGREEMENT[self.dtype]:.0%}. "
            "Likely causes: routes of another layer, token or request. Update the server, and run the probe after "
            "every sync (rollout.weight_sync.probe_every = 1)"
        )

    def _server_problems(self, sums: SumsBySource) -> dict[str, str]:
        problems: dict[str, str] = {}
        current = {source.server: each for source, each in sums.items() if not source.is_stale and each.tokens}
        untested = {server: each for server, each in current.items() if server not in self._tested}
        self._tested.update(untested)
        if self.sampling is not None:
            problems |= self.sampling.add_ratios(untested, self.selection)
            problems |= self.sampling.add_surprise(untested, self.selection)
        for source, each in sums.items():
            if not each.tokens:
                continue
            if source.is_stale:
                problem = self._stale_problem(each)
            else:
                problem = self._current_problem(source.server, current, is_new=source.server in untested)
            if problem is not None:
                problems[source.server] = problem
        return problems

    def _current_problem(self, server: str, current: Mapping[str, ServerSums], *, is_new: bool) -> str | None:
        """Return what is wrong with a server's tokens of the current weights, or None; they are new evidence or not."""
        tokens = current[server]
        if self.max_prob_diff is None:
            return None
        difference = tokens.mean("prob_diff")
        # ``not <=``, because NaN is a problem, too.
        if not difference <= self.max_prob_diff + self._slack([tokens]):
            return self._difference_problem(difference, self.max_prob_diff)
        if not self.follows_run or not self.max_prob_diff:
            return None
        problem = self._evidence_problem(server, current) if is_new else None
        if problem is not None:
            return problem
        divergence = tokens.mean("divergence")
        if self.is_topk and divergence > _MAX_TOPK_DIVERGENCE:
            return (
                f"the Top-K of the policy and of the engine differ by {divergence:.3g} on average, where both have the "
                f"same weights; allowed is {_MAX_TOPK_DIVERGENCE:g}. The sampled tokens' log-probabilities fit, so the "
                "Top-K is that of another position or request. Update the server, and use its URL without a gateway"
            )
        return None

    def _evidence_problem(self, server: str, current: Mapping[str, ServerSums]) -> str | None:
        """Add a server's tokens to its evidence, and return what is wrong with them and those of earlier steps."""
        tokens = current[server]
        evidence = self.history.evidence
        limit, origin = self._usual_limit(server, current)
        share = evidence.add_routes(server, tokens, _MAX_LAYER_DISAGREEMENT[self.dtype])
        is_far = evidence.add_far_responses(server, tokens)
        # Below what is usual for the dtype the sign may be that of the program.
        is_noticeable = tokens.mean("abs_log_diff") > _USUAL_PROB_DIFF[self.dtype]
        has_sign = is_noticeable and evidence.add_signs(server, tokens)
        is_unusual = evidence.add_prob_diff(server, tokens, limit)
        if has_sign:
            return (
                f"log pi - log mu is {tokens.mean('log_diff'):+.3g} on average, and its size is "
                f"{tokens.mean('abs_log_diff'):.3g}. Rounding goes both ways, this does not: log-probabilities are "
                f"shifted, scaled, of another temperature or over a smaller vocabulary. {_DIFFERENCE_CAUSES}"
            )
        if is_unusual:
            return self._difference_problem(tokens.mean("prob_diff"), limit, origin)
        if is_far:
            return (
                f"whole responses differ from the policy by more than {FAR_PROB_DIFF:g} on average, the others by "
                f"rounding: log-probabilities of other requests, or made up. {_DIFFERENCE_CAUSES}"
            )
        return None if share is None else self._routes_problem(share)

    def _usual_limit(self, server: str, current: Mapping[str, ServerSums]) -> tuple[float, str]:
        """Return the limit of the expected |pi - mu| that follows from the run, and where it comes from."""
        assert self.max_prob_diff is not None
        least = _USUAL_PROB_DIFF[self.dtype]
        usual = self.history.usual
        if usual is not None:
            origin = f"times the median of this run's last steps, and at least {least:g}"
        elif (best_other := self._best_other(server, current)) is not None:
            usual = best_other
            origin = f"times the mean of the best server in this first step, and at least {least:g}"
        elif not server:
            # The engine in this process cannot lie.
            return self.max_prob_diff, "train.max_first_prob_diff"
        else:
            # Nobody but the server itself has shown what is usual, and the probe has measured it in few tokens.
            usual = max(least, self.history.probed.get(server, 0.0))
            origin = f"times what the probe has measured of this server, and of at least {least:g}"
        limit = min(max(least, _USUAL_FACTOR * usual), self.max_prob_diff)
        return limit, f"{_USUAL_FACTOR:g} {origin}"

    def _best_other(self, server: str, current: Mapping[str, ServerSums]) -> float | None:
        """Return the mean |pi - mu| of the best other server in this step that is not under suspicion."""
        means = [
            other.mean("prob_diff")
            for name, other in current.items()
            if name != server and not self._is_suspect(TokenSource(name, False))
        ]
        return min(means, default=None)

    def _stale_problem(self, tokens: ServerSums) -> str | None:
        """Return what is wrong with tokens of older weights, or None."""
        if not self.follows_run:
            return None
        usual = self.history.usual_stale
        limit = _MAX_STALE_PROB_DIFF
        if usual is not None:
            limit = min(limit, max(_STALE_FACTOR * usual, _USUAL_STALE_PROB_DIFF))
        difference = tokens.mean("prob_diff")
        if not difference - _DEVIATIONS * _standard_error(tokens) > limit:
            return None
        return (
            f"the policy's probabilities of tokens from older weights differ from those that the engine reported by "
            f"{difference:.3g} on average; allowed is {limit:.3g} ({_STALE_FACTOR:g} times the largest of this run's "
            f"last {_STALE_HISTORY} steps, at most {_MAX_STALE_PROB_DIFF:g}). If the policy itself moves that fast, "
            f"lower the learning rate (and resume with --allow-changed optimizer.lr). {_DIFFERENCE_CAUSES}"
        )

    def _difference_problem(self, difference: float, limit: float, origin: str = "") -> str:
        noise = (
            f"The policy includes train.layer_noise.std = {self.noise:g}, which makes a difference by itself: "
            "raise train.max_first_prob_diff, or lower it (and resume with --allow-changed train.layer_noise.std). "
        )
        origin = origin or "train.max_first_prob_diff"
        return (
            f"the policy's probabilities of the sampled tokens differ from those that the engine "
            f"{self.engine!r} reported by {difference:.3g} on average, before the first update of the step, where "
            f"both have the same weights; {self.dtype} allows {limit:g} "
            f"({origin}). {noise if self.noise else ''}{_DIFFERENCE_CAUSES}"
        )


def _stop(problems: Sequence[str]) -> None:
    raise TrainingStopped(
        "the rollouts of this step do not fit the policy; nothing was learned from them:\n"
        + "\n".join(f"  - {problem}" for problem in problems)
    )


def _standard_error(tokens: ServerSums) -> float:
    """Return the standard error of the mean |pi - mu|: one token with another expert can move it by 1 / tokens."""
    return math.sqrt(tokens.prob_diff_square) / tokens.tokens


def count_nonfinite_tokens(groups: Sequence[RolloutGroup]) -> Metric:
    """Return the share of sampled tokens whose rollout log-probability is not finite; no loss includes them."""
    completions = [rollout.completion for group in groups for rollout in group.rollouts]
    # One tensor of all tokens: an operation for each response would take longer than all of its tokens.
    logprobs = [torch.zeros(0)]
    for completion in completions:
        if completion.logprobs is not None:
            mask = completion.loss_mask
            logprobs.append(completion.logprobs if mask is None else completion.logprobs[mask])
    sampled = torch.cat(logprobs)
    return Metric(int((~sampled.isfinite()).sum()), sampled.numel())
