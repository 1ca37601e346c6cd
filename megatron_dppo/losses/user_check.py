"""Check of a user-defined loss and mask on made-up tokens, before a run starts.

It also finds what no single call shows: a token's result must not depend on the tokens that happen to be in the same
call, or, with ``needs(sequences=True)``, on those of other sequences. Heads call a loss on chunks of tokens, rows hold
any samples, and ranks share them out; a loss that normalises over its call would train differently with each of these.
"""

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.config.loss import LossConfig
from megatron_dppo.config.user_functions import FunctionNeeds
from megatron_dppo.errors import FunctionError, UserError
from megatron_dppo.functions import is_function_name
from megatron_dppo.losses.objective import policy_loss
from megatron_dppo.losses.statistics import batch_statistics
from megatron_dppo.types import LossInputs
from megatron_dppo.types.token_columns import columns_on_request

_LENGTHS = (5, 7, 4)
_LEAVES = ("logprobs", "entropy", "topk_logprobs")
_TOLERANCE = 1e-5


def check_user_functions(config: LossConfig) -> None:
    """Call the loss on a few tokens, whole and in parts; a FunctionError says what a function does wrong."""
    if is_function_name(config.name):
        try:
            _check("loss.name", config.name, config.needs, config)
        except UserError:
            raise
        except (Exception, SystemExit) as error:  # of a class; what a function raises is told with its line
            raise FunctionError(f"loss.name = {config.name!r} raised {type(error).__name__}: {error}") from error
    if config.user_mask is not None:
        _check("loss.mask", config.user_mask.name, config.user_mask.needs, config)


def _check(setting: str, name: str, needs: FunctionNeeds, config: LossConfig) -> None:
    inputs = _inputs(config)
    gradients = _gradients(inputs, config)
    for leaf, gradient in gradients.items():
        if not bool(gradient.isfinite().all()):
            raise FunctionError(
                f"{setting} = {name!r} has a gradient with respect to {leaf} that is not finite "
                f"({int((~gradient.isfinite()).sum())} of {gradient.numel()} numbers), from finite inputs; look for a "
                "root, a division or a logarithm of 0 behind a torch.where"
            )
    if setting == "loss.name":
        _check_sign(name, config)
    # Alone, a part must have the gradients that it has among the others.
    for part in _parts(inputs.loss_mask.numel(), in_sequences="sequence_ids" in config.required_inputs):
        alone = _gradients(_select(inputs, part), config)
        for leaf, gradient in gradients.items():
            if not torch.allclose(alone[leaf], gradient[part], rtol=_TOLERANCE, atol=_TOLERANCE):
                unit = "sequence" if needs.sequences else "token"
                fix = "" if needs.sequences else "; for a loss over sequences, declare needs(sequences=True)"
                raise FunctionError(
                    f"{setting} = {name!r}: the gradient of a token depends on the other {unit}s of the call, or "
                    f"changes from call to call; a term may depend on its own {unit} only{fix}"
                )
    # Penalty and bonus have a gradient at advantage 0 by themselves.
    penalized = config.kl_coef > 0 or config.entropy_coef > 0
    if setting == "loss.name" and not needs.zero_advantage and not penalized:
        idle = inputs.advantages == 0
        if any(bool((gradient[idle] != 0).any()) for gradient in gradients.values()):
            raise FunctionError(
                f"{setting} = {name!r} declares zero_advantage = False, but has a gradient where the "
                "advantage is 0; remove the declaration"
            )


def _check_sign(name: str, config: LossConfig) -> None:
    """Check that a positive advantage raises log pi: the loss, which is minimized, must fall with it.

    Where all policies agree, no trust region masks a token. Terms that do not depend on the advantage cancel.
    """
    inputs = _inputs(config)
    assert inputs.rollout_logprobs is not None
    on_policy = replace(
        inputs,
        logprobs=inputs.rollout_logprobs,
        recomputed_logprobs=inputs.rollout_logprobs,
        reference_logprobs=inputs.rollout_logprobs,
        topk_logprobs=inputs.rollout_topk_logprobs,
    )
    ones = torch.ones_like(inputs.advantages)
    raised, lowered = (
        float(_gradients(replace(on_policy, advantages=sign * ones), config)["logprobs"].sum()) for sign in (1, -1)
    )
    if raised > lowered:
        raise FunctionError(
            f"loss.name = {name!r} makes responses with a positive advantage less likely: d loss / d log pi is "
            f"{raised:+.3g} for an advantage of 1 and {lowered:+.3g} for -1, and a loss is minimized. Fix: return it "
            "with the other sign"
        )


