"""Every policy loss behind one function: a keep mask, a weight, and one gradient.

    grad = -sum over tokens of  A_t * sg(min(r_t, C)) * M_t * grad log pi(a_t|s_t),     r_t = pi(a_t|s_t) / mu(a_t|s_t)

The mask M, the weight and the divergence carry no gradient. The gradient is that of arXiv 2602.04879, appendix on the
unified gradient. Two *values* go with it: ``-A min(r, C) M log pi`` (``form = "reinforce"``) and ``-A min(r, C) M``
(``"ratio"``, whose gradient is 0 above C, and below ``ratio_floor``). Compare gradients across frameworks, not curves.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megatron_dppo.config.loss import LossConfig
from megatron_dppo.losses.centering import residuals
from megatron_dppo.losses.counterfactuals import counterfactual_metrics
from megatron_dppo.losses.loss_metrics import common_metrics, policy_metrics
from megatron_dppo.losses.own import own_loss, own_mask
from megatron_dppo.losses.reduce import masked_sum, statistics_dtype
from megatron_dppo.losses.returns import kl_estimate
from megatron_dppo.losses.rules import Decision, decide
from megatron_dppo.losses.tokens import Tokens, check_shapes, prepare
from megatron_dppo.types import LossInputs, LossOutput, Metric


def dppo_loss(inputs: LossInputs, config: LossConfig) -> LossOutput:
    """A DPPO loss, for use inside another trainer; arguments, result and errors are those of ``policy_loss``.

    Example: the second of two tokens has moved 0.4 from its rollout probability, more than the 0.15 of DPPO-Binary-TV,
    and would move on. It gets no gradient; the first gets minus its ratio 0.5 / 0.4.

        >>> inputs = LossInputs(
        ...     logprobs=torch.tensor([0.5, 0.9]).log().requires_grad_(),
        ...     rollout_logprobs=torch.tensor([0.4, 0.5]).log(),
        ...     advantages=torch.tensor([1.0, 1.0]),
        ...     loss_mask=torch.tensor([True, True]),
        ... )
        >>> output = dppo_loss(inputs, LossConfig(name="dppo_binary_tv"))
        >>> output.keep_mask
        tensor([ True, False])
        >>> output.loss_sum.backward()
        >>> inputs.logprobs.grad
        tensor([-1.2500,  0.0000])

    Raises:
        ValueError: also when ``config.name`` is not a ``dppo_*`` loss.
    """
    if not config.is_dppo:
        names = ["dppo_binary_kl", "dppo_binary_tv", "dppo_topk_kl", "dppo_topk_tv", "dppo_recompute_*"]
        raise ValueError(f"dppo_loss got the loss {config.name!r}, expected one of {names}; policy_loss takes any name")
    return policy_loss(inputs, config)


def policy_loss(inputs: LossInputs, config: LossConfig, *, counterfactuals: bool = False) -> LossOutput:
    """The loss that ``config.name`` says, summed over the tokens of the loss mask; docs/loss.md has the formulas.

    Example: PPO's clipping on the same two tokens as in ``dppo_loss``: both ratios, 1.25 and 1.8, against 1.28.

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
        inputs: per-token tensors ``[T]``, log-probabilities in nats; values outside ``loss_mask`` may be anything, NaN
            and infinities included, and contribute exactly 0 to value and gradient. So does a token whose
            ``rollout_logprobs`` is not finite; it also leaves ``num_tokens``. ``config.required_inputs`` names
            the fields that must be there; Top-K fields are ``[T, K+1]``.
        config: name, thresholds and the rest.
        counterfactuals: also report what other losses would have done (``losses.counterfactuals``).

    Returns:
        ``loss_sum`` (connected to ``inputs.logprobs`` even when no token is left), ``num_tokens`` (dropped tokens
        stay in it), ``keep_mask`` and metrics. Statistics are fp32, or float64 for float64 log-probabilities.
        ``loss_sum`` summed over all micro-batches, divided once by the global ``num_tokens``, is the aggregated loss.

    Raises:
        FunctionError: a user's function raised, or returned something unusable.
        ValueError: a required input is missing, shapes differ, a mask is not bool, or ``entropy`` has no gradient
            although there is an entropy bonus, or ``topk_logprobs`` although the score is centered.
    """
    tokens = prepare(inputs, config)
    unknown = Metric((inputs.loss_mask & ~tokens.mask).sum(), inputs.loss_mask.sum())
    inputs = replace(inputs, loss_mask=tokens.mask)
    decision = decide(tokens, config)
    factor = None if config.mask is None else own_mask(inputs, tokens, config)
    keep, token_loss = _term(inputs, tokens, decision, factor, config)
    coefficient = _own_coefficient(tokens, token_loss) if counterfactuals and config.own_loss is not None else None
    extra = {"unknown_rollout_fraction": unknown}
    if config.kl_coef:
        penalty = _kl_term(inputs, tokens, config)
        token_loss = token_loss + config.kl_coef * penalty
        extra["kl_penalty"] = Metric(masked_sum(penalty.detach(), tokens.mask), tokens.mask.sum())
    if config.entropy_coef:
        token_loss = token_loss - config.entropy_coef * _entropy(inputs)
    if inputs.token_weights is not None:
        token_loss = token_loss * torch.where(tokens.mask, inputs.token_weights.detach().to(token_loss.dtype), 0.0)
    loss_sum = token_loss.sum()
    metrics = policy_metrics(tokens, decision, keep, config.ratio_limits[1]) | common_metrics(inputs, loss_sum) | extra
    if counterfactuals:
        metrics |= counterfactual_metrics(
            tokens, decision, keep, config, inputs.token_weights, factor=factor, coefficient=coefficient
        )
    found, log_pi = tokens.mask.sum(), inputs.logprobs.detach()
    return LossOutput(loss_sum=loss_sum, num_tokens=found, keep_mask=keep, metrics=metrics, logprobs=log_pi)


def supervised_loss(inputs: LossInputs) -> LossOutput:
    """Negative log-likelihood of the labels, summed over the loss mask; for a supervised warm-up.

    Needs no rollout log-probabilities; advantages are ignored.

    Raises:
        ValueError: shapes differ, or ``loss_mask`` is not bool.
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
    """0 for every token: for a head that is to compute another term alone."""
    zero = 0.0 * masked_sum(inputs.logprobs.to(statistics_dtype(inputs.logprobs)), inputs.loss_mask)
    return LossOutput(loss_sum=zero, num_tokens=inputs.loss_mask.sum(), keep_mask=inputs.loss_mask, metrics={})


