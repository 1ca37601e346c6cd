"""Every policy loss behind one function: a keep mask, a weight, and one gradient.

    grad = -sum over tokens of  A_t * sg(min(r_t, C)) * M_t * grad log pi(a_t|s_t),     r_t = pi(a_t|s_t) / mu(a_t|s_t)

The mask M, the weight and the divergence carry no gradient. The gradient is that of arXiv 2602.04879, appendix on the
unified gradient. Two *values* go with it: ``-A min(r, C) M log pi`` (``form = "reinforce"``) and ``-A min(r, C) M``
(``"ratio"``, whose gradient is 0 above C, and below ``ratio_floor``). Compare gradients across frameworks, not curves.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_dppo.config.loss import LossConfig
from megatron_dppo.losses.centering import centering_term
from megatron_dppo.losses.divergence import kl_estimate, topk_sums
from megatron_dppo.losses.loss_metrics import common_metrics, counterfactual_metrics, policy_metrics
from megatron_dppo.losses.mismatch import decide, mask_outside
from megatron_dppo.losses.predictive import predictive_sums
from megatron_dppo.losses.reduce import masked_sum, statistics_dtype
from megatron_dppo.losses.rule import as_loss
from megatron_dppo.losses.tokens import Tokens, check_shapes, prepare
from megatron_dppo.losses.user_functions import call_user_mask
from megatron_dppo.types import NO_NEEDS, LossInputs, LossNeeds, LossOutput, Metric, SlotSums


def policy_loss(inputs: LossInputs, config: LossConfig, *, counterfactuals: bool = False) -> LossOutput:
    """Compute the loss that ``config.name`` selects, summed over the loss mask. docs/loss.md has the formulas.

    Example: PPO's clipping on two tokens: both ratios, 1.25 and 1.8, against 1.28.

        >>> inputs = LossInputs(
        ...     logprobs=torch.tensor([0.5, 0.9]).log().requires_grad_(),
        ...     rollout_logprobs=torch.tensor([0.4, 0.5]).log(),
        ...     advantages=torch.tensor([1.0, 1.0]),
        ...     loss_mask=torch.tensor([True, True]),
        ... )
        >>> output = policy_loss(inputs, LossConfig(name="ppo_clip"))
        >>> output.keep_mask, output.loss_sum.detach()
        (tensor([ True, False]), tensor(-2.5300))
        >>> output.metrics["mask_fraction"].numerator, output.metrics["mask_fraction"].denominator
        (tensor(1), tensor(2))

    Args:
        inputs: Per-token tensors ``[T]``, log-probabilities in nats; values outside ``loss_mask`` may be anything, NaN
            and infinities included, and contribute exactly 0 to value and gradient. So does a token whose
            ``rollout_logprobs`` is not finite; it also leaves ``num_tokens``. ``config.required_inputs`` names
            the fields that must be there; Top-K fields are ``[T, K+1]``.
        config: Name, thresholds and the rest.
        counterfactuals: Also report what other losses would have done (``losses.loss_metrics``).

    Returns:
        ``loss_sum`` (connected to ``inputs.logprobs`` even when no token is left), ``num_tokens`` (masked tokens
        stay in it), ``keep_mask`` and metrics. Statistics are fp32, or float64 for float64 log-probabilities.
        ``loss_sum`` summed over all micro-batches, divided once by the global ``num_tokens``, is the aggregated loss.

    Raises:
        FunctionError: A user's function raised, or returned something unusable.
        ValueError: A required input is missing, shapes differ, a mask is not bool, or ``entropy`` has no gradient
            although there is an entropy bonus, or ``topk_logprobs`` although the score is centered.
            ``megatron_dppo.policy_loss`` also refuses ``logprobs`` without a gradient, of integers, NaN or above 0, and
            advantages that are not finite. A GPU would wait for these values, so there only the first call of each
            loss checks them. A name as ``config`` and a list as a column are a TypeError.

    Long because the docstring has the contract and an example; the body is a list of steps.
    """
    loss = as_loss(config)
    # Prepare: check the inputs, and replace values outside the loss mask by zeros.
    tokens = prepare(inputs, loss)
    # From here on the loss mask leaves out tokens without a finite log mu, for the penalties and metrics too.
    inputs = replace(inputs, loss_mask=tokens.mask)

    # Decide: trust region, mismatch mask and user mask, without gradient.
    decision = decide(tokens, loss)
    factor = None if loss.user_mask is None else call_user_mask(loss.user_mask, loss.mask_options, inputs, tokens)
    if factor is not None:
        # A user's mask of bools is a weight of 0 or 1: tokens of weight 0 count as masked.
        decision = mask_outside(decision, factor != 0)

    # Terms: the only part with a gradient.
    keep, token_loss = loss.terms(inputs, tokens, decision)
    if loss.centering:
        token_loss = token_loss + centering_term(inputs, tokens, loss)
    if factor is not None:
        token_loss = token_loss * factor
    coefficient = _coefficient(tokens, token_loss) if counterfactuals and not loss.decides_gradient else None
    token_loss, extra = add_penalties(token_loss, inputs, tokens, loss)

    # Aggregate and report.
    loss_sum = aggregate(token_loss, inputs, tokens)
    metrics = policy_metrics(tokens, decision, keep, loss.ratio_limits[1]) | common_metrics(inputs, loss_sum)
    metrics |= extra
    if counterfactuals:
        metrics |= counterfactual_metrics(
            tokens, decision, keep, loss, inputs.token_weights, factor=factor, coefficient=coefficient
        )
    return LossOutput(
        loss_sum=loss_sum,
        num_tokens=tokens.mask.sum(),
        keep_mask=keep,
        metrics=metrics,
        logprobs=inputs.logprobs.detach(),
        entropy=None if inputs.entropy is None else inputs.entropy.detach(),
        divergence=decision.divergence.detach(),
    )


def supervised_loss(inputs: LossInputs) -> LossOutput:
    """Negative log-likelihood of the labels, summed over the loss mask; for supervised training.

    Needs no rollout log-probabilities; advantages are ignored.

    Raises:
        ValueError: Shapes differ, or ``loss_mask`` is not bool.
    """
    check_shapes(inputs)
    loss_sum = -masked_sum(inputs.logprobs.to(statistics_dtype(inputs.logprobs)), inputs.loss_mask)
    return LossOutput(
        loss_sum=loss_sum,
        num_tokens=inputs.loss_mask.sum(),
        keep_mask=inputs.loss_mask,
        metrics=common_metrics(inputs, loss_sum),
    )


def no_policy_loss(inputs: LossInputs) -> LossOutput:
    """Return 0 for every token, for a head that computes only another term."""
    zero = 0.0 * masked_sum(inputs.logprobs.to(statistics_dtype(inputs.logprobs)), inputs.loss_mask)
    return LossOutput(loss_sum=zero, num_tokens=inputs.loss_mask.sum(), keep_mask=inputs.loss_mask, metrics={})


def _coefficient(tokens: Tokens, token_loss: Tensor) -> Tensor:
    """Return the derivative of the terms in the log-probabilities, ``[T]``; 0 where none is asked for."""
    if not token_loss.requires_grad:
        return torch.zeros_like(tokens.advantages)
    # retain_graph: the same terms are differentiated again for the update.
    (gradient,) = torch.autograd.grad(token_loss.sum(), tokens.logprobs, retain_graph=True, allow_unused=True)
    return torch.zeros_like(tokens.advantages) if gradient is None else gradient


def add_penalties(
    token_loss: Tensor, inputs: LossInputs, tokens: Tokens, config: LossConfig
) -> tuple[Tensor, dict[str, Metric]]:
    """Add the KL penalty and the entropy bonus to the terms ``[T]``; return them and what is reported."""
    extra = {}
    if config.kl_coef:
        penalty = kl_term(inputs, tokens, config)
        token_loss = token_loss + config.kl_coef * penalty
        extra["kl_penalty"] = Metric(masked_sum(penalty.detach(), tokens.mask), tokens.mask.sum())
    if config.entropy_coef:
        token_loss = token_loss - config.entropy_coef * entropy_term(inputs)
    return token_loss, extra


def aggregate(token_loss: Tensor, inputs: LossInputs, tokens: Tokens) -> Tensor:
    """Return the sum of the terms ``[T]``, each times its aggregation weight (``token_weights``; None = 1)."""
    if inputs.token_weights is not None:
        # Penalty and bonus are in the terms by now, so they get the same weight.
        token_loss = token_loss * torch.where(tokens.mask, inputs.token_weights.detach().to(token_loss.dtype), 0.0)
    return token_loss.sum()


def kl_term(inputs: LossInputs, tokens: Tokens, config: LossConfig) -> Tensor:
    """Return ``[T]`` differentiable estimates of KL(pi || ``kl_target``), see ``kl_estimate``."""
    target = tokens.rollout_logprobs
    if config.kl_target == "reference":
        assert inputs.reference_logprobs is not None
        target = torch.where(tokens.mask, inputs.reference_logprobs.detach().to(target.dtype), 0.0)
    return kl_estimate(tokens.logprobs, target, config.kl_estimator)


def entropy_term(inputs: LossInputs) -> Tensor:
    """Return the entropy of pi with its gradient, ``[T]``, 0 outside the loss mask."""
    assert inputs.entropy is not None
    if torch.is_grad_enabled() and inputs.logprobs.requires_grad and not inputs.entropy.requires_grad:
        raise ValueError(
            "entropy carries no gradient, so an entropy bonus (entropy_coef) would do nothing; pass the entropy of pi "
            "without detaching it, or set entropy_coef to 0"
        )
    return torch.where(inputs.loss_mask, inputs.entropy.to(statistics_dtype(inputs.entropy)), 0.0)


@dataclass(frozen=True)
class Objective:
    """A loss and its properties that a trainer relies on."""

    loss: Callable[[LossInputs], LossOutput]
    """The function that is minimized."""
    by_token: bool
    """True if each token's term depends on that token alone, so that a row can be split into chunks."""
    skips_zero_advantage: bool
    """True if a token with advantage 0 has no gradient, so that its row can be skipped."""
    needs: LossNeeds = NO_NEEDS
    """Statistics that a head must provide."""


