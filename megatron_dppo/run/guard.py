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

import torch

from megatron_dppo.config.model import ModelConfig
from megatron_dppo.config.rollout import RolloutConfig
from megatron_dppo.config.train import TrainConfig
from megatron_dppo.errors import TrainingStopped
from megatron_dppo.parallel.platform import coarser
from megatron_dppo.policy.server_sums import ServerSums, SumsBySource
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
"""Factor over the run's own median from which on a difference is unusual."""
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
_DEVIATIONS = 6.0
"""Standard errors by which a mean must exceed a limit that follows from the run itself."""
_HISTORY = 32
"""Steps whose median is the run's own noise."""

_DROPPED_CAUSES = (
    "Likely causes: overflow in the engine's half precision (try rollout.dtype = 'fp32', or bf16 instead of fp16, and "
    "resume with --allow-changed rollout.dtype), a sampling filter, or a proxy that rewrites the server's responses"
)
_DIFFERENCE_CAUSES = (
    "Likely causes: log-probabilities, tokens or routed experts of another position or request; log-probabilities at "
    "another temperature; other weights than were sent; a coarser type in the engine than rollout.dtype says "
    "(quantized weights or cache, TF32). Run the probe after every sync (rollout.weight_sync.probe_every = 1) and use "
    "the URLs of the servers themselves, without a gateway. If the engine is meant to be that coarse, raise "
    "train.max_first_prob_diff"
)


