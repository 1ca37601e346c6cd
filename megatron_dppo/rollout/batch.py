"""Selection of the groups that a step trains on."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_dppo.rollout.repeats import RepeatSums, repeat_sums
from megatron_dppo.types import Completion, DropReason, GreedyResponse, Metric, RolloutGroup, version_spans
from megatron_dppo.types.token_columns import TOKEN_COLUMNS


class PolicyAges:
    """Step at which each recent policy version was published, to compute the age of tokens."""

    def __init__(self, oldest: int) -> None:
        self._oldest = oldest
        self._step_by_version: dict[int, int] = {}
        self._step = 0

    def begin_step(self, step: int, policy_version: int) -> None:
        """Record the version that samples from ``step`` on and drop versions that are too old to train on."""
        self._step = step
        self._step_by_version[policy_version] = step
        self._step_by_version = {v: s for v, s in self._step_by_version.items() if s >= step - self._oldest}

    def count_tokens_by_age(self, group: RolloutGroup) -> dict[int, int]:
        """Return the number of a group's tokens by their age in this step."""
        tokens: dict[int, int] = {}
        for version, count in count_tokens_by_version(group).items():
            # A skipped update keeps the version, so ``begin_step`` renews its step: unchanged weights do not age.
            if version not in self._step_by_version:
                known = ", ".join(map(str, sorted(self._step_by_version)))
                raise RuntimeError(
                    f"step {self._step} got {count} tokens of prompt {group.prompt.prompt_id} with policy version "
                    f"{version}, expected one of {known}: no step may train on older tokens. Fix: report this bug; "
                    "train.max_staleness = 0 avoids it"
                )
            age = self._step - self._step_by_version[version]
            tokens[age] = tokens.get(age, 0) + count
        return tokens

    def state(self) -> dict[str, int]:
        """Return the state for a checkpoint."""
        return {str(version): step for version, step in self._step_by_version.items()}

    def restore(self, state: Mapping[str, int]) -> None:
        """Restore what ``state`` returned."""
        self._step_by_version = {int(version): step for version, step in state.items()}


def count_tokens_by_version(group: RolloutGroup) -> dict[int, int]:
    """Return the number of a group's tokens by the policy version that sampled them."""
    tokens: dict[int, int] = {}
    for rollout in group.rollouts:
        completion = rollout.completion
        num_tokens = len(completion.token_ids)
        for span in version_spans(completion.policy_versions, completion.policy_version, num_tokens):
            tokens[span.policy_version] = tokens.get(span.policy_version, 0) + span.end - span.start
    return tokens


@dataclass(frozen=True)
class CollectedRollouts:
    """Rollouts of one data-parallel rank that a step trains on."""

    groups: list[RolloutGroup]
    ages: list[int]
    """Age of each group in rollout steps: from its oldest tokens to this step. Shape [num_groups]."""
    dropped_groups: Mapping[DropReason, int]
    """Number of groups that are not trained on, by reason."""
    token_ages: dict[int, int]
    """Number of tokens by age in steps."""
    num_carried: int = 0
    """Number of groups that were canceled in this step and continue in the next."""
    repeats: Mapping[str, RepeatSums] = field(default_factory=dict)
    """Responses that equal an earlier sibling, by server, in all groups that were complete, trained on or not."""

    def metrics(self, dp: int) -> dict[str, Metric]:
        """Return the staleness metrics and the number of groups left out, summed over the ``dp`` ranks."""
        return {
            "policy_age": Metric(
                sum(age * tokens for age, tokens in self.token_ages.items()), sum(self.token_ages.values())
            ),
            "policy_age_max": Metric(max(self.ages, default=0), kind="max"),
            "stale_fraction": Metric(sum(age > 0 for age in self.ages), len(self.ages)),
            # With 1/dp from each of the dp ranks the denominators add up to 1, so these are sums and no means.
            **{f"dropped_groups/{reason}": Metric(self.dropped_groups.get(reason, 0), 1 / dp) for reason in DropReason},
            "carried_groups": Metric(self.num_carried, 1 / dp),
        }


