r"""The reward for mathematics: the last boxed answer, or the last ``Answer:`` line, against the reference.

Exact match comes first; only answers that differ as text and are not plain integers go to math-verify, which parses
LaTeX (milliseconds to seconds). The score is 1 or 0, never for an answer that merely contains the right one.

math-verify alone can be tricked: of ``11=12`` it takes the last side, and of text that is no LaTeX (``11\to 12``) the
last number, so that a wrong result beside a right one would pay. Here an answer must parse as a whole, and an equation
counts by its right-hand side only when its left-hand side is a bare name (``x=12``, ``f(x)=2x``, ``(x,y)=(1,2)``); any
other equation scores 0, unless the label is one too.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any


def after_thinking(text: str) -> str:
    """What follows the last ``</think>``; all of it without one."""
    return text.rsplit("</think>", 1)[-1]


_BOXED = "\\boxed{"


_ANSWER_LINE = re.compile(r"^\s*\**answer\s*:\**\s*(.+?)\s*$", re.IGNORECASE | re.MULTILINE)


_INTEGER = re.compile(r"([+-]?)0*([0-9]+)")


_VARIABLE = r"(?:[A-Za-z]|\\(?!pi\b)[a-z]+)(?:_(?:\w|\{\w+\}))?'*"


_NAMES = rf"{_VARIABLE}(?:\s*,\s*{_VARIABLE})*"


_ASSIGNMENT = re.compile(rf"\s*(?:{_VARIABLE}(?:\s*\({_NAMES}\))?|\({_NAMES}\))\s*=\s*([^=]+)")


_RELATION = re.compile("[=\uff1d\u2261]|\\\\(?:eq|equiv|coloneqq?|triangleq|doteq)(?![A-Za-z])")
"""Signs that math-verify reads as an equation, of which it would take one side."""


def extract_answer(text: str) -> str | None:
    r"""The answer of a response: after the last ``</think>``, the last ``\boxed{...}``, else the last ``Answer:`` line.

    Returns None when there is none, when the last box is not closed, or when the braces of the ``Answer:`` line do not
    match (such a line could close the box that math-verify gets it in, and hide the rest of itself).
    """
    text = after_thinking(text)
    start = text.rfind(_BOXED)
    if start >= 0:
        return _balanced(text, start + len(_BOXED))
    lines = _ANSWER_LINE.findall(text)
    if not lines:
        return None
    line = lines[-1].strip("$* ")
    return line if _balanced(line + "}", 0) == line else None


def is_well_formed(text: str) -> bool:
    """Whether a response has exactly one answer, and its thinking, if any, is one closed block before it.

    One answer: one closed, non-empty box; or, without any box, one ``Answer:`` line. What stands in the thinking block
    does not count. The opening ``<think>`` may be missing, since chat templates put it into the prompt.
    """
    thought, closed, rest = text.rpartition("</think>")
    if "</think>" in thought or "<think>" in rest or text.count("<think>") > 1:
        return False
    if closed and "<think>" in thought and not thought.lstrip().startswith("<think>"):
        return False
    if rest.count(_BOXED) > 1 or (_BOXED not in rest and len(_ANSWER_LINE.findall(rest)) != 1):
        return False
    return bool(extract_answer(rest))


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
    sides = comparable(answer, label)
    if sides is None:
        return 0.0
    integers = _canonical_integer(sides[0]), _canonical_integer(sides[1])
    if None in integers:
        return None
    return float(integers[0] == integers[1])


def comparable(answer: str, label: str) -> tuple[str, str] | None:
    """What to compare of an answer and a label, without a bare name before ``=`` on one of them.

    Returns None when the answer relates two results (``11=12``) and the label does not: it must not score.
    """
    assigned = [_ASSIGNMENT.fullmatch(text) for text in (answer, label)]
    right = [match[1].strip() if match else text for match, text in zip(assigned, (answer, label), strict=True)]
    if _RELATION.search(right[0]) and not _RELATION.search(right[1]):
        return None
    return (answer, label) if all(assigned) else (right[0], right[1])


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
    from math_verify import LatexExtractionConfig, parse, verify

    sides = comparable(str(extract_answer(completion)), label)
    assert sides is not None, "quick_math_reward decides these"
    predicted = parse(f"\\boxed{{{sides[0]}}}", [LatexExtractionConfig()], parsing_timeout=None)
    gold = parse(f"\\boxed{{{sides[1]}}}", parsing_timeout=None)
    return float(verify(gold, predicted, timeout_seconds=None))