@dataclass
class GuardHistory:
    """Means of the run's earlier steps that limits follow from; part of a checkpoint."""

    prob_diffs: list[float] = field(default_factory=list)
    """Mean |pi - mu| of the on-policy tokens of each of the last first updates."""
    stale_prob_diffs: list[float] = field(default_factory=list)
    """The same of tokens from older weights."""

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
    _tested: set[str] = field(default_factory=set)
    """Servers whose tokens of this step are in ``sampling`` already: a second check must not count them twice."""

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
    ) -> FirstUpdateGuard:
        """Return the guard of one step.

        Args:
            train: Configured limits.
            rollout: Engine and its dtype, which the default limits follow from.
            model: Dtype of the trainer.
            nonfinite_fraction: See the field, as for the others below.
            is_on_policy: See the field.
            is_topk: See the field.
            history: None starts a new one.
            sampling: See the field.
            selection: None: everything is trained on.
        """
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
        )

    def __call__(self, metrics: Mapping[str, float], sums: SumsBySource | None = None) -> dict[str, str]:
        """Check the reduced metrics of the first update before it is applied. They are the same on every rank.

        Args:
            metrics: Metrics of the update. Without a token in its loss there is nothing to check.
            sums: Sums of each server. None checks the metrics alone.

        Returns:
            The reasons of the servers that must be left out, by URL. Empty if all of them are right.

        Raises:
            TrainingStopped: A limit is exceeded, and no server without a problem is left. The message names the
                numbers, the limits and likely causes.
        """
        overall = self._overall_problems(metrics)
        if problems := self._step_problems(metrics):
            # All at once: they may have one cause.
            _stop(problems + overall)
        by_server = {} if sums is None else self._server_problems(sums)
        good = [(source.is_stale, each) for source, each in (sums or {}).items() if source.server not in by_server]
        if by_server:
            # "" stands for an engine without servers, which cannot be left out.
            if not good or "" in by_server:
                _stop([f"{server}: {problem}" if server else problem for server, problem in by_server.items()])
            return by_server
        if overall:
            _stop(overall)
        self.history.add(good)
        return {}

    def _overall_problems(self, metrics: Mapping[str, float]) -> list[str]:
        """Return what is wrong with the mean over all servers: the only number without sums by server."""
        difference = metrics.get("abs_prob_diff")
        if not self.is_on_policy or self.max_prob_diff is None or difference is None:
            return []
        # Written as `not a <= b` so that NaN counts as exceeded, as in all checks below.
        return [] if difference <= self.max_prob_diff else [self._difference_problem(difference, self.max_prob_diff)]

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
            problems.append(
                f"in one layer the routers choose other experts than the engine reported for {disagreement:.0%} of the "
                f"tokens (train/router_live_disagreement_max); {self.dtype} allows {limit:.0%}. Likely causes: routes "
                "of another layer, token or request. Update the server, and run the probe after every sync "
                "(rollout.weight_sync.probe_every = 1)"
            )
        return problems

    def _server_problems(self, sums: SumsBySource) -> dict[str, str]:
        problems: dict[str, str] = {}
        current = {source.server: each for source, each in sums.items() if not source.is_stale}
        if self.sampling is not None:
            untested = {server: each for server, each in current.items() if server not in self._tested}
            self._tested.update(untested)
            problems |= self.sampling.add_surprise(untested, self.selection)
        for source, each in sums.items():
            if source.is_stale:
                problem = self._stale_problem(each)
            else:
                means = [other.mean("prob_diff") for server, other in current.items() if server != source.server]
                problem = self._current_problem(each, min(means, default=None))
            if problem is not None:
                problems[source.server] = problem
        return problems

    def _current_problem(self, tokens: ServerSums, best_other: float | None) -> str | None:
        """Return what is wrong with tokens of the current weights, or None.

        Args:
            tokens: Sums of one server.
            best_other: Mean |pi - mu| of the best other server. It stands for the run's history in the first step.
        """
        if self.max_prob_diff is None:
            return None
        difference = tokens.mean("prob_diff")
        # ``not <=``, because NaN is a problem, too.
        if not difference <= self.max_prob_diff:
            return self._difference_problem(difference, self.max_prob_diff)
        if not self.follows_run:
            return None
        if (bias := _bias(tokens, _USUAL_PROB_DIFF[self.dtype])) is not None:
            return (
                f"log pi - log mu is {bias:+.3g} on average, and its size is {tokens.mean('abs_log_diff'):.3g}. "
                "Rounding goes both ways, this does not: log-probabilities are shifted, scaled or of another "
                f"temperature. {_DIFFERENCE_CAUSES}"
            )
        usual = best_other if self.history.usual is None else self.history.usual
        limit = (
            _USUAL_PROB_DIFF[self.dtype] if usual is None else max(_USUAL_PROB_DIFF[self.dtype], _USUAL_FACTOR * usual)
        )
        # Few tokens may be far away by chance.
        if usual is not None and difference - _DEVIATIONS * _standard_error(tokens) > limit:
            return self._difference_problem(
                difference,
                limit,
                f"{_USUAL_FACTOR:g} times the median of this run's last steps, in the first step the best server's "
                f"mean, and at least {_USUAL_PROB_DIFF[self.dtype]:g}",
            )
        divergence = tokens.mean("divergence")
        if self.is_topk and divergence > _MAX_TOPK_DIVERGENCE:
            return (
                f"the Top-K of the policy and of the engine differ by {divergence:.3g} on average, where both have the "
                f"same weights; allowed is {_MAX_TOPK_DIVERGENCE:g}. The sampled tokens' log-probabilities fit, so the "
                "Top-K is that of another position or request. Update the server, and use its URL without a gateway"
            )
        return None

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


def _bias(tokens: ServerSums, usual: float) -> float | None:
    """Return the mean of d = log pi - log mu if it is too large for rounding, else None.

    Rounding has no sign: then the mean of d is -KL(mu || pi), which is about minus half the mean of d^2.
    """
    if tokens.mean("abs_log_diff") <= usual:
        return None
    # Half of the squares follows from rounding; the rest is margin.
    expected = 0.75 * tokens.log_diff_square + 0.1 * tokens.abs_log_diff
    if abs(tokens.log_diff) <= expected + _DEVIATIONS * math.sqrt(tokens.log_diff_square):
        return None
    return tokens.mean("log_diff")


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