def policy_objective(
    config: LossConfig, *, counterfactuals: bool = False, statistics: Mapping[str, float] | None = None
) -> Objective:
    """Return ``policy_loss`` with this configuration.

    Args:
        config: Configuration of the loss.
        counterfactuals: Also report what other losses would have done.
        statistics: Numbers of the whole batch that the loss declares, by name.
    """
    # Only a loss over whole sequences reads sequence ids.
    by_token = "sequence_ids" not in config.required_inputs
    acts_without_advantage = config.kl_coef > 0 or config.entropy_coef > 0 or config.needs.zero_advantage
    return Objective(
        loss=lambda inputs: policy_loss(
            replace(inputs, statistics=statistics or {}), config, counterfactuals=counterfactuals
        ),
        by_token=by_token,
        # A loss over sequences needs all their tokens, also those without a gradient of their own.
        skips_zero_advantage=by_token and not acts_without_advantage,
        needs=LossNeeds(
            entropy_gradient=config.entropy_coef > 0 or config.needs.entropy_gradient,
            other_square="topk_other_square" in config.required_inputs,
            slot_gradient=config.needs.topk_gradient or config.centering,
            topk_sums=_sums(config),
        ),
    )


def _sums(config: LossConfig) -> SlotSums | None:
    if not config.is_topk or config.reads_topk_slots:
        return None
    return predictive_sums if config.topk_summary == "rate" else topk_sums


SUPERVISED = Objective(supervised_loss, by_token=True, skips_zero_advantage=False)
"""Negative log-likelihood, whatever the advantages."""
