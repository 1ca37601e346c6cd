"""Signs that a run learns nothing, each told once, with what to turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

_SILENT_STEPS = 3
"""in a row without a group that carries signal"""
_STILL_STEPS = 10
"""over which a reward that does not move at all is a sign"""


class Alarms:
    """Watches the metrics of the steps.

    Example:
        >>> alarms = Alarms()
        >>> [bool(alarms.see({"rollout/groups_without_signal": 1.0})) for _ in range(5)]
        [False, False, True, False, False]

    Args:
        rewarded: False = rewards are not what the run learns from (a teacher is), so that nothing is told.
    """

    def __init__(self, *, rewarded: bool = True) -> None:
        self._rewarded = rewarded
        self._silent = 0
        self._rewards: deque[float] = deque(maxlen=_STILL_STEPS)
        self._told: set[str] = set()

    def see(self, values: Mapping[str, float]) -> list[str]:
        """What is new to tell after a step with these metrics."""
        if not self._rewarded:
            return []
        return [text for text in (self._signal(values), self._reward(values)) if text]

    def _signal(self, values: Mapping[str, float]) -> str:
        self._silent = self._silent + 1 if values.get("rollout/groups_without_signal", 0.0) >= 1 else 0
        if self._silent < _SILENT_STEPS or "signal" in self._told:
            return ""
        self._told.add("signal")
        return (
            f"no group carried signal in {_SILENT_STEPS} steps in a row: all answers to a prompt have the same reward, "
            "so that no weight moves. Raise rollout.samples_per_prompt or rollout.temperature, take easier or harder "
            "prompts (data.train), or let rollout.dynamic_sampling = true replace such groups"
        )

    def _reward(self, values: Mapping[str, float]) -> str:
        reward = values.get("rollout/reward")
        if reward is None:
            return ""
        self._rewards.append(reward)
        still = len(self._rewards) == _STILL_STEPS and max(self._rewards) == min(self._rewards)
        if not still or "reward" in self._told:
            return ""
        self._told.add("reward")
        return (
            f"the reward was {reward:g} in each of {_STILL_STEPS} steps: look whether reward.function reads the "
            "answers as the prompts ask for them (samples.jsonl), whether rollout.max_new_tokens cuts them off, and "
            "whether the labels are right (data.label_key)"
        )
