r"""The reward of both sides of end_to_end.py: 1 when the last ``\boxed{}`` holds the integer of the label, else 0."""

from __future__ import annotations

import re
from typing import Any

_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")


def exact(prompts: list[str], completions: list[str], label: list[str], **_: Any) -> list[float]:
    """Return the rewards of a batch. TRL's signature, which megatron_dppo accepts as well."""
    return [_score(completion, right) for completion, right in zip(completions, label, strict=True)]


def _score(completion: str, right: str) -> float:
    answers = _BOXED.findall(completion)
    return float(bool(answers) and answers[-1] == right)
