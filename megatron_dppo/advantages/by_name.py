"""The advantages that ``train.advantage`` names."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor

from megatron_dppo.advantages.baselines import (
    decoupled_advantages,
    greedy_advantages,
    greedy_rewards,
    length_weighted_advantages,
    reward_parts,
    sampled_lengths,
)
from megatron_dppo.advantages.group_relative import group_relative_advantages
from megatron_dppo.config.user_functions import UserFunction, get_user_function
from megatron_dppo.errors import FunctionError, UserError
from megatron_dppo.functions import has_parameter, is_function_name
from megatron_dppo.types import RolloutGroup


def advantages_by(
    name: str,
    rewards: Tensor,
    valid: Tensor,
    *,
    options: Mapping[str, object] | None = None,
    groups: Sequence[RolloutGroup] | None = None,
    weights: Mapping[str, float] | None = None,
) -> Tensor:
    """Compute the advantages ``[groups, samples]`` that ``train.advantage`` names; exactly 0 for invalid samples.

    The name is a mode of ``group_relative_advantages``, ``opo``, ``gdpo`` (which reads the ``weights`` of the parts),
    ``remax``, a user-defined function, or ``none`` for the rewards themselves.

    A user's function is called as ``f(rewards, valid, **options)``, and gets ``groups`` by name where it has a
    parameter of that name. As each data-parallel rank has groups of its own, the advantages of a group must not depend
    on other groups; the first call checks it.
    """
    if name == "none":
        return torch.where(valid, rewards, 0.0)
    if name == "opo":
        if groups is None:
            raise ValueError("advantage 'opo' weighs rewards by the lengths of their responses. Fix: pass groups")
        return length_weighted_advantages(rewards, sampled_lengths(groups), valid)
    if name == "gdpo":
        if groups is None or weights is None:
            raise ValueError("advantage 'gdpo' normalizes the parts of rewards. Fix: pass groups and weights")
        return decoupled_advantages(reward_parts(groups, list(weights)), weights, valid).to(rewards.dtype)
    if name == "remax":
        if groups is None:
            raise ValueError("advantage 'remax' subtracts the rewards of greedy responses. Fix: pass groups")
        return greedy_advantages(rewards, *greedy_rewards(groups), valid)
    if not is_function_name(name):
        return group_relative_advantages(rewards, cast(Literal["mean", "std", "leave_one_out"], name), valid)
    return _user_advantages(name, rewards, valid, dict(options or {}), groups)


def _user_advantages(
    name: str, rewards: Tensor, valid: Tensor, options: dict[str, Any], groups: Sequence[RolloutGroup] | None
) -> Tensor:
    """Return the advantages of a user's function, which the first call checks to depend on each group alone."""
    function = get_user_function(name, "train.advantage")
    advantages = _call_user_function(function, rewards, valid, options, groups)
    # The check calls the function once more for each group, so it runs only at the first call that has several groups.
    if name not in _CHECKED and len(rewards) > 1:
        # Each group alone must have the same advantages, because ranks hold different groups.
        for index in range(len(rewards)):
            part = slice(index, index + 1)
            group = None if groups is None else groups[part]
            alone = _call_user_function(function, rewards[part], valid[part], options, group)
            if not torch.allclose(alone[0], advantages[index], rtol=1e-5, atol=1e-6):
                raise FunctionError(
                    f"train.advantage = {name!r} gives group {index} the advantages {advantages[index].tolist()} among "
                    f"{len(rewards)} groups and {alone[0].tolist()} alone; they must depend on that group only, as "
                    "each data-parallel rank has other groups"
                )
        _CHECKED.add(name)
    return advantages


_CHECKED: set[str] = set()
"""Functions that passed the check that groups do not depend on each other."""


def _call_user_function(
    function: UserFunction,
    rewards: Tensor,
    valid: Tensor,
    options: dict[str, Any],
    groups: Sequence[RolloutGroup] | None,
) -> Tensor:
    start = f"train.advantage = {function.name!r}"
    if has_parameter(function.function, "groups"):
        options = {**options, "groups": groups}
    try:
        # Clones: a function that writes to its arguments must not change the rewards that are logged and recorded.
        result = function.function(rewards.float().clone(), valid.clone(), **options)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise FunctionError(f"{start} raised {type(error).__name__}: {error}") from error
    if not isinstance(result, Tensor) or result.shape != rewards.shape or not result.is_floating_point():
        what = f"{result.dtype} {list(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
        raise FunctionError(f"{start} returned {what}, expected a float tensor {list(rewards.shape)} like the rewards")
    if result.device != rewards.device or result.layout != torch.strided:
        raise FunctionError(f"{start} returned a tensor on {result.device} ({result.layout}), expected it on the CPU")
    result = torch.where(valid, result.detach().to(rewards.dtype), 0.0)
    if not bool(result.isfinite().all()):
        raise FunctionError(f"{start} returned {result.tolist()} for the rewards {rewards.tolist()}; expected finite")
    return result
