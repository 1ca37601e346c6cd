"""Every ``await`` as a point: where a task of asyncio is suspended, and where it goes on."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import megatron_dppo
from tests.faults.kill_points.points import Points, phase

_OURS = os.path.dirname(megatron_dppo.__file__)
_LIMITS = {"publish": 6, "rollout": 2}
"""Points of one name: a socket may need more turns of the loop in one run than in another."""


def install(points: Points) -> None:
    """Every task of this process is made of the class below."""

    class Task(asyncio.tasks._PyTask):  # type: ignore[name-defined,misc]
        def _Task__step(self, exc: Any = None) -> Any:
            coroutine = self.get_coro()
            where = chain(coroutine)
            if where:
                points.point(f"{phase()} | {where} | resumed", _LIMITS.get(phase(), 2))
            result = super()._Task__step(exc)
            if not self.done() and (where := chain(coroutine)):
                points.point(f"{phase()} | {where} | suspended", _LIMITS.get(phase(), 2))
            return result

    asyncio.tasks.Task = Task  # type: ignore[misc]


def chain(coroutine: Any) -> str:
    """Our functions from the task's down to the one that waits."""
    names = []
    while coroutine is not None:
        code = getattr(coroutine, "cr_code", None)
        if code is not None and code.co_filename.startswith(_OURS):
            frame = coroutine.cr_frame
            names.append(f"{code.co_qualname}:{frame.f_lineno if frame is not None else 0}")
        coroutine = getattr(coroutine, "cr_await", None)
    return " > ".join(names)
