"""A user's loss and mask as functions: called with the inputs of every loss, and what comes back is checked.

The contract, of which docs/loss.md tells the user:

    loss(inputs: LossInputs, **options) -> [T], or ([T], keep [T] bool)
    mask(inputs: LossInputs, **options) -> [T] bool (False = masked), or [T] float (a weight of the token's term)

Checking that numbers are finite reads them: on CUDA one synchronisation for each call.
"""

import traceback
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megatron_dppo.config.user_functions import UserFunction
from megatron_dppo.errors import FunctionError, UserError
from megatron_dppo.losses.tokens import Tokens
from megatron_dppo.types import LossInputs

_TOPK = ("topk_logprobs", "rollout_topk_logprobs", "topk_valid", "topk_other_logprob")


def call_user_loss(
    function: UserFunction, options: dict[str, Any], inputs: LossInputs, tokens: Tokens
) -> tuple[Tensor, Tensor]:
    """Return the term of each token, 0 outside the mask, and which tokens the user's loss says to keep; ``[T]`` each.

    Raises:
        FunctionError: It raised, or returned something else than finite numbers with a gradient.
    """
    everything = torch.ones_like(tokens.mask)
    # A rank without rows takes part with an empty chunk; a user's function need not handle 0 tokens. The product keeps
    # the graph.
    if not tokens.mask.numel():
        return tokens.logprobs * 0, everything
    result = _call(function, _inputs(function, inputs, tokens), options)
    values, keep = result if isinstance(result, tuple) and len(result) == 2 else (result, everything)
    _check_tensor(function, values, tokens, "a term for each token")
    if not values.is_floating_point():
        raise _wrong(function, f"returned {values.dtype}, expected a float for each token")
    _check_tensor(function, keep, tokens, "a bool for each token as the second")
    if keep.dtype != torch.bool:
        raise _wrong(
            function, f"returned {keep.dtype} as its second value, expected a bool for each token (True = kept)"
        )
    if torch.is_grad_enabled() and tokens.logprobs.requires_grad and not values.requires_grad:
        raise _wrong(
            function,
            "returned terms without a gradient; form them from inputs.logprobs without detach(), item() or numpy()",
        )
    _check_finite(function, values, tokens)
    return torch.where(tokens.mask, values.to(tokens.logprobs.dtype), 0.0), keep


@torch.no_grad()
def call_user_mask(function: UserFunction, options: dict[str, Any], inputs: LossInputs, tokens: Tokens) -> Tensor:
    """Return the weight of each token's term by the user's mask, ``[T]``, without gradient; a bool gives 1 and 0."""
    if not tokens.mask.numel():
        return torch.ones_like(tokens.advantages)
    factor = _call(function, _inputs(function, inputs, tokens), options)
    _check_tensor(function, factor, tokens, "a bool or a weight for each token")
    if factor.dtype != torch.bool and not factor.is_floating_point():
        raise _wrong(function, f"returned {factor.dtype}, expected a bool (True = kept) or a float for each token")
    _check_finite(function, factor, tokens)
    return torch.where(tokens.mask, factor.to(tokens.advantages.dtype), 1.0)


def _inputs(function: UserFunction, inputs: LossInputs, tokens: Tokens) -> LossInputs:
    """Return the inputs that the function declares, with zeros outside the loss mask."""
    needs, mask = function.needs, tokens.mask

    def constant(values: Tensor | None) -> Tensor | None:
        return None if values is None else torch.where(mask, values.detach().to(tokens.logprobs.dtype), 0.0)

    entropy = constant(inputs.entropy)
    if needs.entropy_gradient and inputs.entropy is not None:
        _check_gradient(function, inputs, inputs.entropy, "entropy")
        entropy = torch.where(mask, inputs.entropy.to(tokens.logprobs.dtype), 0.0)
    topk = dict.fromkeys(_TOPK) if not needs.topk else _topk(function, inputs, mask)
    return LossInputs(
        logprobs=tokens.logprobs,
        advantages=tokens.advantages,
        loss_mask=mask,
        rollout_logprobs=tokens.rollout_logprobs,
        entropy=entropy,
        **topk,
        topk_other_square=constant(inputs.topk_other_square) if needs.topk_other_square else None,
        vocab_size=inputs.vocab_size,
        allowed_counts=inputs.allowed_counts,
        recomputed_logprobs=tokens.recomputed_logprobs if needs.recomputed else None,
        reference_logprobs=constant(inputs.reference_logprobs) if needs.reference else None,
        sequence_ids=inputs.sequence_ids if needs.sequences else None,
        statistics=inputs.statistics,
        **{name: constant(getattr(inputs, name)) for name in needs.columns},
    )


