"""Embedded tasks: sources ``task:NAME`` whose rows an installed package makes."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal, Protocol, cast

from megatron_dppo.errors import DataError
from megatron_dppo.functions.packages import INSTALL, installed, load
from megatron_dppo.source_names import HUB, TASK
from megatron_dppo_conversations.messages import Messages

GROUP = "megatron_dppo.tasks"
"""Entry points by ``NAME``: functions that return the ``Task`` of a source, ``task:NAME`` or ``task:NAME:OPTIONS``."""
Split = Literal["train", "eval"]
TaskRow = tuple[str, str | Messages, str, Mapping[str, Any]]
"""Location, prompt, label and metadata."""


class Task(Protocol):
    """An embedded task."""

    def rows(self, split: Split, /) -> Iterable[TaskRow]:
        """Return the rows of a split, always the same in the same order."""


def load_task(source: str) -> Task:
    """Return the task of a source."""
    points = installed(GROUP)
    name = source.removeprefix(TASK).partition(":")[0]
    if name not in points:
        known = "".join(f"'{TASK}{each}', " for each in points)
        hint = "" if points else f". No package with tasks is installed; fix: {INSTALL}"
        raise DataError(f"unknown task {source!r}; expected {known}a file, or {HUB}owner/name{hint}")
    return cast(Task, load(points[name])(source))
