r"""The reward for mathematics: the last boxed answer, or the last ``Answer:`` line, against the reference.

Exact match comes first; only answers that differ as text and are not plain integers go to math-verify, which parses
LaTeX (milliseconds to seconds). The score is 1 or 0, never for an answer that merely contains the right one.

math-verify alone can be tricked. It reads the last side of ``11=12``, and the last number of text that is no LaTeX
(``11\to 12``), so a wrong result beside a right one would score. Here an answer must parse as a whole. An equation
counts by its right-hand side only if its left-hand side is a bare name (``x=12``, ``f(x)=2x``, ``(x,y)=(1,2)``). Any
other equation scores 0, unless the label is an equation too.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping


def after_thinking(text: str) -> str:
    """Return the text after the last ``</think>``, or all of it without one."""
    return text.rsplit("</think>", 1)[-1]


_BOXED = "\\boxed{"
_ANSWER_LINE = re.compile(r"^\s*\**answer\s*:\**\s*(.+?)\s*$", re.IGNORECASE | re.MULTILINE)
_INTEGER = re.compile(r"([+-]?)0*([0-9]+)")
_VARIABLE = r"(?:[A-Za-z]|\\(?!pi\b)[a-z]+)(?:_(?:\w|\{\w+\}))?'*"
_NAMES = rf"{_VARIABLE}(?:\s*,\s*{_VARIABLE})*"
_ASSIGNMENT = re.compile(rf"\s*(?:{_VARIABLE}(?:\s*\({_NAMES}\))?|\({_NAMES}\))\s*=\s*([^=]+)")
_RELATION = re.compile("[=\uff1d\u2261]|\\\\(?:eq|equiv|coloneqq?|triangleq|doteq)(?![A-Za-z])")
"""Signs that math-verify reads as an equation, of which it would compare one side."""


def extract_answer(text: str) -> str | None:
    r"""Return the answer after the thinking: the last ``\boxed{...}``, or else the last ``Answer:`` line.

    Return None if there is none, if the last box is not closed, or if the braces of the ``Answer:`` line do not match.
    Such a line could close the box that math-verify receives it in, and hide its remaining part.
    """
    text = after_thinking(text)
    # A box has precedence over an "Answer:" line, wherever they stand.
    start = text.rfind(_BOXED)
    if start >= 0:
        return _balanced(text, start + len(_BOXED))
    lines = _ANSWER_LINE.findall(text)
    if not lines:
        return None
    line = lines[-1].strip("$* ")
    return line if _balanced(line + "}", 0) == line else None


def is_well_formed(text: str) -> bool:
    """Return True if a response has exactly one answer after at most one closed thinking block.

    One answer is one closed, non-empty box, or one ``Answer:`` line without any box. The content of the thinking block
    does not count. The opening ``<think>`` may be missing, because chat templates add it to the prompt.
    """
    thought, closed, response = text.rpartition("</think>")
    if "</think>" in thought or "<think>" in response or text.count("<think>") > 1:
        return False
    if closed and "<think>" in thought and not thought.lstrip().startswith("<think>"):
        return False
    if response.count(_BOXED) > 1 or (_BOXED not in response and len(_ANSWER_LINE.findall(response)) != 1):
        return False
    return bool(extract_answer(response))


def _balanced(text: str, start: int) -> str | None:
    depth = 1
    for i in range(start, len(text)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[start:i].strip()
    return None


def quick_score(answer: str | None, label: str) -> float | None:
    """Return the score if no parser is needed: no answer, equal text, or two plain integers. Otherwise return None."""
    label = label.strip()
    if answer is None:
        return 0.0
    if answer == label:
        return 1.0
    # An answer that relates two results never reaches the parser.
    sides = comparison_sides(answer, label)
    if sides is None:
        return 0.0
    integers = _canonical_integer(sides[0]), _canonical_integer(sides[1])
    if None in integers:
        return None
    return float(integers[0] == integers[1])


def comparison_sides(answer: str, label: str) -> tuple[str, str] | None:
    """Return the parts of answer and label to compare, without a bare name before ``=`` on one side.

    Return None if the answer relates two results (``11=12``) and the label does not: it must not score.
    """
    assigned = [_ASSIGNMENT.fullmatch(text) for text in (answer, label)]
    right = [match[1].strip() if match else text for match, text in zip(assigned, (answer, label), strict=True)]
    if _RELATION.search(right[0]) and not _RELATION.search(right[1]):
        return None
    return (answer, label) if all(assigned) else (right[0], right[1])


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
    """Import math-verify and its grammar, which takes seconds, before the time limit of a sample starts."""
    from math_verify import parse

    # math-verify warns that its time limits are disabled. RewardScorer enforces its own.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    parse(r"\boxed{\frac12}", parsing_timeout=None)


def math_reward(*, prompt: str, completion: str, label: str, metadata: Mapping[str, object]) -> float:
    """Return 1.0 for a right answer and 0.0 otherwise, with the signature of every reward function.

    math-verify's own time limits use SIGALRM, which works only in a main thread, so they are disabled here. Instead
    ``RewardScorer`` kills the calling process when it takes too long.
    """
    del prompt
    verdict = quick_math_reward(completion, label, metadata)
    if verdict is not None:
        return verdict
    from math_verify import LatexExtractionConfig, parse, verify

    sides = comparison_sides(str(extract_answer(completion)), label)
    assert sides is not None, "quick_math_reward handles answers that are not comparable"
    predicted = parse(f"\\boxed{{{sides[0]}}}", [LatexExtractionConfig()], parsing_timeout=None)
    gold = parse(f"\\boxed{{{sides[1]}}}", parsing_timeout=None)
    return float(verify(gold, predicted, timeout_seconds=None))
