r"""The final answer in a response: the last ``\boxed{...}`` after the thinking, or else the last ``Answer:`` line."""

import re
from dataclasses import dataclass

from megatron_dppo_answers.thinking import after_thinking, unify_thinking_tags

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])\s*")
_BARE_ARGUMENT = re.compile(r"(?:\\[()\[\]]|[^$\s\\]|\\[A-Za-z{}%,!$]+(?:\{[^{}]*\})*)+")
_ANSWER_WORDS = re.compile(r"(?:the[ \t]{1,9})?(?:final[ \t]{1,9})?answer", re.IGNORECASE)
_MARKUP = " \t*_"
_SEPARATORS = re.compile(
    r"(?:[\s,;$&]|\\[()\[\],;! ]|\\(?:quad|qquad)|\\text\{\s*,?\s*(?:and|or)\s*\}|\b(?:and|or)\b)*"
)
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_WRAPPED_STOP = re.compile(r"(\$|\*|\\\))\.$")


@dataclass(frozen=True)
class AnswerBox:
    """A box and its position in the text."""

    start: int
    end: int
    content: str | None
    """None if the box is not closed."""


def extract_answer(text: str) -> str | None:
    r"""Return the answer after the thinking: the last filled box, or else the last ``Answer:`` line.

    Boxes with nothing but a comma or "and" between them are one answer. Return None if there is no answer, if the last
    box is not closed, or if the braces of the ``Answer:`` line do not match.
    """
    text = after_thinking(text)
    # A box has precedence over an "Answer:" line, wherever they stand. An empty box answers nothing.
    boxes = [box for box in find_boxes(text) if box.content != ""]
    if boxes:
        return _join_last(text, boxes)
    lines = _answer_lines(text)
    if not lines:
        return None
    # A full stop behind the markup, as in "**12**.", would keep the markup from being stripped.
    line = _WRAPPED_STOP.sub(r"\1", lines[-1]).strip("$* ")
    # With one more brace the group closes at the very end exactly if the braces of the line match.
    return line if _closing_brace(line + "}", 0) == len(line) else None


def is_well_formed(text: str) -> bool:
    """Return True if a response has exactly one answer after at most one closed thinking block.

    One answer is one closed, non-empty box, or one ``Answer:`` line without any box. The content of the thinking block
    does not count. The opening ``<think>`` may be missing, because chat templates add it to the prompt.
    """
    text = unify_thinking_tags(text)
    thought, closed, response = text.rpartition("</think>")
    if "</think>" in thought or "<think>" in response or text.count("<think>") > 1:
        return False
    if closed and "<think>" in thought and not thought.lstrip().startswith("<think>"):
        return False
    boxes = find_boxes(response)
    if len(boxes) > 1 or (not boxes and len(_answer_lines(response)) != 1):
        return False
    return bool(extract_answer(response)) and (not boxes or bool(boxes[0].content))


def _answer_lines(text: str) -> list[str]:
    """Return what follows ``Answer:`` at the start of a line, with or without Markdown, or stands on the next line."""
    lines = text.splitlines()
    answers = []
    for index, line in enumerate(lines):
        start = line.lstrip(f"{_MARKUP}#>-")
        words = _ANSWER_WORDS.match(start)
        if words is None:
            continue
        tail = start[words.end() :].lstrip(_MARKUP)
        if tail[:2].lower() == "is":
            tail = tail[2:].lstrip(_MARKUP)
        if not tail.startswith((":", "\uff1a")):
            continue
        value = tail[1:].lstrip("*").strip()
        if not value.strip("*"):
            # The answer may stand on a line of its own, behind at most two empty ones.
            value = next((each.strip() for each in lines[index + 1 : index + 4] if each.strip()), "")
        if value:
            answers.append(value)
    return answers


def find_boxes(text: str) -> list[AnswerBox]:
    r"""Return all boxes in order; of nested ones the outer. ``\boxed 12`` has the argument up to a space or ``$``."""
    boxes = []
    position = 0
    while match := _BOX.search(text, position):
        start = match.end()
        if text.startswith("{", start):
            end = _closing_brace(text, start + 1)
            content = None if end is None else text[start + 1 : end].strip()
            position = start + 1 if end is None else end + 1
        else:
            bare = _BARE_ARGUMENT.match(text, start)
            content = bare[0] if bare else ""
            position = bare.end() if bare else start
        boxes.append(AnswerBox(match.start(), position, content))
    return boxes


def _join_last(text: str, boxes: list[AnswerBox]) -> str | None:
    answers = [boxes[-1].content]
    # From the last box backwards: each box with the one behind it.
    for box, following in zip(boxes[-2::-1], boxes[:0:-1], strict=True):
        between = text[box.end : following.start]
        # White space alone joins nothing: the later box may correct the earlier one.
        if not between.strip(" \n") or not _SEPARATORS.fullmatch(between) or not re.search(r"[,;&]|and|or", between):
            break
        answers.insert(0, box.content)
    return None if None in answers else ", ".join(map(str, answers))


def _closing_brace(text: str, start: int) -> int | None:
    """Return the index of the brace that closes the group with content from ``start`` on, not of an escaped one."""
    depth = 1
    # Of an escaped sign the backslash is matched with it.
    for match in _BRACE.finditer(text, start):
        depth += (match[0] == "{") - (match[0] == "}")
        if depth == 0:
            return match.start()
    return None
