"""Points where a run can be killed: every file operation under its folder, every write, every fsync, every ``await``.

``install`` instruments this process. A point has a name that is the same in every run: rank, phase, operation, file,
and how often this came before. Each point that is passed is a line in a trace that all processes of a run share (child
processes inherit all of this by fork). At the point with the wanted name the process ends itself and, for the loss of
a node, all others, by SIGKILL.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from tests.faults.kill_points.durable import Durable

PHASES = {
    ("gpus.py", "for_sampling"): "publish",
    ("gpus.py", "after_update"): "publish",
    ("checkpoints.py", "save"): "save",
    ("save_load.py", "_run"): "save",
    ("folder.py", "prune"): "prune",
    ("manifest.py", "record"): "manifest",
    ("checkpoints.py", "restore"): "resume",
    ("resume.py", "find_resume_point"): "resume",
    ("session.py", "begin"): "start",
    ("run_records.py", "open"): "metrics",
    ("run_records.py", "log"): "metrics",
    ("evaluation.py", "evaluate"): "evaluate",
    ("export.py", "export_results"): "export",
    ("run_records.py", "summarize"): "export",
    ("hf_folder.py", "_write_in_thread"): "export",
    ("run_folder.py", "open_folder"): "start",
}
"""(file, function) -> phase; the innermost function on the stack that is here decides."""


@dataclass
class Points:
    """The points of one rank, and the one at which it ends."""

    root: Path
    """only what happens below counts"""
    trace: int
    """file descriptor, opened to append"""
    rank: int
    target: str | None = None
    """regular expression of its name"""
    whole_tree: bool = True
    """the node dies, not only the rank"""
    lose_writes: bool = False
    """what was not fsynced is lost, as when the power fails"""
    everyone: int = 0
    """process group leader: of it and all below"""
    counts: Counter[str] = field(default_factory=Counter)
    busy: bool = False
    durable: Durable = field(init=False)

    def __post_init__(self) -> None:
        self.main = os.getpid()
        self.durable = Durable(self.root, self.trace)

    def reach(self, what: str, limit: int = 10_000) -> bool:
        """Pass a point; True = this is the one to die at, and ``die`` is to be called."""
        if self.busy:
            return False
        key = f"r{self.rank} {what}"
        if ".megatron_dppo.lock" in what:
            limit = 1  # a thread writes it every few seconds
        self.counts[key] += 1
        number = self.counts[key]
        if number > limit:
            return False
        name = f"{key} #{number}"
        os.write(self.trace, f"P {name}\n".encode())
        return self.target is not None and re.fullmatch(self.target, name) is not None

    def point(self, what: str, limit: int = 10_000) -> None:
        """Pass a point, or die at it."""
        if self.reach(what, limit):
            self.die()

    def die(self) -> None:
        """SIGKILL, now."""
        self.busy = True
        os.write(self.trace, b"KILLED\n")
        family = descendants(self.everyone) if self.whole_tree else [self.main]
        others = [pid for pid in family if pid != os.getpid()]
        for pid in others:
            kill(pid)
        if self.lose_writes:
            self.durable.lose()
        if self.whole_tree or os.getpid() == self.main:
            kill(os.getpid())

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Operations of this package are no points."""
        before, self.busy = self.busy, True
        try:
            yield
        finally:
            self.busy = before

    def relative(self, path: object, directory: int = -1) -> str | None:
        """The path below the run's folder; None = it is elsewhere."""
        if not isinstance(path, str | bytes | os.PathLike):
            return None
        text = os.fsdecode(path)
        if not os.path.isabs(text) and directory >= 0:
            with self.quiet():
                text = os.path.join(os.readlink(f"/proc/self/fd/{directory}"), text)
        text = os.path.abspath(text)
        root = str(self.root)
        return text[len(root) + 1 :] or "." if text == root or text.startswith(root + os.sep) else None


def phase() -> str:
    """Return the current operation of the run, by the stack of this thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        result = PHASES.get((os.path.basename(code.co_filename), code.co_name))
        if result is not None:
            return result
        frame = frame.f_back
    return "other"


def descendants(leader: int) -> list[int]:
    """A process and all below it."""
    result, waiting = [], [leader]
    while waiting:
        pid = waiting.pop()
        result.append(pid)
        try:
            for task in os.listdir(f"/proc/{pid}/task"):
                waiting += [int(p) for p in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
        except OSError:
            continue
    return result


def kill(pid: int) -> None:
    """SIGKILL for a process that may be gone."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
