"""Findings in a run's metrics and warnings while it runs, each with the key to change."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

Record = dict[str, Any]


_WINDOW = 10
"""Steps that a mean is over, at the beginning and at the end."""


_FEW = 8
"""Steps below which nothing is said about how a value moves."""


class Finding(NamedTuple):
    """One thing that the numbers show."""

    level: str
    """``bad``: training does not work like this; ``look``: worth a look; ``good``: as it should be"""
    text: str
    knob: str
    """which key to turn, and what else to look at; empty = none"""
    metric: str = ""
    """the curve that shows it"""


def findings(records: Sequence[Record], masked: Sequence[Record] = ()) -> list[Finding]:
    """What is worth saying, the worst first.

    Args:
        records: of ``metrics.jsonl``, in order.
        masked: the tokens that the recorded steps masked: ``text``, ``sign`` and ``count``.

    Example:
        >>> [each.level for each in findings([{"step": 1, "train/skipped_updates": 1.0}])]
        ['bad']
    """
    steps = [record for record in records if any(name.startswith(("train/", "rollout/")) for name in record)]
    found = [finding for rule in _RULES for finding in rule(_Values(steps))]
    found += _about_tokens(masked)
    if steps and all(each.level == "good" for each in found):
        found.append(Finding("good", f"Nothing in {len(steps)} steps says that training is broken.", ""))
    return sorted(found, key=lambda each: ("bad", "look", "good").index(each.level))


class _Values:
    """The values of metrics over the steps."""

    def __init__(self, steps: Sequence[Record]) -> None:
        self._steps = steps

    def of(self, name: str) -> list[float]:
        """Where it has a value."""
        return [step[name] for step in self._steps if step.get(name) is not None]

    def last(self, name: str) -> float | None:
        """The mean of the last steps."""
        return _mean(self.of(name)[-_WINDOW:])

    def first(self, name: str) -> float | None:
        """The mean of the first steps."""
        return _mean(self.of(name)[:_WINDOW])


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _above(name: str, limit: float, level: str, text: str, knob: str) -> Callable[[_Values], list[Finding]]:
    """A finding where the mean of the last steps is above a limit; ``{}`` of the text is that mean."""

    def rule(values: _Values) -> list[Finding]:
        last = values.last(name)
        return [] if last is None or last <= limit else [Finding(level, text.format(last), knob, name)]

    return rule


def _reward(values: _Values) -> list[Finding]:
    rewards = values.of("rollout/reward")
    if len(rewards) < _FEW:
        return []
    window = min(_WINDOW, len(rewards) // 2)
    means = [sum(rewards[i : i + window]) / window for i in range(len(rewards) - window + 1)]
    first, last, best = means[0], means[-1], max(means)
    # Of a mean over a window, from what neighbouring steps differ by: a trend is no noise.
    steps = [(b - a) ** 2 for a, b in pairwise(rewards)]
    noise = (sum(steps) / len(steps) / 2 / window) ** 0.5
    if len(set(rewards)) == 1:
        text = f"The reward is {first:.3g} in every step: the reward function finds no difference between answers."
        return [Finding("bad", text, "reward.function: score a few answers by megatron-dppo generate --score", _REWARD)]
    if best - last > max(4 * noise, 0.3 * abs(best)):
        text = f"The reward fell: {last:.3f} in the last steps, and {best:.3f} when it was best."
        return [Finding("bad", text, "optimizer.lr: lower it; loss.name: see what other losses would mask", _REWARD)]
    if last <= first + 2 * noise:
        text = f"The reward has hardly moved: {first:.3f} in the first steps, {last:.3f} in the last."
        return [Finding("look", text, "rollout.samples_per_prompt and optimizer.lr: raise; or easier prompts", _REWARD)]
    return [Finding("good", f"The reward rose from {first:.3f} to {last:.3f}.", "", _REWARD)]


_REWARD = "rollout/reward"


def _masked(values: _Values) -> list[Finding]:
    name = "train/mask_fraction"
    shares, last = values.of(name), values.last(name)
    if last is None:
        return []
    if not any(shares) and len(shares) >= _FEW:
        text = "No token ever left the trust region: any loss would have done the same updates."
        return [Finding("look", text, "train.mini_batches or optimizer.lr: there is room to raise them", name)]
    if last > 0.2:
        text = f"{last:.0%} of the tokens with an advantage are outside the trust region and get no gradient."
        knob = "optimizer.lr: lower; train.mini_batches, train.epochs: fewer; loss.divergence_threshold_high: wider"
        return [Finding("look", text, knob, name)]
    return []


def _entropy(values: _Values) -> list[Finding]:
    name = "train/entropy"
    first, last = values.first(name), values.last(name)
    if first is None or last is None or len(values.of(name)) < _FEW or last >= 0.2 * first:
        return []
    text = f"Entropy fell from {first:.3f} to {last:.3f} nats: answers become alike, and exploration ends."
    return [Finding("look", text, "loss.entropy_coef: above 0; optimizer.lr: lower; rollout.temperature: 1", name)]


def _engine(values: _Values) -> list[Finding]:
    name = "train/abs_prob_diff_first"
    own, all_of = values.last(name), values.last("train/abs_prob_diff")
    if own is None or all_of is None or own <= 0.005 or own < 0.5 * all_of:
        return []
    text = (
        f"Before any update pi and mu already differ by {own:.4f} a token, {own / all_of:.0%} of the distance that the "
        "losses see: it comes from the engine or from old rollouts, not from learning."
    )
    knob = "megatron-dppo diagnose RUN says from where; train.router_replay, rollout.dtype, train.max_staleness"
    return [Finding("look", text, knob, name)]


def _others(values: _Values) -> list[Finding]:
    own = values.last("train/mask_fraction")
    if own is None:
        return []
    found = []
    for other in ("grpo", "dppo_binary_tv"):
        share = values.last(f"train/counterfactual/{other}/mask_fraction")
        cosine = values.last(f"train/counterfactual/{other}/cosine")
        if share is None or cosine is None or cosine > 0.95 or abs(share - own) < 0.02:
            continue
        text = f"The loss {other} would mask {share:.1%} of the tokens, this one masks {own:.1%}; cosine {cosine:.2f}."
        found.append(Finding("look", text, "loss.name", f"train/counterfactual/{other}/mask_fraction"))
    return found


def _waiting(values: _Values) -> list[Finding]:
    total = values.last("perf/step_seconds")
    rollout = values.last("perf/rollout_seconds")
    if not total or rollout is None or rollout < 0.5 * total:
        return []
    text = f"{rollout / total:.0%} of a step is spent waiting for rollouts."
    knob = "train.max_staleness: 1 samples the next step meanwhile; more inference servers; rollout.max_new_tokens"
    return [Finding("look", text, knob, "perf/rollout_seconds")]


_RULES: Sequence[Callable[[_Values], list[Finding]]] = (
    _reward,
    _masked,
    _entropy,
    _engine,
    _others,
    _waiting,
    _above(
        "rollout/groups_without_signal",
        0.7,
        "look",
        "{:.0%} of the groups have one and the same reward for all answers: nothing is learned from them.",
        "rollout.samples_per_prompt: raise; prompts of medium difficulty; rollout.dynamic_sampling",
    ),
    _above(
        "rollout/finish/length",
        0.3,
        "look",
        "{:.0%} of the answers were cut off at the limit.",
        "rollout.max_new_tokens: raise; train.mask_truncated; reward shaping of the length",
    ),
    _above(
        "rollout/reward_failed_fraction",
        0.05,
        "bad",
        "The reward function failed for {:.0%} of the answers; they teach nothing.",
        "reward.timeout_seconds; the messages in the run's output",
    ),
    _above(
        "train/skipped_updates",
        0.0,
        "bad",
        "Updates were skipped because their gradient was not finite ({:.2g} a step).",
        "optimizer.lr: lower; optimizer.clip_grad; model.dtype",
    ),
    _above(
        "rollout/dropped_token_fraction",
        0.01,
        "look",
        "{:.1%} of the sampled tokens are not in the loss.",
        "train.mask_truncated, or log-probabilities of the engine that are not finite: rollout.dtype",
    ),
)


def _about_tokens(masked: Sequence[Record]) -> list[Finding]:
    """Whether one token is much of what is masked."""
    found = []
    for sign, word in ((1, "positive"), (-1, "negative")):
        counts: dict[str, int] = {}
        for each in masked:
            if each["sign"] == sign:
                counts[each["text"]] = counts.get(each["text"], 0) + each["count"]
        total = sum(counts.values())
        if total < _FEW:
            continue
        text, count = max(counts.items(), key=lambda item: item[1])
        if count >= 0.3 * total:
            found.append(
                Finding(
                    "look",
                    f"{count / total:.0%} of the masked tokens with a {word} advantage are {text!r}.",
                    f"loss.divergence_threshold_{'high' if sign > 0 else 'low'}, if the reward depends on this token",
                    "train/mask_fraction_" + word,
                )
            )
    return found


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
