r"""The reward for mathematics: the last boxed answer, or the last ``Answer:`` line, against the reference.

Exact match comes first; only answers that differ as text and are not plain integers go to math-verify, which parses
LaTeX (milliseconds to seconds). The score is 1 or 0, never for an answer that merely contains the right one.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

_BOXED = "\\boxed{"
_ANSWER_LINE = re.compile(r"^\s*\**answer\s*:\**\s*(.+?)\s*$", re.IGNORECASE | re.MULTILINE)
_INTEGER = re.compile(r"([+-]?)0*([0-9]+)")


def extract_answer(text: str) -> str | None:
    r"""The answer of a response: after the last ``</think>``, the last ``\boxed{...}``, else the last ``Answer:`` line.

    Returns None when there is none, when the last box is not closed, or when the braces of the ``Answer:`` line do not
    match (such a line could close the box that math-verify gets it in, and hide the rest of itself).
    """
    text = text.rsplit("</think>", 1)[-1]
    start = text.rfind(_BOXED)
    if start >= 0:
        return _balanced(text, start + len(_BOXED))
    lines = _ANSWER_LINE.findall(text)
    if not lines:
        return None
    line = lines[-1].strip("$* ")
    return line if _balanced(line + "}", 0) == line else None


def _balanced(text: str, start: int) -> str | None:
    depth = 1
    for i in range(start, len(text)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[start:i].strip()
    return None


def quick_verdict(answer: str | None, label: str) -> float | None:
    """The score where no parser is needed: no answer, equal text, or two plain integers; else None."""
    label = label.strip()
    if answer is None:
        return 0.0
    if answer == label:
        return 1.0
    integers = _canonical_integer(answer), _canonical_integer(label)
    if None in integers:
        return None
    return float(integers[0] == integers[1])


def _canonical_integer(text: str) -> str | None:
    """``+012`` as ``12``; compared as text, since Python's ``int`` refuses more than 4,300 digits."""
    match = _INTEGER.fullmatch(text)
    if match is None:
        return None
    sign, digits = match.groups()
    return f"-{digits}" if sign == "-" and digits != "0" else digits


def quick_math_reward(completion: str, label: str, metadata: Mapping[str, Any]) -> float | None:
    """The score when no parser is needed, else None. A response that was cut off scores 0."""
    if metadata.get("finish_reason") == "length":
        return 0.0
    return quick_verdict(extract_answer(completion), label)


def load_parser() -> None:
    """Import math-verify and its grammar, which takes seconds, before any sample's time limit runs."""
    from math_verify import parse

    # It warns that its own time limits are off; RewardScorer has its own.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    parse(r"\boxed{\frac12}", parsing_timeout=None)


def math_reward(*, prompt: str, completion: str, label: str, metadata: Mapping[str, Any]) -> float:
    """1.0 for a right answer, else 0.0; the signature is that of every reward function.

    math-verify's own time limits use SIGALRM, which works in a main thread only, so they are off here: the process
    that calls this is killed from outside when it takes too long (``RewardScorer``).
    """
    del prompt
    verdict = quick_math_reward(completion, label, metadata)
    if verdict is not None:
        return verdict
    from math_verify import parse, verify

    gold = parse(f"\\boxed{{{label}}}", parsing_timeout=None)
    predicted = parse(f"\\boxed{{{extract_answer(completion)}}}", parsing_timeout=None)
    return float(verify(gold, predicted, timeout_seconds=None))
