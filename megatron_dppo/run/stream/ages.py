"""How old tokens are: rollout steps between the weights that sampled them and the step that trains on them."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_dppo.types import RolloutGroup, VersionSpan


class Ages:
    """Knows the step of each policy version that may still train.

    Args:
        oldest: age that a token can have at most.
    """

    def __init__(self, oldest: int) -> None:
        self._oldest = oldest
        self._step_of: dict[int, int] = {}
        self._step = 0

    def begin_step(self, step: int, policy_version: int) -> None:
        """Note whose weights these are; forget what is too old."""
        self._step, self._step_of[policy_version] = step, step
        self._step_of = {v: s for v, s in self._step_of.items() if s >= step - self._oldest}

    def of(self, group: RolloutGroup) -> dict[int, int]:
        """A group's tokens by age in this step. Weights that an update left as they were have not aged."""
        tokens: dict[int, int] = {}
        for version, count in tokens_by_version(group).items():
            age = self._step - self._step_of.get(version, self._step - self._oldest)
            tokens[age] = tokens.get(age, 0) + count
        return tokens

    def state(self) -> dict[str, int]:
        """For a checkpoint."""
        return {str(version): step for version, step in self._step_of.items()}

    def restore(self, state: Mapping[str, int]) -> None:
        """Take what ``state`` gave."""
        self._step_of = {int(version): step for version, step in state.items()}


def tokens_by_version(group: RolloutGroup) -> dict[int, int]:
    """How many of a group's tokens the weights of each version sampled."""
    tokens: dict[int, int] = {}
    for rollout in group.rollouts:
        completion = rollout.completion
        whole = (VersionSpan(completion.policy_version, 0, len(completion.token_ids)),)
        for version, start, end in completion.policy_versions or whole:
            tokens[version] = tokens.get(version, 0) + end - start
    return tokens
