"""One case: kill a run at a point, start it again until it ends, compare with the run that nobody disturbed."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.faults.kill_points import launcher, verify
from tests.faults.kill_points.launcher import Change, Ended, Kill
from tests.faults.kill_points.sglang_stub import stub_server
from tests.faults.kill_points.variants import VARIANTS, Variant
from tests.reference_run import assert_trains

MODES = {
    "node": Kill(),
    "rank": Kill(whole_tree=False),
    "power": Kill(lose_writes=True),
}
"""All processes die; one rank dies and its children do not; all die and what was not fsynced is lost."""
ENTRIES = (
    r"save \| close checkpoints/step_000002\.partial/__0_0\.distcp \| before",
    r"export \| write hf\.partial/part-0",
)
"""Points at which runs are killed whose resumption is killed again."""
_AFTER_RESUME = {"evaluate", "save", "prune", "export", "rollout"}


@dataclass(frozen=True)
class Case:
    """One kill, or two."""

    variant: str
    mode: str
    point: str
    first: str = ""
    """the point of an earlier kill; then ``point`` is one of the run that resumes"""

    @property
    def phase(self) -> str:
        """Operation of the run at the point."""
        return "second kill" if self.first else phase_of(self.point)

    @property
    def command(self) -> str:
        """Return the command that runs this case."""
        first = f" --first {shlex.quote(self.first)}" if self.first else ""
        return (
            f"python -m tests.faults.kill_points --variant {self.variant} --mode {self.mode}{first} "
            f"--point {shlex.quote(self.point)}"
        )


@dataclass(frozen=True)
class Result:
    """Result of a case."""

    reached: bool
    """False = the run ended without passing the point: sockets take more turns in one run than in another"""
    problems: list[str]


@dataclass(frozen=True)
class Reference:
    """The run that nobody disturbed."""

    points: list[str]
    resume_points: dict[str, list[str]]
    """by the point of the first kill"""
    files: dict[str, str]


def phase_of(point: str) -> str:
    """``r0 save | rename ...`` -> ``save``."""
    return point.partition(" | ")[0].partition(" ")[2]


def reference(variant: Variant, root: Path, *, with_resumptions: bool) -> Reference:
    """Run it undisturbed, and note the points of it and, if asked, of its resumptions.

    Raises:
        RuntimeError: it does not even run.
        AssertionError: nothing in it moves, so that every other run would equal it.
    """
    with _place(variant, root, "reference") as folder:
        ended = _checked(launcher.start(variant, folder, Kill()))
        assert_trains(folder / "run")
        files = verify.left_behind(folder / "run", evidence=variant.evidence)
    resume_points = {}
    for pattern in ENTRIES if with_resumptions else ():
        entry = next(point for point in ended.trace if re.search(pattern, point))
        with _place(variant, root, "reference") as folder:
            launcher.start(variant, folder, Kill(re.escape(entry)))
            again = _checked(launcher.start(variant, folder, Kill()))
        resume_points[entry] = _until_resumed(again.trace)
    return Reference(ended.trace, resume_points, files)


def _checked(ended: Ended) -> Ended:
    if any(ended.codes) or not ended.codes:
        raise RuntimeError(f"the undisturbed run failed with {ended.codes}:\n{ended.output[-3000:]}")
    return ended


def _until_resumed(trace: list[str]) -> list[str]:
    end = next((i for i, point in enumerate(trace) if phase_of(point) in _AFTER_RESUME), len(trace))
    return trace[:end]


def run_case(case: Case, expected: Reference, root: Path, change: Change | None = None) -> Result:
    """Kill, start again, compare.

    The points of a changed program have names of their own: that of its case is a regular expression.
    """
    variant, how = VARIANTS[case.variant], MODES[case.mode]
    with _place(variant, root, "case") as folder:
        kills = [how] if not case.first else [MODES["node"], how]
        done = 0
        for kill, point in zip(kills, [case.first, case.point] if case.first else [case.point], strict=True):
            pattern = point if change else re.escape(point)
            ended = launcher.start(variant, folder, Kill(pattern, kill.whole_tree, kill.lose_writes), change)
            done = max(done, verify.completed_step(ended.trace))
        last = launcher.start(variant, folder, Kill(), change)
        files = verify.left_behind(folder / "run", evidence=variant.evidence)
        problems = _problems(folder / "run", files, ended, last, done, expected)
    return Result(ended.was_killed, problems)


def _problems(
    run: Path, files: dict[str, str], killed: Ended, last: Ended, done: int, expected: Reference
) -> list[str]:
    if not killed.was_killed and any(killed.codes):
        return [f"the run failed before the point: {killed.codes} {_end(killed)}"]
    if last.codes != [0] * len(last.codes) or not last.codes:
        return [f"it does not continue: {last.codes} {_end(last)}"]
    problems = []
    if (went_on := verify.resumed_step(last)) < done:
        problems.append(f"went on from step {went_on}, though step {done} was complete")
    problems += verify.differences(files, expected.files)
    problems += verify.manifest_problems(run)
    if left := launcher.left_alive(15.0):
        problems.append(f"{len(left)} processes live on")
    return problems


def _end(ended: Ended) -> str:
    return " / ".join(line.strip() for line in ended.output.strip().splitlines()[-3:])


@contextlib.contextmanager
def _place(variant: Variant, root: Path, name: str) -> Iterator[Path]:
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(launcher.workplace(root, name))
        port = stack.enter_context(stub_server(folder)) if variant.method else 0
        variant.prepare(folder, port)
        yield folder
        launcher.left_alive(0)
