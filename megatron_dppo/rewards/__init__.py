"""Rewards: built-in and user functions, computed in separate processes with time limits."""

from megatron_dppo.rewards.functions import FunctionSpec
from megatron_dppo.rewards.item import RewardItem, RewardResult, Shaping
from megatron_dppo.rewards.scorer import RewardScorer
from megatron_dppo.rewards.signatures import RunInfo
from megatron_dppo_answers.math import extract_answer, math_reward

__all__ = [
    "FunctionSpec",
    "RewardItem",
    "RewardResult",
    "RewardScorer",
    "RunInfo",
    "Shaping",
    "extract_answer",
    "math_reward",
]
