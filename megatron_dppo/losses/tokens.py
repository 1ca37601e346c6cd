"""The inputs of a loss, checked, and with everything outside the loss mask made harmless."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal

import torch
from torch import Tensor

from megatron_dppo.config.loss import LossConfig
from megatron_dppo.errors import FunctionError
from megatron_dppo.losses.divergence import divergence_from_sums, evict, other_masses, topk_kl, topk_tv, valid_slots
from megatron_dppo.losses.predictive import Tail, divergence_rate, predictive_sums, tail_square
from megatron_dppo.losses.reduce import statistics_dtype
from megatron_dppo.types import LossInputs
from megatron_dppo.types.token_columns import columns_on_request

_MAX_LOG_RATIO = 80.0
"""Limit of log ratios: exp(80) is still finite in fp32. As log pi <= 0, a larger log ratio needs log mu < -80, a token
of probability 2e-35 that no engine samples: the clamp changes no real result, it only keeps a corrupt one finite and
visible."""
_ADVICE = {
    "rollout_logprobs": "ask the rollout engine for them (log-probabilities recomputed by the trainer make a different "
    "algorithm, one that diverges)",
    "topk_logprobs": "gather log pi at the rollout's Top-K ids and the sampled id, over the whole vocabulary",
    "rollout_topk_logprobs": "ask the rollout engine for its Top-K log-probabilities",
    "topk_valid": "mark the slots in use; slot K only where the sampled token is outside the Top-K",
    "topk_other_square": "sum pi^2 over the ids outside the slots, or set tail to 'aggregated'",
    "vocab_size": "give V, or set tail to 'aggregated'",
    "recomputed_logprobs": "recompute them in the trainer at the rollout's weights, before the first update",
    "sequence_ids": "give each token the index of its sequence",
    "ages": "count the updates since the weights that sampled each token, or remove threshold_age",
    "reference_logprobs": "compute them with the reference policy, or set kl_coef to 0",
    "entropy": "pass the entropy of pi with its gradient, or set entropy_coef to 0",
    "token_weights": "compute them with losses.token_weights, or use aggregation token_mean",
}
_TOPK = ("topk_logprobs", "rollout_topk_logprobs", "topk_valid")


@dataclass(frozen=True)
class TopK:
    """The Top-K set after eviction."""

    logprobs: Tensor | None
    """Log pi, with a gradient if the inputs have one. Shape [T, K+1]. None if only the sums are known."""
    sums: Tensor | None
    """Sums over all slots. Shape [T, 2] or [T, 6]."""
    rollout_logprobs: Tensor
    """Log mu. Shape [T, K+1]."""
    valid: Tensor
    """True on used slots. Bool, shape [T, K+1]."""
    other_logprob: Tensor | None
    """Log of pi's mass outside the slots. Shape [T]."""
    other_square: Tensor | None
    """Sum of pi^2 outside the slots. Shape [T]."""
    support: int | Tensor | None
    """Number of ids that pi can sample, or ``[T]`` of each token; for a uniform tail."""

    def divergence(self, kind: Literal["tv", "kl"]) -> Tensor:
        """Return the total variation or KL on the set, ``[T]`` float64 or float32."""
        if self.logprobs is not None:
            return (topk_tv if kind == "tv" else topk_kl)(
                self.logprobs, self.rollout_logprobs, self.valid, self.other_logprob
            )
        assert self.sums is not None and self.other_logprob is not None
        return divergence_from_sums(kind, self.sums, self.rollout_logprobs, self.valid, self.other_logprob)

    def masses(self) -> tuple[Tensor, Tensor]:
        """Return the mass outside the set under pi and mu, ``[T]`` float64 each."""
        # Without pi's slots ``other_logprob`` is known, and mu's slots only stand in for an argument that is then not
        # read.
        log_p, log_m = valid_slots(
            self.rollout_logprobs if self.logprobs is None else self.logprobs, self.rollout_logprobs, self.valid
        )
        return other_masses(log_p, log_m, self.other_logprob)

    def rate(self, kind: Literal["tv", "kl"], tail: Tail, logprobs: Tensor, rollout_logprobs: Tensor) -> Tensor:
        """Return the ``divergence_rate`` of the sampled tokens, ``[T]``."""
        sums, other, square = self.rate_parts(tail)
        sampled = (logprobs.detach().double().exp(), rollout_logprobs.double().exp())
        return divergence_rate(kind, sums, sampled, other, square)

    def rate_parts(self, tail: Tail) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
        """Return what the rates of all ids of a position share: sums ``[T, 6]``, masses outside, and Q ``[T]``."""
        sums = self.sums
        if self.logprobs is not None:
            sums = predictive_sums(self.logprobs, self.rollout_logprobs, self.valid)
        assert sums is not None
        other = self.masses()
        # Ids outside the set, over which a uniform tail spreads pi's remaining mass.
        num_other = None if self.support is None else self.support - self.valid.sum(-1)
        return sums, other, tail_square(tail, other[0], self.other_square, num_other)


