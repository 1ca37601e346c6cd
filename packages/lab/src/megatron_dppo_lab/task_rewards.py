"""Rewards of the embedded tasks and of reasoning-gym.

reasoning-gym's default scorer gives credit to any text that *contains* the answer, so a policy could learn to list
many. Here the scorer sees only the extracted answer, and only the full score counts unless partial credit is enabled.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from megatron_dppo.config.reward_options import ReasoningGymOptions
from megatron_dppo.config.section import Section
from megatron_dppo.errors import RewardError
from megatron_dppo.rewards.functions import PackagedReward
from megatron_dppo_answers.math import extract_answer


def make_reasoning_gym_reward(options: ReasoningGymOptions) -> PackagedReward:
    """Return the built-in function ``reasoning_gym``; each row names its task in ``source_dataset``."""
    _import_reasoning_gym()

    def reward(*, prompt: str, completion: str, label: str, metadata: Mapping[str, object]) -> float:
        return reasoning_gym_reward(completion, label, metadata, partial_credit=options.partial_credit)

    return PackagedReward(reward)


def reasoning_gym_reward(
    completion: str, label: str, metadata: Mapping[str, object], *, partial_credit: bool = False
) -> float:
    """Return 1.0 for an answer with the task's full score, otherwise 0.0.

    With ``partial_credit`` return the task's own score. Only the last box or ``Answer:`` line is scored, and nothing of
    a truncated response. The entry's metadata are these columns, or one column ``metadata``.
    """
    inner = metadata.get("metadata")
    columns = inner if isinstance(inner, Mapping) else metadata
    if "source_dataset" not in columns:
        raise ValueError(
            f"expected 'source_dataset' (the name of the task) in the row's metadata, got {sorted(columns)}"
        )
    answer = extract_answer(completion)
    if answer is None or metadata.get("finish_reason") == "length":
        return 0.0
    entry = {"question": metadata.get("question"), "answer": label or None, "metadata": columns}
    score = float(load_scorer(str(columns["source_dataset"]))(answer, entry))
    return score if partial_credit else float(score == 1.0)


@cache
def load_scorer(task: str) -> Callable[..., float]:
    """Return the function of reasoning-gym that scores an answer to a task."""
    return _import_reasoning_gym().get_score_answer_fn(task)


def _import_reasoning_gym() -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise RewardError(
            f"reward.function = 'reasoning_gym' needs the package reasoning-gym ({error}); install it with pip install "
            "'megatron-dppo[reasoning-gym]' (its dependency pycosat needs a C compiler)"
        ) from error
    return reasoning_gym


def make_words_reward(_options: Section) -> PackagedReward:
    """Return the built-in function ``words``."""
    return PackagedReward(words_reward, _quick_words_reward)


def _quick_words_reward(completion: str, label: str, metadata: Mapping[str, object]) -> float | None:
    if not label.split():
        return None  # an error, which a process reports
    return words_reward(prompt="", completion=completion, label=label, metadata=metadata)


def words_reward(*, prompt: str, completion: str, label: str, metadata: Mapping[str, object]) -> float:
    """Return the fraction of the label's words that the response has at the same position.

    Further words of the response are ignored.
    """
    words = completion.split()
    expected = label.split()
    if not expected:
        raise ValueError("reward.function = 'words' needs a label of at least one word")
    return sum(a == b for a, b in zip(words, expected, strict=False)) / len(expected)
