r"""The reward for mathematics: the last boxed answer, or the last ``Answer:`` line, against the reference.

Label and answer go through the same function, ``normalize_answer``. Equal text or equal integers are scored at once.
Everything else is read as a value and compared exactly (``answers``). The score is 1 or 0, never for an answer
that merely contains the right one: an answer that relates two results (``11=12``) scores only if both are right.
"""

import re
from collections.abc import Mapping

from megatron_dppo_answers.extract import extract_answer, is_well_formed
from megatron_dppo_answers.normalize import comparison_text, normalize_answer

__all__ = ["extract_answer", "grade", "is_well_formed", "load_parser", "math_reward", "quick_math_reward"]
_INTEGER = re.compile(r"([+-]?)0*([0-9]+)")


def quick_score(answer: str | None, label: str) -> float | None:
    """Return the score if no parser is needed: no answer, equal text, or two plain integers. Otherwise return None."""
    if answer is None:
        return 0.0
    ours, theirs = normalize_answer(answer), normalize_answer(label)
    if not ours:
        return 0.0
    if comparison_text(ours) == comparison_text(theirs):
        return 1.0
    integers = _canonical_integer(ours), _canonical_integer(theirs)
    if None in integers:
        return None
    return float(integers[0] == integers[1])


def _canonical_integer(text: str) -> str | None:
    """Return ``12`` for ``+012``; text, because Python's ``int`` rejects more than 4,300 digits."""
    match = _INTEGER.fullmatch(text)
    if match is None:
        return None
    sign, digits = match.groups()
    return f"-{digits}" if sign == "-" and digits != "0" else digits


def quick_math_reward(completion: str, label: str, metadata: Mapping[str, object]) -> float | None:
    """Return the score if no parser is needed, otherwise None. A truncated response scores 0."""
    if metadata.get("finish_reason") == "length":
        return 0.0
    return quick_score(extract_answer(completion), label)


def load_parser() -> None:
    """Import sympy, which takes a second, before the time limit of a sample starts."""
    from megatron_dppo_answers.equality import same_answer

    same_answer(r"\frac12x>1", r"x>2")


def math_reward(*, prompt: str, completion: str, label: str, metadata: Mapping[str, object]) -> float:
    """Return 1.0 for a right answer and 0.0 otherwise, with the signature of every reward function.

    Comparing takes milliseconds, and up to minutes for answers made to be slow. ``RewardScorer`` kills the calling
    process when it takes too long.
    """
    del prompt
    return 0.0 if metadata.get("finish_reason") == "length" else grade(completion, label)


def grade(completion: str, label: str) -> float:
    r"""Return 1.0 if the answer of a response equals the label, otherwise 0.0.

    ``grade(r"So it is \boxed{\frac{1}{2}}.", "0.5")`` is 1.0.
    """
    answer = extract_answer(completion)
    score = quick_score(answer, label)
    if score is not None:
        return score
    from megatron_dppo_answers.equality import same_answer

    return float(same_answer(normalize_answer(str(answer)), normalize_answer(label)))