@dataclass(frozen=True)
class Tokens:
    """Prepared inputs of a loss; all ``[T]``, in the statistics dtype. Only ``logprobs`` has a gradient."""

    mask: Tensor
    """The loss mask, without tokens whose log mu is not finite."""
    logprobs: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    log_ratio: Tensor
    """Log pi - log mu, clamped."""
    recomputed_logprobs: Tensor | None
    sequence_ids: Tensor | None
    topk: TopK | None
    ages: Tensor | None = None
    """Age in updates."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """Columns that the engine returned on request, by their field of ``LossInputs``."""
    statistics: Mapping[str, float] = field(default_factory=dict)
    """Numbers of the whole batch that the loss declares, by name."""

    @property
    def ratio(self) -> Tensor:
        """Pi / mu, clamped."""
        return self.log_ratio.exp()

    @property
    def sequences(self) -> Tensor:
        """Sequence ids, where the loss has checked that they are there."""
        if self.sequence_ids is None:
            raise ValueError("sequence_ids is None")
        return self.sequence_ids

    @property
    def topk_set(self) -> TopK:
        """Top-K set, where the loss has checked that it is there."""
        if self.topk is None:
            raise ValueError("the Top-K fields are None")
        return self.topk

    @property
    def recomputed(self) -> Tensor:
        """The recomputed log-probabilities, where the loss has checked that they are there."""
        if self.recomputed_logprobs is None:
            raise ValueError("recomputed_logprobs is None")
        return self.recomputed_logprobs

    @property
    def recomputed_log_ratio(self) -> Tensor:
        """Log pi - log pi' of the recomputed log-probabilities, clamped."""
        return self.limited(self.logprobs.detach() - self.recomputed)

    def statistic(self, name: str) -> Tensor:
        """Return a number of the whole batch as a scalar of the statistics dtype, on the device of the tokens."""
        # No Python number: CUDA divides by one as a product with its inverse, which rounds differently.
        return self.log_ratio.new_full((), self.statistics[name])

    @staticmethod
    def limited(log_ratio: Tensor) -> Tensor:
        """Return log ratios that are small enough for ``exp``."""
        return log_ratio.clamp(max=_MAX_LOG_RATIO)


def prepare(inputs: LossInputs, config: LossConfig) -> Tokens:
    """Check the inputs and replace values outside the loss mask by zeros.

    A token whose rollout log-probability is not finite leaves the mask: nothing is known about how it was sampled.
    """
    # The anchor comes first: if several inputs are missing, its advice is the one that matters.
    for name in sorted(config.required_inputs, key=lambda n: n != "rollout_logprobs"):
        if not hasattr(inputs, name):
            known = ", ".join(_column_names()) or "none"
            raise FunctionError(f"{config.input_reason(name)} needs the column {name!r}; engines return: {known}")
        if getattr(inputs, name) is None and not (name == "topk_logprobs" and inputs.topk_sums is not None):
            advice = _ADVICE.get(name, "ask the rollout engine for it")
            what = f"needs {name} because of {config.input_reason(name)}"
            if name == "rollout_logprobs":
                what = "is anchored on the rollout policy's own log-probabilities"
            raise ValueError(f"the loss {config.name!r} {what}, but {name} is None; {advice}")
    for name in config.declared_statistics():
        if name not in inputs.statistics:
            raise ValueError(
                f"the loss {config.name!r} needs statistics[{name!r}], a number of the whole batch, but it is missing. "
                "Fix: pass statistics = losses.batch_statistics(inputs, config) of all tokens of the update"
            )
    check_shapes(inputs)
    assert inputs.rollout_logprobs is not None
    mask = inputs.loss_mask & inputs.rollout_logprobs.isfinite()
    dtype = statistics_dtype(inputs.logprobs, inputs.rollout_logprobs)

    def constant(values: Tensor) -> Tensor:
        # Not a product with the mask: an infinity outside of it times 0 is NaN.
        return torch.where(mask, values.detach().to(dtype), 0.0)

    # The only column that keeps its gradient.
    logprobs = torch.where(mask, inputs.logprobs.to(dtype), 0.0)
    rollout_logprobs = constant(inputs.rollout_logprobs)
    return Tokens(
        mask=mask,
        logprobs=logprobs,
        rollout_logprobs=rollout_logprobs,
        advantages=constant(inputs.advantages),
        # No lower limit: the exponential of a very small log ratio is 0, which is a valid weight.
        log_ratio=(logprobs.detach() - rollout_logprobs).clamp(max=_MAX_LOG_RATIO),
        recomputed_logprobs=None if inputs.recomputed_logprobs is None else constant(inputs.recomputed_logprobs),
        sequence_ids=inputs.sequence_ids,
        topk=_topk(inputs, mask, config) if config.is_topk else None,
        ages=None if inputs.ages is None else constant(inputs.ages),
        columns={name: constant(rows) for name in _column_names() if (rows := getattr(inputs, name)) is not None},
        statistics=inputs.statistics,
    )


