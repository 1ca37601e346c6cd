"""The reward of reasoning-gym's tasks: the package's own scorer on the extracted answer.

The package's default scorer gives credit to any text that *contains* the answer, so a policy could learn to list many.
Here the scorer sees only the extracted answer, and only the full score counts unless partial credit is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from megatron_dppo.errors import RewardError
from megatron_dppo.rewards.math import extract_answer


def make_reward(*, partial_credit: bool = False) -> Callable[..., float]:
    """A reward function of our own form; each row names its task in ``source_dataset``.

    Raises:
        RewardError: reasoning-gym is not installed.
    """
    _package()

    def reward(*, prompt: str, completion: str, label: str, metadata: Mapping[str, Any]) -> float:
        return reasoning_gym_reward(completion, label, metadata, partial_credit=partial_credit)

    return reward


def reasoning_gym_reward(
    completion: str, label: str, metadata: Mapping[str, Any], *, partial_credit: bool = False
) -> float:
    """1.0 for an answer with the task's full score, else 0.0, or the task's own score with ``partial_credit``.

    Args:
        completion: the response; only its last box or ``Answer:`` line is scored, and nothing of one that was cut off.
        label: the entry's answer; empty for tasks without a single answer.
        metadata: the entry's metadata, either as these columns or as one column ``metadata``.

    Raises:
        ValueError: the row does not name its task.
    """
    inner = metadata.get("metadata")
    facts = inner if isinstance(inner, Mapping) else metadata
    if "source_dataset" not in facts:
        raise ValueError(f"the row's metadata has no 'source_dataset' (the task's name), only {sorted(facts)}")
    answer = extract_answer(completion)
    if answer is None or metadata.get("finish_reason") == "length":
        return 0.0
    entry = {"question": metadata.get("question"), "answer": label or None, "metadata": facts}
    score = float(_scorer(str(facts["source_dataset"]))(answer, entry))
    return score if partial_credit else float(score == 1.0)


@cache
def _scorer(task: str) -> Callable[..., float]:
    return _package().get_score_answer_fn(task)


def _package() -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise RewardError(
            f"reward.function = 'reasoning_gym' needs the package reasoning-gym ({error}); install it with pip install "
            "'megatron-dppo[reasoning-gym]' (its dependency pycosat is compiled: a C compiler must be there)"
        ) from error
    return reasoning_gym


def words_reward(*, prompt: str, completion: str, label: str, metadata: Mapping[str, Any]) -> float:
    """How many of the label's words the response has at the same place, over all of them; what follows is ignored.

    Raises:
        ValueError: the label has no words.
    """
    del prompt, metadata
    got, wanted = completion.split(), label.split()
    if not wanted:
        raise ValueError("reward.function = 'words' needs a label of at least one word")
    return sum(a == b for a, b in zip(got, wanted, strict=False)) / len(wanted)
