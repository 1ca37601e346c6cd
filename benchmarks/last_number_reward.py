"""The reward of both sides of end_to_end.py --task smollm2: 1 where the last number of an answer is the label."""

from __future__ import annotations

import re
from typing import Any


def last_number(prompts: list[Any], completions: list[Any], label: list[str], **_: Any) -> list[float]:
    """Score in TRL's signature, which megatron_dppo takes as it stands: texts, or conversations of one message."""
    texts = [each if isinstance(each, str) else each[-1]["content"] for each in completions]
    answers = [re.findall(r"-?\d+", text) for text in texts]
    return [float(numbers[-1:] == [right]) for numbers, right in zip(answers, label, strict=True)]