def _parts(count: int, *, in_sequences: bool) -> list[Tensor]:
    everything = torch.arange(count)
    if in_sequences:
        return list(everything.split(list(_LENGTHS)))
    # Two parts of unequal length, then every token alone: a mean over the call, or a look at a neighbor, changes one
    # of them.
    return [everything[: count // 3], everything[count // 3 :], *everything.split(1)]


def _inputs(config: LossConfig) -> LossInputs:
    inputs = made_up_inputs(max(config.topk, 1) if config.is_topk else 1)
    return replace(inputs, statistics=batch_statistics(inputs, config))


def _gradients(inputs: LossInputs, config: LossConfig) -> dict[str, Tensor]:
    leaves = {name: getattr(inputs, name).detach().requires_grad_() for name in _LEAVES}
    changed: dict[str, Any] = dict(leaves)
    loss = policy_loss(replace(inputs, **changed), config).loss_sum
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True)
    }


def _select(inputs: LossInputs, part: Tensor) -> LossInputs:
    columns = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    chosen: dict[str, Any] = {name: x[part] for name, x in columns.items() if isinstance(x, Tensor)}
    # Each call numbers its sequences from 0.
    chosen["sequence_ids"] = chosen["sequence_ids"] - chosen["sequence_ids"].min()
    return replace(inputs, **chosen)


def made_up_inputs(k: int) -> LossInputs:
    """Return tokens of three sequences with every field of ``LossInputs``, for two close policies over K + 5 ids."""
    generator = torch.Generator().manual_seed(0)
    count, vocab_size = sum(_LENGTHS), k + 5

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    log_m = normal(count, vocab_size).mul(2).log_softmax(-1)
    log_p = (log_m + normal(count, vocab_size).mul(0.7)).log_softmax(-1)
    sampled = torch.multinomial(log_m.exp(), 1, generator=generator)
    top = log_m.topk(k, dim=-1).indices
    ids = torch.cat([top, sampled], 1)
    valid = torch.cat([torch.ones_like(top, dtype=torch.bool), (top != sampled).all(-1, keepdim=True)], 1)
    outside = torch.ones_like(log_p, dtype=torch.bool).scatter(1, ids, False)
    other = torch.where(outside, log_p, -torch.inf)

    def at_label(log_q: Tensor) -> Tensor:
        return log_q.gather(1, sampled)[:, 0]

    position = torch.arange(count)
    columns: dict[str, Any] = {str(c.name): c.examples(count, generator) for c in columns_on_request().values()}
    return LossInputs(
        logprobs=at_label(log_p),
        rollout_logprobs=at_label(log_m),
        advantages=torch.where(position % 5 == 4, 0.0, torch.where(position % 2 == 0, 1.0, -0.7)),
        loss_mask=position % 6 != 0,
        entropy=-(log_p.exp() * log_p).sum(-1),
        topk_logprobs=log_p.gather(1, ids),
        rollout_topk_logprobs=log_m.gather(1, ids),
        topk_valid=valid,
        topk_other_logprob=other.logsumexp(-1),
        topk_other_square=(2 * other).exp().sum(-1),
        vocab_size=vocab_size,
        recomputed_logprobs=at_label((log_m + normal(count, vocab_size).mul(0.1)).log_softmax(-1)),
        reference_logprobs=at_label((log_m + normal(count, vocab_size)).log_softmax(-1)),
        sequence_ids=torch.repeat_interleave(torch.arange(len(_LENGTHS)), torch.tensor(_LENGTHS)),
        token_weights=torch.ones(count),
        ages=(position % 4).float(),
        **columns,
    )
