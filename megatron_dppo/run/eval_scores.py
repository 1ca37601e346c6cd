"""What a held-out set's answers show: accuracy, pass@k, the majority's answer."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

from megatron_dppo.config.schema import Config
from megatron_dppo.rewards.math import extract_answer
from megatron_dppo.run.sampling import sampling_params
from megatron_dppo.types import Metric, Rollout, RolloutGroup, SamplingParams


def eval_params(config: Config) -> SamplingParams:
    """How ``[eval]`` says that answers are sampled."""
    return sampling_params(config.eval, config.eval_max_new_tokens, config.run.seed)


def metrics_by_set(
    sets: Sequence[str], owners: Sequence[str], groups: Sequence[RolloutGroup], n: int
) -> dict[str, Metric]:
    """The metrics of all groups together, and of each set that has a name under ``<name>/``.

    Args:
        sets: names of all held-out sets.
        owners: the set that each group's prompt is of.
        groups: answered prompts, maybe none.
        n: answers to each.
    """
    values = eval_metrics(groups, n)
    for name in filter(None, sets):
        own = [group for owner, group in zip(owners, groups, strict=True) if owner == name]
        values |= {f"{name}/{metric}": value for metric, value in eval_metrics(own, n).items()}
    return values


def eval_metrics(groups: Sequence[RolloutGroup], n: int) -> dict[str, Metric]:
    """The metrics of some prompts, maybe none (each rank has the same names), with n answers each.

    ``accuracy`` is the mean score of all answers (avg@n). With several answers, ``pass_at_k`` for k = 1, 2, 4 ... and n
    is the chance that the best of k answers drawn without replacement has a score of 1 or more (the unbiased estimate
    of arXiv 2107.03374, section 2.1), and ``maj_at_n`` the score of the answer that most responses give.

    Example:
        Scores 1, 0, 0, 0 of one prompt: accuracy .25, pass_at_1 .25, pass_at_2 .5, pass_at_4 1.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    values = {
        "accuracy": Metric(sum(r.score for r in rollouts), len(rollouts)),
        "response_length": Metric(sum(len(r.completion.token_ids) for r in rollouts), len(rollouts)),
    }
    if n == 1:
        return values
    for k in _ks(n):
        values[f"pass_at_{k}"] = Metric(sum(pass_at_k(n, _solved(group), k) for group in groups), len(groups))
    values[f"maj_at_{n}"] = Metric(sum(majority_score(group.rollouts) for group in groups), len(groups))
    return values


def pass_at_k(n: int, solved: int, k: int) -> float:
    """The chance that at least one of k answers, drawn without replacement from n, is among the solved ones."""
    return 1 - comb(n - solved, k) / comb(n, k)


def majority_score(rollouts: Sequence[Rollout]) -> float:
    """The mean score of the responses that give the most frequent answer; of equally frequent ones the first counts.

    An answer is the text of the last box or ``Answer:`` line; a response with neither is its own whole text.
    """
    by_answer: dict[str, list[float]] = {}
    for rollout in rollouts:
        text = rollout.completion.text
        by_answer.setdefault(extract_answer(text) or text.strip(), []).append(rollout.score)
    scores = max(by_answer.values(), key=len)
    return sum(scores) / len(scores)


def _ks(n: int) -> list[int]:
    return sorted({2**i for i in range(n.bit_length())} | {n})


def _solved(group: RolloutGroup) -> int:
    return sum(rollout.score >= 1 for rollout in group.rollouts)