def _column_names() -> list[str]:
    """Return the fields of ``LossInputs`` that an engine returns on request."""
    return [column.name for column in columns_on_request().values() if column.name is not None]


def _topk(inputs: LossInputs, mask: Tensor, config: LossConfig) -> TopK:
    assert inputs.rollout_topk_logprobs is not None and inputs.topk_valid is not None
    slots = inputs.rollout_topk_logprobs.shape[-1]
    if slots != config.topk + 1:
        raise ValueError(
            f"rollout_topk_logprobs has {slots} slots, expected topk + 1 = {config.topk + 1}; "
            f"set loss.topk to {slots - 1}"
        )
    # Rows outside the mask have no valid slot: K zeros of padding would otherwise be a probability mass of K.
    valid = inputs.topk_valid & mask[:, None]
    other = inputs.topk_other_logprob
    rollout_logprobs = inputs.rollout_topk_logprobs.detach()
    square = inputs.topk_other_square
    support = _support(inputs) if "vocab_size" in config.required_inputs else None
    if inputs.topk_logprobs is None:
        if config.reads_topk_slots or other is None:
            raise ValueError(
                "topk_sums without topk_logprobs needs topk_other_logprob. topk_eviction = true, centering and "
                "user functions that need the Top-K read single slots. Fix: pass topk_logprobs"
            )
        if config.topk_summary == "rate" and inputs.topk_sums is not None and inputs.topk_sums.shape[-1] != 6:
            raise ValueError("direction = 'predictive' needs [T, 6] losses.predictive_sums as topk_sums, got [T, 2]")
        return TopK(None, inputs.topk_sums, rollout_logprobs, valid, other, square, support)
    if config.evicts_topk:
        valid, other, square = evict(inputs.topk_logprobs, valid, other, square)
    return TopK(inputs.topk_logprobs, None, rollout_logprobs, valid, other, square, support)


def _support(inputs: LossInputs) -> int | Tensor | None:
    if inputs.vocab_size is None or inputs.allowed_counts is None:
        return inputs.vocab_size
    # Under a sampling mask pi is 0 outside the allowed ids, so a uniform tail spreads over these only.
    counts = inputs.allowed_counts.to(inputs.logprobs.device)
    return torch.where(counts > 0, counts, inputs.vocab_size)


def check_shapes(inputs: LossInputs) -> None:
    """Check that fields have the shape of ``logprobs``, Top-K fields one more dimension, and masks are bool."""
    expected = tuple(inputs.logprobs.shape)
    if inputs.topk_sums is not None and tuple(inputs.topk_sums.shape) not in ((*expected, 2), (*expected, 6)):
        shape = tuple(inputs.topk_sums.shape)
        raise ValueError(f"topk_sums has shape {shape}, expected [T, 2] or [T, 6] with T = {expected}")
    for name in (f.name for f in fields(inputs) if f.name not in (*_TOPK, "topk_sums", "vocab_size", "statistics")):
        value = getattr(inputs, name)
        if value is not None and tuple(value.shape) != expected:
            raise ValueError(f"{name} has shape {tuple(value.shape)}, expected that of logprobs, {expected}")
    shapes = {name: tuple(value.shape) for name in _TOPK if (value := getattr(inputs, name)) is not None}
    for name, shape in shapes.items():
        first = next(iter(shapes.values()))
        if shape != first or shape[:-1] != expected or shape[-1] < 2:
            raise ValueError(
                f"{name} has shape {shape}, expected [T, K+1] with T = {expected}, {first} like the others"
            )
    for name in ("loss_mask", "topk_valid"):
        value = getattr(inputs, name)
        if value is not None and value.dtype != torch.bool:
            raise ValueError(f"{name} must be bool, got {value.dtype}; pass {name.removeprefix('loss_')}.bool()")
