"""Findings in a run's metrics, and warnings while it runs, each with the key to change."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from megatron_dppo.report.records import Record, mean

_WINDOW = 10
"""Steps of a mean, at the beginning and at the end of the run."""
_MIN_STEPS = 8
"""Minimum number of steps for a finding about a trend."""


class Finding(NamedTuple):
    """One statement about the run."""

    level: str
    """``bad``: training does not work like this. ``look``: check this. ``good``: as expected."""
    text: str
    suggestion: str
    """Key to change, and what else to check. Empty if there is nothing to do."""
    metric: str = ""
    """Metric whose curve shows it."""


def findings(records: Sequence[Record], masked: Sequence[Record] = ()) -> list[Finding]:
    """Return the findings, the most severe first.

    Example:
        >>> [each.level for each in findings([{"step": 1, "train/skipped_updates": 1.0}])]
        ['bad']
    """
    steps = [record for record in records if any(name.startswith(("train/", "rollout/")) for name in record)]
    result = [finding for rule in _RULES for finding in rule(_Values(steps))]
    result += _masked_token_findings(masked)
    if steps and all(each.level == "good" for each in result):
        result.append(Finding("good", f"No sign of a problem in {len(steps)} steps.", ""))
    return sorted(result, key=lambda each: ("bad", "look", "good").index(each.level))


class _Values:
    """Values of the metrics over the steps."""

    def __init__(self, steps: Sequence[Record]) -> None:
        self._steps = steps

    def series(self, name: str) -> list[float]:
        """Return the values of a metric, without the steps that lack it."""
        return [step[name] for step in self._steps if step.get(name) is not None]

    def last(self, name: str) -> float | None:
        """Return the mean of the last steps."""
        return mean(self.series(name)[-_WINDOW:])

    def last_share(self, part: str, total: str) -> float:
        """Return the share of ``part`` in ``total`` over the last steps. A step without the part counts as 0."""
        last_steps = [step for step in self._steps if step.get(total)][-_WINDOW:]
        total_sum = sum(step[total] for step in last_steps)
        return sum(step.get(part) or 0.0 for step in last_steps) / total_sum if total_sum else 0.0

    def first(self, name: str) -> float | None:
        """Return the mean of the first steps."""
        return mean(self.series(name)[:_WINDOW])


def _above(name: str, limit: float, level: str, text: str, suggestion: str) -> Callable[[_Values], list[Finding]]:
    """Return a rule: a finding if the mean of the last steps is above a limit; ``{}`` in the text is that mean."""

    def rule(values: _Values) -> list[Finding]:
        last = values.last(name)
        return [] if last is None or last <= limit else [Finding(level, text.format(last), suggestion, name)]

    return rule


def _reward(values: _Values) -> list[Finding]:
    rewards = values.series("rollout/reward")
    if len(rewards) < _MIN_STEPS:
        return []
    window = min(_WINDOW, len(rewards) // 2)
    means = [sum(rewards[i : i + window]) / window for i in range(len(rewards) - window + 1)]
    first = means[0]
    last = means[-1]
    best = max(means)
    # Standard error of a window's mean, estimated from differences of consecutive steps so that a trend adds nothing.
    steps = [(b - a) ** 2 for a, b in pairwise(rewards)]
    noise = (sum(steps) / len(steps) / 2 / window) ** 0.5
    if len(set(rewards)) == 1:
        text = f"The reward is {first:.3g} in every step: the reward function does not distinguish responses."
        suggestion = "reward.function: score a few responses with megatron-dppo generate --score"
        return [Finding("bad", text, suggestion, _REWARD)]
    # A fall must exceed both the noise and a third of the best reward.
    if best - last > max(4 * noise, 0.3 * abs(best)):
        text = f"The reward fell from its best value {best:.3f} to {last:.3f} in the last steps."
        suggestion = "optimizer.lr: lower it; loss.name: compare what other losses would mask"
        return [Finding("bad", text, suggestion, _REWARD)]
    if last <= first + 2 * noise:
        text = f"The reward has hardly changed: {first:.3f} in the first steps, {last:.3f} in the last."
        suggestion = "rollout.samples_per_prompt or optimizer.lr: raise; data.train: use easier prompts"
        return [Finding("look", text, suggestion, _REWARD)]
    return [Finding("good", f"The reward rose from {first:.3f} to {last:.3f}.", "", _REWARD)]


_REWARD = "rollout/reward"


def _masked(values: _Values) -> list[Finding]:
    name = "train/mask_fraction"
    fractions = values.series(name)
    last = values.last(name)
    if last is None:
        return []
    if not any(fractions) and len(fractions) >= _MIN_STEPS:
        return [Finding("good", "No token left the trust region: the mask changed no update.", "", name)]
    if last > 0.2:
        text = f"{last:.0%} of the tokens with an advantage are outside the trust region and get no gradient."
        suggestion = "optimizer.lr, train.mini_batches or train.epochs: lower; loss.divergence_threshold_high: raise"
        return [Finding("look", text, suggestion, name)]
    return []


def _entropy(values: _Values) -> list[Finding]:
    name = "train/entropy"
    first, last = values.first(name), values.last(name)
    if first is None or last is None or len(values.series(name)) < _MIN_STEPS or last >= 0.2 * first:
        return []
    text = f"Entropy fell from {first:.3f} to {last:.3f} nats: responses become similar, and exploration stops."
    return [Finding("look", text, "loss.entropy_coef: set above 0; optimizer.lr: lower; rollout.temperature: 1", name)]


def _engine(values: _Values) -> list[Finding]:
    name = "train/abs_prob_diff_first"
    before_updates = values.last(name)
    all_updates = values.last("train/abs_prob_diff")
    # Small, or less than half of the mean over all updates, most of which is then learning.
    if before_updates is None or all_updates is None or before_updates <= 0.005 or before_updates < 0.5 * all_updates:
        return []
    text = (
        f"Before any update pi and mu already differ by {before_updates:.4f} per token. That is "
        f"{before_updates / all_updates:.0%} of the mean |pi - mu| of all updates: it comes from the engine or from "
        "old rollouts, not from learning."
    )
    suggestion = "megatron-dppo diagnose RUN finds the cause; train.router_replay, rollout.dtype, train.max_staleness"
    return [Finding("look", text, suggestion, name)]


def _other_losses(values: _Values) -> list[Finding]:
    mask_fraction = values.last("train/mask_fraction")
    if mask_fraction is None:
        return []
    result = []
    for other in ("grpo", "dppo_binary_tv"):
        other_fraction = values.last(f"train/counterfactual/{other}/mask_fraction")
        cosine = values.last(f"train/counterfactual/{other}/cosine")
        # Report only losses whose gradient or mask clearly differs from this loss's.
        if other_fraction is None or cosine is None or cosine > 0.95 or abs(other_fraction - mask_fraction) < 0.02:
            continue
        text = (
            f"The loss {other} would mask {other_fraction:.1%} of the tokens, this one masks {mask_fraction:.1%}. The "
            f"cosine of their gradients is {cosine:.2f}."
        )
        result.append(Finding("look", text, "loss.name", f"train/counterfactual/{other}/mask_fraction"))
    return result


def _waiting(values: _Values) -> list[Finding]:
    # A step whose rollouts were sampled earlier has no rollout time.
    share = values.last_share("perf/rollout_seconds", "perf/step_seconds")
    if share < 0.5:
        return []
    text = f"The trainer waits for rollouts during {share:.0%} of a step."
    suggestion = "train.max_staleness: 1 samples during training; more inference servers; rollout.max_new_tokens: lower"
    return [Finding("look", text, suggestion, "perf/rollout_seconds")]


_RULES: Sequence[Callable[[_Values], list[Finding]]] = (
    _reward,
    _masked,
    _entropy,
    _engine,
    _other_losses,
    _waiting,
    _above(
        "rollout/groups_without_signal",
        0.7,
        "look",
        "In {:.0%} of the groups all responses have the same reward, so these groups give no gradient.",
        "rollout.samples_per_prompt: raise; rollout.dynamic_sampling: true; data.train: prompts of medium difficulty",
    ),
    _above(
        "rollout/finish/length",
        0.3,
        "look",
        "{:.0%} of the responses were truncated at the maximum length.",
        "rollout.max_new_tokens: raise; train.mask_truncated: true; reward.overlong_buffer_tokens",
    ),
    _above(
        "rollout/reward_failed_fraction",
        0.05,
        "bad",
        "The reward function failed for {:.0%} of the responses, which therefore give no gradient.",
        "reward.timeout_seconds: raise; read the errors in the run's output",
    ),
    _above(
        "train/skipped_updates",
        0.0,
        "bad",
        "Updates were skipped because their gradient was not finite ({:.2g} per step).",
        "optimizer.lr: lower; optimizer.clip_grad; model.dtype",
    ),
    _above(
        "rollout/dropped_token_fraction",
        0.01,
        "look",
        "{:.1%} of the sampled tokens are excluded from the loss.",
        "rollout.dtype, if log-probabilities of the engine are not finite; train.mask_truncated",
    ),
)


def _masked_token_findings(masked: Sequence[Record]) -> list[Finding]:
    """Return findings about a single token that is a large part of the masked ones."""
    result = []
    for sign, word in ((1, "positive"), (-1, "negative")):
        counts: dict[str, int] = {}
        for each in masked:
            if each["sign"] == sign:
                counts[each["text"]] = counts.get(each["text"], 0) + each["count"]
        total = sum(counts.values())
        if total < _MIN_STEPS:
            continue  # Too few masked tokens for a statement.
        text, count = max(counts.items(), key=lambda item: item[1])
        if count >= 0.3 * total:
            result.append(
                Finding(
                    "look",
                    f"{count / total:.0%} of the masked tokens with a {word} advantage are {text!r}.",
                    f"loss.divergence_threshold_{'high' if sign > 0 else 'low'}: raise if the reward needs this token",
                    "train/mask_fraction_" + word,
                )
            )
    return result


_STEPS_WITHOUT_SIGNAL = 3
"""Consecutive steps without a group that carries signal, after which a warning appears."""
_CONSTANT_STEPS = 10
"""Steps with a constant reward after which a warning appears."""


class LearningWarnings:
    """Warnings that a run is not learning, each shown once with the keys to change.

    Example:
        >>> warnings = LearningWarnings()
        >>> [bool(warnings.check_step({"rollout/groups_without_signal": 1.0})) for _ in range(5)]
        [False, False, True, False, False]

    Without ``has_reward_signal`` there are none: the run learns from a teacher.
    """

    def __init__(self, *, has_reward_signal: bool = True) -> None:
        self._has_reward_signal = has_reward_signal
        self._steps_without_signal = 0
        self._rewards: deque[float] = deque(maxlen=_CONSTANT_STEPS)
        self._shown: set[str] = set()

    def check_step(self, values: Mapping[str, float]) -> list[str]:
        """Return the new warnings after a step with these metrics."""
        if not self._has_reward_signal:
            return []
        return [text for text in (self._signal(values), self._reward(values)) if text]

    def _signal(self, values: Mapping[str, float]) -> str:
        has_no_signal = values.get("rollout/groups_without_signal", 0.0) >= 1
        self._steps_without_signal = self._steps_without_signal + 1 if has_no_signal else 0
        if self._steps_without_signal < _STEPS_WITHOUT_SIGNAL or "signal" in self._shown:
            return ""
        self._shown.add("signal")
        return (
            f"no group carried signal in {_STEPS_WITHOUT_SIGNAL} steps in a row: all responses to a prompt have the "
            "same reward, so no weight changes. Raise rollout.samples_per_prompt or rollout.temperature, use easier or "
            "harder prompts (data.train), or set rollout.dynamic_sampling = true to replace such groups"
        )

    def _reward(self, values: Mapping[str, float]) -> str:
        reward = values.get("rollout/reward")
        if reward is None:
            return ""
        self._rewards.append(reward)
        is_constant = len(self._rewards) == _CONSTANT_STEPS and max(self._rewards) == min(self._rewards)
        if not is_constant or "reward" in self._shown:
            return ""
        self._shown.add("reward")
        return (
            f"the reward was {reward:g} in each of {_CONSTANT_STEPS} steps. Check that reward.function reads "
            "answers in the format that the prompts request (samples.jsonl), that rollout.max_new_tokens does not "
            "truncate them, and that the labels are right (data.label_key)"
        )
