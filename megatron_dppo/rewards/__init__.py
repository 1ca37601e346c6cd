"""Verifiable rewards."""

from megatron_dppo.rewards.math import extract_answer, math_reward
from megatron_dppo.rewards.scorer import RewardItem, RewardResult, RewardScorer

__all__ = ["RewardItem", "RewardResult", "RewardScorer", "extract_answer", "math_reward"]