def select_rollouts(
    sampled: Sequence[RolloutGroup],
    count: int,
    ages: PolicyAges,
    *,
    canceled: int,
    parts: Sequence[str] = (),
) -> CollectedRollouts:
    """Select the groups that a step trains on."""
    signals = [has_signal(group, parts) for group in sampled]
    selected = select_indices(signals, count)
    groups = [sampled[i] for i in selected]
    by_age = [ages.count_tokens_by_age(group) for group in groups]
    unused_signals = [signal for i, signal in enumerate(signals) if i not in set(selected)]
    return CollectedRollouts(
        groups=groups,
        ages=[max(tokens, default=0) for tokens in by_age],
        dropped_groups={
            DropReason.NO_SIGNAL: len(unused_signals) - sum(unused_signals),
            DropReason.SURPLUS: sum(unused_signals),
            DropReason.CANCELED: canceled,
        },
        token_ages=dict(sum((Counter(tokens) for tokens in by_age), Counter())),
        repeats=repeat_sums(sampled),
    )


def with_greedy(collected: CollectedRollouts, greedy: Sequence[RolloutGroup]) -> CollectedRollouts:
    """Return the rollouts with the greedy responses; ``greedy`` has one group of one response for each group."""
    responses = [
        GreedyResponse(
            reward=rollout.reward, reward_failed=rollout.reward_failed, num_tokens=len(rollout.completion.token_ids)
        )
        for group in greedy
        for rollout in group.rollouts
    ]
    pairs = zip(collected.groups, responses, strict=True)
    return replace(collected, groups=[replace(group, greedy=response) for group, response in pairs])


def has_signal(group: RolloutGroup, parts: Sequence[str] = ()) -> bool:
    """Return True if the scored samples of a group, or those of one agent, have different rewards.

    Only then they have non-zero advantages. With ``parts`` (GDPO) each of these parts of a reward has its own.
    """
    scored = [rollout for rollout in group.rollouts if not rollout.reward_failed]
    rewards_by_agent: dict[str, set[float]] = {}
    for rollout in scored:
        for credit in rollout.completion.segment_credits:
            rewards_by_agent.setdefault(credit.agent, set()).add(credit.reward)
    if rewards_by_agent:
        # The sums of a game may be equal while the players' rewards are not.
        return any(len(rewards) > 1 for rewards in rewards_by_agent.values())
    if not parts:
        return len({rollout.reward for rollout in scored}) > 1
    return len({tuple(rollout.reward_parts[name] for name in parts) for rollout in scored}) > 1


def select_indices(signals: Sequence[bool], count: int) -> list[int]:
    """Return the indices of the first ``count`` groups with signal, filled up with the last ones without, in order."""
    with_signal = [i for i, signal in enumerate(signals) if signal][:count]
    without_signal = [i for i, signal in enumerate(signals) if not signal]
    # From ``len - n`` and not ``-n``: for n = 0 the slice must be empty.
    return sorted(with_signal + without_signal[len(without_signal) - (count - len(with_signal)) :])


@dataclass(frozen=True)
class RankColumns:
    """Optional columns of a completion that one rank reads."""

    topk: bool = True
    """True on ranks that compute the loss: the last pipeline stage."""
    layers: tuple[int, ...] | None = None
    """Layers whose routes the rank replays. None: all layers."""

    def select(self, groups: Sequence[RolloutGroup | None]) -> list[RolloutGroup | None]:
        """Return the groups without the columns that this rank does not read."""
        return [
            group
            and replace(
                group, rollouts=tuple(replace(r, completion=self._select(r.completion)) for r in group.rollouts)
            )
            for group in groups
        ]

    def _select(self, completion: Completion) -> Completion:
        if not self.topk:
            unread: dict[str, Any] = {c.response: None for c in TOKEN_COLUMNS if c.is_loss_only and c.response}
            completion = replace(completion, **unread)
        if self.layers is not None and completion.routed_experts is not None:
            completion = replace(completion, routed_experts=completion.routed_experts[:, list(self.layers)])
        return completion
