"""The folder of experiments: rows, base models, and one command at a time in it."""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron_dppo.errors import ErrorCollector, UserError
from megatron_dppo.files import disk_errors, existing_parent, write_synced
from megatron_dppo.process.lock import FolderLock, LockMessages
from megatron_dppo_lab.catalogue import base_identity
from megatron_dppo_lab.grid import GridRun
from megatron_dppo_lab.row import ExternalRow, read_stored, relabel_row
from megatron_dppo_lab.statistics import Row

Rows = dict[str, Row]
"""Key of a run -> its row."""
SHIPPED = Path(__file__).with_name("bases")
"""Base models of the package, written by ``tools/make_demo_base.py``."""
_FOLDERS = ("rows", "bases", "runs")
_LOCK_MESSAGES = LockMessages(
    key="--output",
    owner="command",
    fix="Wait for it (more --jobs finish its runs faster), or choose another --output and merge the rows with --rows",
)


@dataclass(frozen=True)
class Store:
    """Folder of rows and base models.

    Rows are ``rows/KEY-HASH.json``, base models ``bases/TASK-SEED-HASH/``. Running runs work in ``runs/``. HASH is the
    digest of ``base_identity``.
    """

    folder: Path
    base_steps: int | None = None
    """Supervised steps of base models. None uses the task's number."""

    def row(self, run: GridRun) -> Path:
        """Return the file of a run's row."""
        return self.folder / "rows" / f"{run.key}-{self._digest(run)}.json"

    def has(self, run: GridRun) -> bool:
        """Return True if the run has a row."""
        return os.path.exists(self.row(run))

    def work_folder(self, run: GridRun) -> Path:
        """Return the work folder of a run."""
        return self.folder / "runs" / run.key

    def records(self, run: GridRun) -> Path:
        """Return the folder with the kept records of a run."""
        return self.folder / "records" / f"{run.key}-{self._digest(run)}"

    def base(self, run: GridRun) -> Path:
        """Return the base model of a run: the package's if one has these settings, else the store's."""
        name = f"{run.task}-{run.settings['run']['seed']}-{self._digest(run)}"
        shipped = SHIPPED / name
        return shipped if shipped.is_dir() else self.folder / "bases" / name

    def _digest(self, run: GridRun) -> str:
        identity = base_identity(run.task, run.settings["run"]["seed"], self.base_steps)
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]

    def read(self, runs: Sequence[GridRun]) -> Rows:
        """Read the existing rows of these runs."""
        problems = ErrorCollector()
        rows = Rows()
        for run in {run.key: run for run in runs if self.has(run)}.values():
            row = problems.attempt(read_stored, self.row(run), run, self.base(run).name)
            if row is not None:
                rows[run.key] = relabel_row(row, run)
        problems.raise_if_any()
        return rows

    def require_same_bases(self, rows: Rows, missing: Sequence[GridRun]) -> str:
        """Check that new runs start from the weights of the rows of their seed and mismatch, to be comparable.

        A base model that is trained again on another machine differs by rounding. Return a note on rows that do not say
        from which weights they start. Empty without any.
        """
        unknown = 0
        for base, mismatch in sorted({(self.base(run), run.mismatch) for run in missing}):
            same = [row for row in rows.values() if (row["base"], row["mismatch"]) == (base.name, mismatch)]
            named = {row["base_weights"] for row in same if "base_weights" in row}
            unknown += sum("base_weights" not in row for row in same)
            here = weights_digest(base) if base.is_dir() else "none"
            if named - {here}:
                raise UserError(
                    f"rows of {base.name} with {mismatch} start from weights {', '.join(sorted(named))}, and here are "
                    f"{here}: they cannot be compared with new runs. Fix: copy {base.name} of the machine that made "
                    f"the rows into {base.parent}, or use another --output without --rows"
                )
        if not unknown:
            return ""
        return (
            f"{unknown} rows do not say from which weights they start; base models of another machine differ by "
            "rounding, and comparisons by seed with new runs are off"
        )

    def new_rows(self, external: Sequence[ExternalRow], runs: Sequence[GridRun]) -> Rows:
        """Return the external rows of these runs that the store lacks.

        Rows of other runs or other base models are skipped.
        """
        by_identity = {(run.key, self.base(run).name): run for run in runs}
        new = Rows()
        for each in external:
            run = by_identity.get((each.row["key"], each.row["base"]))
            if run is None or each.row["settings"] != run.settings or self.has(run):
                continue
            each.check(run, self.base(run).name)
            new.setdefault(run.key, relabel_row(each.row, run))
        return new

    def add(self, rows: Rows, runs: Sequence[GridRun]) -> None:
        """Write rows of these runs."""
        self.make_folders()
        files = {run.key: self.row(run) for run in runs}
        with disk_errors(self.folder / "rows", "a row"):
            for key, row in rows.items():
                write_synced(files[key], json.dumps(row) + "\n")

    def check_output_dir(self) -> None:
        """Refuse a place where no folder can be; reads only."""
        try:
            there = existing_parent(self.folder)
            if not there.is_dir():
                raise UserError(f"--output {self.folder}: {there} is a file; choose a folder")
        except OSError as error:
            raise UserError(f"--output {self.folder}: {error.strerror}; choose another folder") from None

    def make_folders(self, *more: str) -> None:
        """Create the folders of the store, and the additional folders ``more``."""
        self.check_output_dir()
        for folder in (self.folder, *(self.folder / name for name in (*_FOLDERS, *more))):
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(
                    f"--output {self.folder}: the folder {folder} cannot be created: {error.strerror}. Fix: remove "
                    "what is there, or choose a writable --output"
                ) from None

    @contextmanager
    def held(self, *more: str) -> Iterator[None]:
        """Lock the store and create its folders (see ``make_folders``)."""
        self.make_folders()
        lock = FolderLock(self.folder, messages=_LOCK_MESSAGES)
        try:
            if lock.note:
                print(f"lock     {lock.note}", flush=True)
            self.make_folders(*more)
            yield
        finally:
            lock.release()


def weights_digest(base: Path) -> str:
    """Return a digest of the weights of a base model: another machine trains other ones, by rounding."""
    digest = hashlib.sha256()
    for file in sorted(base.glob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
