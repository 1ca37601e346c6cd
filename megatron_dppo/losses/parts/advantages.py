"""Group-relative advantages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor

from megatron_dppo.config.user_functions import UserFunction, get_user_function
from megatron_dppo.errors import FunctionError, UserError
from megatron_dppo.functions import has_parameter, is_function_name
from megatron_dppo.losses.parts.length_baseline import length_weighted_advantages, sampled_lengths
from megatron_dppo.types import RolloutGroup

_DEVIATION_FLOOR = 1e-4
"""Added to the group's deviation, so that rewards that differ by rounding only are not blown up to unit size."""


def group_relative_advantages(
    rewards: Tensor, mode: Literal["mean", "std", "leave_one_out"] = "mean", valid: Tensor | None = None
) -> Tensor:
    """Return each reward minus the mean of its group; ``std`` also divides by the standard deviation (GRPO).

    Example:
        >>> group_relative_advantages(torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]]))
        tensor([[ 0.5000, -0.5000, -0.5000,  0.5000],
                [ 0.0000,  0.0000,  0.0000,  0.0000]])

    Args:
        rewards: ``[groups, samples]`` float; one row holds the samples of one prompt.
        mode: ``mean`` (arXiv 2602.04879), ``std`` (arXiv 2402.03300; Bessel-corrected deviation plus 1e-4) or
            ``leave_one_out`` (RLOO, arXiv 2402.14740: minus the mean of the other valid samples).
        valid: ``[groups, samples]`` bool; False = the reward failed, its value is ignored. None = all are valid.

    Returns:
        ``[groups, samples]`` in the dtype of ``rewards``; exactly 0 for invalid samples and for groups without spread.

    Raises:
        ValueError: An unknown mode, rewards that are not a float matrix, ``valid`` of another shape, or a valid
            reward that is not finite.
    """
    if mode not in ("mean", "std", "leave_one_out"):
        raise ValueError(f"advantage mode {mode!r} is unknown; expected 'mean', 'std' or 'leave_one_out'")
    if rewards.dim() != 2 or not rewards.is_floating_point():
        raise ValueError(f"expected float rewards [groups, samples], got {rewards.dtype} {tuple(rewards.shape)}")
    valid = torch.ones_like(rewards, dtype=torch.bool) if valid is None else valid
    if valid.shape != rewards.shape or valid.dtype != torch.bool:
        raise ValueError(f"expected valid as bool {tuple(rewards.shape)}, got {valid.dtype} {tuple(valid.shape)}")
    # A failed reward may be NaN, which a product with 0 would not remove.
    known = torch.where(valid, rewards, 0.0)
    if not bool(known.isfinite().all()):
        raise ValueError("a reward is not finite; mark the sample as failed in `valid`, or return a finite reward")
    # A group whose rewards all failed has count 0; its advantages are 0, not 0 / 0.
    count = valid.sum(1, keepdim=True).clamp(min=1)
    centred = torch.where(valid, known - known.sum(1, keepdim=True) / count, 0.0)
    # The mean of equal numbers may be off by one rounding; a group without spread must give 0, not noise.
    lowest = torch.where(valid, rewards, torch.inf).amin(1, keepdim=True)
    highest = torch.where(valid, rewards, -torch.inf).amax(1, keepdim=True)
    centred = torch.where(highest > lowest, centred, 0.0)
    if mode == "mean":
        return centred
    if mode == "leave_one_out":
        # r_i - mean of the others = n / (n - 1) * (r_i - mean of all)
        return centred * count / (count - 1).clamp(min=1)
    # Divided by n - 1, as in the GRPO code of TRL and verl (``torch.std``). A single valid sample gives 0.
    variance = centred.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)
    return centred / (variance.sqrt() + _DEVIATION_FLOOR)


def reward_scales(name: str, rewards: Tensor, valid: Tensor) -> Tensor:
    """Return the derivative of each advantage in its own reward, with the statistics of the group held fixed.

    Example: With ``std`` an advantage is (reward - mean) / (deviation + 1e-4), so its scale is 1 / (deviation + 1e-4).

    Args:
        name: ``mean``, ``std``, ``leave_one_out`` or ``none``.
        rewards: ``[groups, samples]`` float.
        valid: ``[groups, samples]`` bool.

    Returns:
        ``[groups, samples]``; 0 for groups without spread, whose advantages are 0 too, except with ``none``.

    Raises:
        ValueError: Another name, whose advantages need not be linear in a reward.
    """
    if name == "none":
        return torch.ones_like(rewards)
    if is_function_name(name):
        raise ValueError(f"train.advantage = {name!r} has no known scale; expected mean, std, leave_one_out or none")
    mode = cast(Literal["mean", "std", "leave_one_out"], name)
    centred = group_relative_advantages(rewards, "mean", valid)
    scaled = group_relative_advantages(rewards, mode, valid)
    # The scale is the same for all samples of a group. The sums of squares also work where one sample is at the mean.
    norm = centred.square().sum(1, keepdim=True)
    scale = (scaled.square().sum(1, keepdim=True) / norm.clamp(min=torch.finfo(norm.dtype).tiny)).sqrt()
    return scale.expand_as(rewards).contiguous()


def advantages_by(
    name: str,
    rewards: Tensor,
    valid: Tensor,
    *,
    options: Mapping[str, Any] | None = None,
    groups: Sequence[RolloutGroup] | None = None,
) -> Tensor:
    """Compute the advantages that ``train.advantage`` names.

    The name is a mode of ``group_relative_advantages``, ``opo``, a user-defined function, or ``none`` for the rewards
    themselves.

    A user's function is called as ``f(rewards, valid, **options)``, and gets ``groups`` by name where it has a
    parameter of that name. As each data-parallel rank has groups of its own, the advantages of a group must not depend
    on other groups; the first call checks it.

    Args:
        name: A mode, ``none``, or ``path/to/file.py:function``.
        rewards: ``[groups, samples]`` float.
        valid: ``[groups, samples]`` bool.
        options: ``train.advantage_options``.
        groups: Groups that the rewards belong to.

    Returns:
        ``[groups, samples]`` in the dtype of ``rewards``; exactly 0 for invalid samples.

    Raises:
        FunctionError: A user's function raised, or returned something else than one finite number a sample.
        ValueError: As ``group_relative_advantages``, or ``opo`` without groups.
    """
    if name == "none":
        return torch.where(valid, rewards, 0.0)
    if name == "opo":
        if groups is None:
            raise ValueError("advantage 'opo' weighs rewards by the lengths of their responses. Fix: pass groups")
        return length_weighted_advantages(rewards, sampled_lengths(groups), valid)
    if not is_function_name(name):
        return group_relative_advantages(rewards, cast(Literal["mean", "std", "leave_one_out"], name), valid)
    function, given = get_user_function(name, "train.advantage"), dict(options or {})
    advantages = _call_user_function(function, rewards, valid, given, groups)
    # The check calls the function once more for each group, so it runs only at the first call that has several groups.
    if name not in _CHECKED and len(rewards) > 1:
        # Each group alone must have the same advantages, because ranks hold different groups.
        for index in range(len(rewards)):
            part = slice(index, index + 1)
            group = None if groups is None else groups[part]
            alone = _call_user_function(function, rewards[part], valid[part], given, group)
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
        result = function.function(rewards.clone(), valid.clone(), **options)
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