def _term(
    inputs: LossInputs, tokens: Tokens, decision: Decision, factor: Tensor | None, config: LossConfig
) -> tuple[Tensor, Tensor]:
    """Which tokens are kept, and the term of each, ``[T]`` both, without penalty and bonus."""
    if factor is not None:
        clipped = torch.where(factor != 0, decision.clipped_weight, 0.0)
        decision = decision._replace(keep=decision.keep & (factor != 0), clipped_weight=clipped)
    keep = decision.keep & tokens.mask
    if config.own_loss is not None:
        found, kept = own_loss(inputs, tokens, config)
        keep, token_loss = keep & kept, torch.where(keep, found, 0.0)
    else:
        token_loss = _policy_term(tokens, decision, keep, config)
        if config.centers_score:
            token_loss = token_loss + _centering_term(inputs, tokens, keep, config)
    return keep, token_loss if factor is None else token_loss * factor


def _own_coefficient(tokens: Tokens, token_loss: Tensor) -> Tensor:
    """``[T]`` the derivative of a user's loss in the log-probabilities; 0 where none is asked for."""
    if not token_loss.requires_grad:
        return torch.zeros_like(tokens.advantages)
    (found,) = torch.autograd.grad(token_loss.sum(), tokens.logprobs, retain_graph=True, allow_unused=True)
    return torch.zeros_like(tokens.advantages) if found is None else found


def _policy_term(tokens: Tokens, decision: Decision, keep: Tensor, config: LossConfig) -> Tensor:
    """``[T]``, 0 outside the loss mask. Every mask is a `where`, on the inside of a product too: a NaN or an infinity
    behind a factor of 0 comes back, in the value or in the gradient."""
    floor, cap = config.ratio_limits
    weight = decision.weight.clamp(floor, cap)
    acts = tokens.mask & (tokens.advantages != 0)
    # pi(a) = 0: r log pi tends to 0, and so does its gradient.
    contributes = keep & acts & (tokens.logprobs.detach() != -torch.inf)
    logprobs = torch.where(contributes, tokens.logprobs, 0.0)
    if config.resolved_form == "reinforce":
        return torch.where(contributes, -tokens.advantages * weight * logprobs, 0.0)
    # The value w with the gradient of w * log pi: differentiating exp() itself would overflow before the clamp.
    moves = (decision.weight >= floor) & (decision.weight <= cap)
    direction = torch.where(moves, logprobs - logprobs.detach(), 0.0)
    value = torch.where(keep, weight * (1 + direction), decision.clipped_weight)
    return torch.where(acts, -tokens.advantages * value, 0.0)


def _centering_term(inputs: LossInputs, tokens: Tokens, keep: Tensor, config: LossConfig) -> Tensor:
    """``[T]`` ``A`` times the sampler's expected score, with the gradient of log pi at the ids of the head."""
    assert inputs.topk_logprobs is not None
    if torch.is_grad_enabled() and inputs.logprobs.requires_grad and not inputs.topk_logprobs.requires_grad:
        raise ValueError(
            "topk_logprobs carries no gradient, so score_centering would subtract nothing; pass log pi at the ids of "
            "the head without detaching it"
        )
    residual = residuals(tokens, config)
    head = inputs.topk_logprobs[:, :-1].to(tokens.logprobs.dtype)
    acts = (keep & tokens.mask & (tokens.advantages != 0))[:, None] & (residual != 0) & head.isfinite()
    scores = torch.where(acts, residual.to(head.dtype) * torch.where(acts, head, 0.0), 0.0)
    return tokens.advantages * scores.sum(-1)


def _kl_term(inputs: LossInputs, tokens: Tokens, config: LossConfig) -> Tensor:
    """``[T]`` differentiable estimates of KL(pi || anchor), see ``kl_estimate``."""
    anchor = tokens.rollout_logprobs
    if config.kl_anchor == "reference":
        assert inputs.reference_logprobs is not None
        anchor = torch.where(tokens.mask, inputs.reference_logprobs.detach().to(anchor.dtype), 0.0)
    return kl_estimate(tokens.logprobs, anchor, config.kl_estimator)


def _entropy(inputs: LossInputs) -> Tensor:
    assert inputs.entropy is not None
    if torch.is_grad_enabled() and inputs.logprobs.requires_grad and not inputs.entropy.requires_grad:
        raise ValueError(
            "entropy carries no gradient, so an entropy bonus (entropy_coef) would do nothing; pass the entropy of pi "
            "without detaching it, or set entropy_coef to 0"
        )
    return torch.where(inputs.loss_mask, inputs.entropy.to(statistics_dtype(inputs.entropy)), 0.0)
