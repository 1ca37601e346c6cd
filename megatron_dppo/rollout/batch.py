"""The groups that a step trains on, out of those that were drawn for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_dppo.types import Completion, LeftOut, Metric, RolloutGroup, VersionSpan
from megatron_dppo.types.token_columns import TOKEN_COLUMNS


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


@dataclass(frozen=True)
class Collected:
    """This data-parallel rank's rollouts of a step."""

    groups: list[RolloutGroup]
    ages: list[int]
    """for each group, rollout steps between the oldest weights that sampled it and the ones that train on it"""
    left_out: Mapping[LeftOut, int]
    """groups that are not trained on, by reason"""
    token_ages: dict[int, int]
    """tokens by age"""
    num_carried: int = 0
    """groups that were stopped and go on in the next step"""

    def metrics(self, dp: int) -> dict[str, Metric]:
        """How old the rollouts are, and how many were left out (a sum over the ``dp`` ranks)."""
        return {
            "policy_age": Metric(
                sum(age * tokens for age, tokens in self.token_ages.items()), sum(self.token_ages.values())
            ),
            "policy_age_max": Metric(max(self.ages, default=0), kind="max"),
            "stale_fraction": Metric(sum(age > 0 for age in self.ages), len(self.ages)),
            **{f"left_out/{reason}": Metric(self.left_out.get(reason, 0), 1 / dp) for reason in LeftOut},
            "carried_groups": Metric(self.num_carried, 1 / dp),
        }


def collected(drawn: Sequence[RolloutGroup], share: int, ages: Ages, *, given_up: int, num_carried: int) -> Collected:
    """What a step trains on.

    Args:
        drawn: groups in their order.
        share: how many of them it needs.
        ages: of this step.
        given_up: groups that were stopped for good.
        num_carried: groups that were stopped and go on.
    """
    signal = [has_signal(group) for group in drawn]
    places = choose(signal, share)
    chosen = [drawn[i] for i in places]
    by_age = [ages.of(group) for group in chosen]
    others = [has for i, has in enumerate(signal) if i not in set(places)]
    return Collected(
        groups=chosen,
        ages=[max(tokens, default=0) for tokens in by_age],
        left_out={
            LeftOut.NO_SIGNAL: len(others) - sum(others),
            LeftOut.SURPLUS: sum(others),
            LeftOut.GIVEN_UP: given_up,
        },
        token_ages=dict(sum((Counter(tokens) for tokens in by_age), Counter())),
        num_carried=num_carried,
    )


def has_signal(group: RolloutGroup) -> bool:
    """Whether the scored samples of a group have different rewards, and so non-zero advantages."""
    return len({r.reward for r in group.rollouts if not r.reward_failed}) > 1


def choose(signal: Sequence[bool], count: int) -> list[int]:
    """Which groups a step trains on: the first ``count`` with signal, else the last ones without; in order."""
    good = [i for i, has in enumerate(signal) if has][:count]
    flat = [i for i, has in enumerate(signal) if not has]
    return sorted(good + flat[len(flat) - (count - len(good)) :])


@dataclass(frozen=True)
class Needed:
    """Of one rank."""

    topk: bool = True
    """whether it computes the loss: the last pipeline stage"""
    layers: tuple[int, ...] | None = None
    """whose routes it replays; None = all"""

    def of(self, groups: Sequence[RolloutGroup | None]) -> list[RolloutGroup | None]:
        """The groups without the other columns; ``routed_experts`` then has these layers only."""
        return [
            group
            and replace(group, rollouts=tuple(replace(r, completion=self._of(r.completion)) for r in group.rollouts))
            for group in groups
        ]

    def _of(self, completion: Completion) -> Completion:
        if not self.topk:
            unread: dict[str, Any] = {c.response: None for c in TOKEN_COLUMNS if c.is_loss_only and c.response}
            completion = replace(completion, **unread)
        if self.layers is not None and completion.routed_experts is not None:
            completion = replace(completion, routed_experts=completion.routed_experts[:, list(self.layers)])
        return completion
