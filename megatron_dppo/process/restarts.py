"""Limit of restarts: counts the attempts of a job in a row that saved nothing newer.

The record is a small file that outlives the attempts. It also shows an attempt that ended without recording its exit,
as after a node failure. This module does not import torch.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

from megatron_dppo.errors import ConfigError, UserError
from megatron_dppo.files import write_synced
from megatron_dppo.mcore.checkpoint.folder import checkpoints, checkpoints_folder, step_number

FINAL = (2, 3)
"""Exit codes that a restart would repeat: an error that the user must fix, and training that cannot continue."""
MIN_STOPS = 3
"""Stops in a row without a save that are always allowed. The limit of restarts is about crashes."""


class AttemptsExhausted(UserError):
    """Too many attempts in a row without progress. Exit code 1."""

    exit_code = 1


@dataclass(frozen=True, order=True)
class DiskProgress:
    """Progress of a run on disk, in order."""

    step: int = 0
    """Step of the newest complete checkpoint. 0 without one."""

    @classmethod
    def read(cls, output_dir: Path) -> Self:
        """Return the progress in the folder of a run."""
        saved = checkpoints(checkpoints_folder(output_dir))
        return cls(step_number(saved[-1]) if saved else 0)

    def __str__(self) -> str:
        return f"the checkpoint of step {self.step}" if self.step else "the beginning"


@dataclass(frozen=True)
class AttemptRecord:
    """Record of the attempts so far."""

    ends: int = 0
    """Attempts in a row that ended at ``progress``."""
    progress: DiskProgress = DiskProgress()
    """Best progress at the end of an attempt."""
    running: bool = False
    """True if an attempt has begun and has not recorded its end."""


@dataclass
class Restarts:
    """Record of the attempts of one job."""

    file: Path
    output_dir: Path
    limit: int
    """Restarts after crashes without a newer checkpoint."""

    def begin(self) -> str:
        """Record that an attempt begins and return a message for the user. Empty for the first attempt."""
        record, note = self._read(), ""
        if record.running:
            record = self._count_attempt(record)
            note = "the last attempt ended without recording its exit, as after a node failure; "
            if record.ends > self.limit:
                self._write(replace(record, running=False))
                raise AttemptsExhausted(note + self._explain_limit(record))
        self._write(replace(record, running=True))
        return f"{note}resuming from {record.progress}, attempt {record.ends + 1} from there" if record.ends else note

    def crashed(self, how: str) -> str:
        """Record that the attempt crashed and return a message for the user."""
        return self._end_attempt(how, self.limit)

    def stopped(self) -> str:
        """Record that the attempt was stopped before its time limit and return a message for the user."""
        return self._end_attempt("was stopped", max(self.limit, MIN_STOPS))

    def preempted(self) -> None:
        """Record that the attempt was preempted, which does not count."""
        self._write(replace(self._read(), running=False))

    def _end_attempt(self, how: str, limit: int) -> str:
        record = self._count_attempt(self._read())
        self._write(record)
        if record.ends > limit:
            raise AttemptsExhausted(f"the job {how}; {self._explain_limit(record)}")
        remaining = limit + 1 - record.ends
        return f"the job {how}; it resumes from {record.progress}, {remaining} more attempts from there"

    def _explain_limit(self, record: AttemptRecord) -> str:
        return (
            f"{record.ends} attempts in a row ended without anything newer than {record.progress} in {self.output_dir} "
            f"(--max-restarts {self.limit}), so the job is not queued again. Submit it again to resume from there"
        )

    def _count_attempt(self, record: AttemptRecord) -> AttemptRecord:
        """Return the record after an attempt that has just ended."""
        progress = DiskProgress.read(self.output_dir)
        # Progress never goes back in the record: a damaged checkpoint that is saved once more is no progress.
        ends = record.ends + 1 if progress <= record.progress else 1
        return AttemptRecord(ends, max(progress, record.progress), running=False)

    def _read(self) -> AttemptRecord:
        try:
            values = json.loads(self.file.read_text(encoding="utf-8"))
            return AttemptRecord(int(values["ends"]), DiskProgress(**values["progress"]), bool(values["running"]))
        except FileNotFoundError:
            return AttemptRecord()
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"{self.file} is damaged ({error}); delete it to count the attempts from 1 again"
            ) from error

    def _write(self, record: AttemptRecord) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_synced(self.file, json.dumps(asdict(record)) + "\n")


@dataclass(frozen=True)
class RankExit:
    """Exit code of the trainer, and the rank that it comes from."""

    code: int
    rank: int | None = None
    """None if no rank recorded its exit: all were killed together, or their nodes failed."""


def find_first_failure(folder: Path, code: int) -> RankExit:
    """Return the exit that caused the others: the first one with a code in ``FINAL``, else the first one.

    ``folder`` has a file ``code_RANK`` for each rank that exited by itself with a code other than 0. ``code`` is that
    of the Slurm step: that of any of its ranks, or of the signal that ended the remaining ranks.
    """
    timed_exits = []
    for file in folder.glob("code_*"):
        rank = int(file.name.removeprefix("code_"))
        timed_exits.append((file.stat().st_mtime, RankExit(int(file.read_text()), rank)))
    exits = [rank_exit for _, rank_exit in sorted(timed_exits, key=lambda timed: timed[0])]
    for final in FINAL:
        if matches := [rank_exit for rank_exit in exits if rank_exit.code == final]:
            return matches[0]
    return exits[0] if exits else RankExit(code)
