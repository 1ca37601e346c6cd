"""What slime's reward functions are called with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


class SlimeArgs:
    """The first argument of slime's functions; only what has a meaning here is set."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"args.{name} does not exist here; slime's args have {sorted(self.__dict__)} in this run")


@dataclass
class SlimeSample:
    """The fields of slime's ``Sample`` (slime/utils/types.py) that a reward function reads."""

    class Status(Enum):
        """Why the response ended."""

        COMPLETED = "completed"
        TRUNCATED = "truncated"

    prompt: str
    response: str
    label: str
    metadata: dict[str, Any]
    response_length: int
    """tokens"""
    status: Status
