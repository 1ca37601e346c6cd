"""Rewards relative to their group: minus the mean, or the mean of the others, or divided by the deviation."""

from typing import Literal, cast

import torch
from torch import Tensor

from megatron_dppo.functions import is_function_name

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
    # A failed reward may be NaN, which a product with 0 would not remove. In float64 large rewards that differ little
    # keep the signs of their differences, and squares of large ones stay finite.
    known = torch.where(valid, rewards, 0.0).double()
    if not bool(known.isfinite().all()):
        raise ValueError("a reward is not finite; mark the sample as failed in `valid`, or return a finite reward")
    # A group whose rewards all failed has count 0; its advantages are 0, not 0 / 0.
    count = valid.sum(1, keepdim=True).clamp(min=1)
    centred = torch.where(valid, known - known.sum(1, keepdim=True) / count, 0.0)
    # The mean of equal numbers may be off by one rounding; a group without spread must give 0, not noise.
    lowest = torch.where(valid, known, torch.inf).amin(1, keepdim=True)
    highest = torch.where(valid, known, -torch.inf).amax(1, keepdim=True)
    centred = torch.where(highest > lowest, centred, 0.0)
    if mode == "mean":
        return centred.to(rewards.dtype)
    if mode == "leave_one_out":
        # r_i - mean of the others = n / (n - 1) * (r_i - mean of all)
        return (centred * count / (count - 1).clamp(min=1)).to(rewards.dtype)
    # Divided by n - 1, as in the GRPO code of TRL and verl (``torch.std``). A single valid sample gives 0.
    variance = centred.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)
    return (centred / (variance.sqrt() + _DEVIATION_FLOOR)).to(rewards.dtype)


def reward_scales(name: str, rewards: Tensor, valid: Tensor) -> Tensor:
    """Return the derivative of each advantage in its own reward, with the statistics of the group held fixed.

    Example: With ``std`` an advantage is (reward - mean) / (deviation + 1e-4), so its scale is 1 / (deviation + 1e-4).

    ``[groups, samples]``; 0 for groups without spread, whose advantages are 0 too, except with ``none``.
    """
    if name == "none":
        return torch.ones_like(rewards)
    if is_function_name(name):
        raise ValueError(f"train.advantage = {name!r} has no known scale; expected mean, std, leave_one_out or none")
    mode = cast(Literal["mean", "std", "leave_one_out"], name)
    centred = group_relative_advantages(rewards.double(), "mean", valid)
    scaled = group_relative_advantages(rewards.double(), mode, valid)
    # The scale is the same for all samples of a group. The sums of squares also work where one sample is at the mean.
    norm = centred.square().sum(1, keepdim=True)
    scale = (scaled.square().sum(1, keepdim=True) / norm.clamp(min=torch.finfo(norm.dtype).tiny)).sqrt()
    return scale.to(rewards.dtype).expand_as(rewards).contiguous()