def _topk(function: UserFunction, inputs: LossInputs, mask: Tensor) -> dict[str, Any]:
    """Return the Top-K fields, with -inf in unused slots, so that their probability is 0."""
    assert inputs.topk_valid is not None and inputs.topk_logprobs is not None
    assert inputs.rollout_topk_logprobs is not None
    logprobs, other = inputs.topk_logprobs, inputs.topk_other_logprob
    if function.needs.topk_gradient:
        _check_gradient(function, inputs, logprobs, "topk_logprobs")
    else:
        logprobs = logprobs.detach()
    valid = inputs.topk_valid & mask[:, None]
    return {
        "topk_logprobs": torch.where(valid, logprobs, -torch.inf),
        "rollout_topk_logprobs": torch.where(valid, inputs.rollout_topk_logprobs.detach(), -torch.inf),
        "topk_valid": valid,
        "topk_other_logprob": None if other is None else torch.where(mask, other.detach(), 0.0),
    }


def _call(function: UserFunction, inputs: LossInputs, options: dict[str, Any]) -> Any:
    given = {f.name: value for f in fields(inputs) if isinstance(value := getattr(inputs, f.name), Tensor)}
    # torch counts the writes to a tensor in ``_version``.
    versions = {name: value._version for name, value in given.items()}
    try:
        result = function.function(replace(inputs), **options)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        # Without the first frame, which is the call above. The last frame in the user's file is the line to show.
        frames = traceback.extract_tb(error.__traceback__)[1:]
        by_user = [frame for frame in frames if frame.filename.endswith(function.name.rpartition(":")[0])]
        shown = by_user or frames
        where = f" ({shown[-1].filename}, line {shown[-1].lineno})" if shown else ""
        raise _wrong(function, f"raised {type(error).__name__}: {error}{where}") from error
    if changed := [name for name, value in given.items() if value._version != versions[name]]:
        raise _wrong(
            function, f"modifies inputs.{changed[0]} in place, but the trainer still needs it; modify a clone() of it"
        )
    return result


def _check_tensor(function: UserFunction, value: Any, tokens: Tokens, expected: str) -> None:
    shape = tuple(tokens.mask.shape)
    if not isinstance(value, Tensor):
        raise _wrong(function, f"returned {type(value).__name__}, expected a tensor {list(shape)}: {expected}")
    if value.device != tokens.mask.device or value.layout != torch.strided:
        raise _wrong(
            function,
            f"returned a tensor on {value.device} ({value.layout}), expected one on {tokens.mask.device} "
            f"({torch.strided}) like the inputs",
        )
    if tuple(value.shape) != shape:
        raise _wrong(
            function,
            f"returned a tensor {list(value.shape)}, expected {list(shape)}: {expected}, not their sum or mean",
        )


def _check_gradient(function: UserFunction, inputs: LossInputs, values: Tensor, name: str) -> None:
    if torch.is_grad_enabled() and inputs.logprobs.requires_grad and not values.requires_grad:
        raise _wrong(function, f"needs {name} with a gradient, but it carries none; pass it without detaching it")


def _check_finite(function: UserFunction, values: Tensor, tokens: Tokens) -> None:
    wrong = tokens.mask & ~values.detach().isfinite()
    if isinstance(wrong, FakeTensor) or not bool(wrong.any()):  # a rehearsal has no values
        return
    first = int(wrong.nonzero()[0])
    names = ("logprobs", "rollout_logprobs", "advantages")
    of_first = ", ".join(f"{name} {float(getattr(tokens, name)[first]):.6g}" for name in names)
    raise _wrong(
        function,
        f"returned {float(values.detach()[first])} for {int(wrong.sum())} of {int(tokens.mask.sum())} tokens; the "
        f"first has {of_first}",
    )


def _wrong(function: UserFunction, problem: str) -> FunctionError:
    return FunctionError(f"{function.setting} = {function.name!r} {problem}")
