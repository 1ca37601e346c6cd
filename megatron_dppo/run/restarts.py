"""Limit of restarts: counts the attempts of a job in a row that saved nothing newer.

The record is a small file that outlives the job's tries. It also tells of a try that ended without a word, as on a node
that failed. No torch needed.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megatron_dppo.errors import ConfigError, UserError
from megatron_dppo.files import write_synced
from megatron_dppo.mcore.checkpoint.folder import checkpoints, checkpoints_folder, step_number

FINAL = (2, 3)
"""Exit codes of a trainer that would end the same way again: something to mend, and training that cannot go on."""
LEAST_STOPS = 3
"""Stops in a row without anything saved that are always allowed: a limit of 0 restarts is not about stops."""


class TriesUsedUp(UserError):
    """Too many tries in a row without progress. Exit code 1."""

    exit_code = 1


@dataclass(frozen=True, order=True)
class DiskProgress:
    """Progress of a run on disk, in order."""

    step: int = 0
    """Step of the newest complete checkpoint. 0 without one."""
    warm: bool = False
    """True if the warmed-up model exists."""
    warmup_step: int = 0
    """Step that an interrupted warm-up has saved."""

    @classmethod
    def of(cls, output_dir: Path) -> DiskProgress:
        """Return the progress in the folder of a run."""
        folder = checkpoints_folder(output_dir)
        return cls(_newest(folder), (output_dir / "base").is_dir(), _newest(folder / "warmup"))

    def __str__(self) -> str:
        if self.step:
            return f"the checkpoint of step {self.step}"
        if self.warm:
            return "the warmed-up model"
        return f"step {self.warmup_step} of the warm-up" if self.warmup_step else "the beginning"


def _newest(folder: Path) -> int:
    found = checkpoints(folder)
    return step_number(found[-1]) if found else 0


@dataclass(frozen=True)
class TryRecord:
    """Record of the attempts so far."""

    ends: int = 0
    """Attempts in a row that ended at ``progress``."""
    progress: DiskProgress = DiskProgress()
    """Best progress at the end of an attempt."""
    running: bool = False
    """True if an attempt has begun and has not recorded its end."""


class Restarts:
    """The tries of one job.

    Args:
        file: of the record; belongs to one job.
        output_dir: of the run.
        limit: times in a row that the job is queued again after a crash without a newer checkpoint.
    """

    def __init__(self, file: Path, output_dir: Path, limit: int) -> None:
        self._file, self._output_dir, self._limit = file, output_dir, limit

    def begin(self) -> str:
        """Note that a try begins; returns what the user should know, empty = nothing.

        Raises:
            TriesUsedUp: the one before ended without a word, as on a failed node, and too many did not come further.
            ConfigError: the record is damaged.
        """
        record, note = self._read(), ""
        if record.running:
            record = self._ended(record)
            note = "the last try ended without a word, as on a failed node; "
            if record.ends > self._limit:
                self._write(replace(record, running=False))
                raise TriesUsedUp(note + self._told(record))
        self._write(replace(record, running=True))
        return f"{note}going on from {record.progress}, try {record.ends + 1} from there" if record.ends else note

    def crashed(self, how: str) -> str:
        """Note that a try has crashed, and may be followed by another one; returns what the user should know.

        Args:
            how: it ended, in words.

        Raises:
            TriesUsedUp: no more tries.
            ConfigError: the record is damaged.
        """
        return self._close(how, self._limit)

    def stopped(self) -> str:
        """The same of a try that was stopped before its time limit.

        Raises:
            TriesUsedUp: several such tries in a row saved nothing: the time is too short for one step.
            ConfigError: the record is damaged.
        """
        return self._close("was stopped", max(self._limit, LEAST_STOPS))

    def preempted(self) -> None:
        """Note that a try was preempted: that counts for nothing.

        Raises:
            ConfigError: the record is damaged.
        """
        self._write(replace(self._read(), running=False))

    def _close(self, how: str, limit: int) -> str:
        record = self._ended(self._read())
        self._write(record)
        if record.ends > limit:
            raise TriesUsedUp(f"the job {how}; {self._told(record)}")
        return f"the job {how}; it goes on from {record.progress}, {limit + 1 - record.ends} more tries from there"

    def _told(self, record: TryRecord) -> str:
        return (
            f"{record.ends} tries in a row ended without anything newer than {record.progress} in {self._output_dir} "
            f"(--max-restarts {self._limit}), so it is not queued again. Submitted again, it goes on from there"
        )

    def _ended(self, record: TryRecord) -> TryRecord:
        """The record after a try has ended now."""
        progress = DiskProgress.of(self._output_dir)
        ends = record.ends + 1 if progress <= record.progress else 1
        return TryRecord(ends, max(progress, record.progress), running=False)

    def _read(self) -> TryRecord:
        try:
            values = json.loads(self._file.read_text(encoding="utf-8"))
            return TryRecord(int(values["ends"]), DiskProgress(**values["progress"]), bool(values["running"]))
        except FileNotFoundError:
            return TryRecord()
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"{self._file} is damaged ({error}); delete it: the count of tries begins anew"
            ) from error

    def _write(self, record: TryRecord) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_synced(self._file, json.dumps(asdict(record)) + "\n")


@dataclass(frozen=True)
class RankEnd:
    """Exit code of the trainer, and the rank that explains it."""

    code: int
    rank: int | None = None
    """None if no rank recorded its end: all were killed together, or their nodes failed."""


def how_it_ended(folder: Path, code: int) -> RankEnd:
    """The end that explains the others: one that says that trying again is no use, else the first one.

    Args:
        folder: ``code_RANK`` of each rank that ended by itself and not with 0.
        code: of the step, which is that of any of its ranks, or of the signal that ended those left over.
    """
    ends = []
    for file in folder.glob("code_*"):
        ends.append((file.stat().st_mtime, RankEnd(int(file.read_text()), int(file.name.removeprefix("code_")))))
    found = [end for _, end in sorted(ends, key=lambda end: end[0])]
    for final in FINAL:
        if told := [end for end in found if end.code == final]:
            return told[0]
    return found[0] if found else RankEnd(code)
