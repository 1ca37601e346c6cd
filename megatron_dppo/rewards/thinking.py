"""What a response says after its thinking."""

from __future__ import annotations


def after_thinking(text: str) -> str:
    """What follows the last ``</think>``; all of it without one."""
    return text.rsplit("</think>", 1)[-1]
