"""The folder of experiments: rows, base models, and one command at a time in it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron_dppo.commands.experiments.catalogue import warmup_settings
from megatron_dppo.commands.experiments.grid import GridRun, Settings
from megatron_dppo.commands.experiments.row import Handed, labelled, read_stored
from megatron_dppo.commands.experiments.statistics import Row
from megatron_dppo.errors import ErrorCollector, UserError
from megatron_dppo.files import disk_errors, existing_parent, write_synced
from megatron_dppo.run.lock import FolderLock, Words

Rows = dict[str, Row]
"""Key of a run -> its row."""
SHIPPED = Path(__file__).with_name("bases")
"""base models that come with the package: ``tools/make_demo_base.py`` writes them"""
_FOLDERS = ("rows", "bases", "runs")
_WORDS = Words(
    key="--output",
    owner="command",
    way_out="Wait for it (more --jobs do its runs faster), or give this one another --output and bring the rows "
    "together with --rows",
)


@dataclass(frozen=True)
class Store:
    """Where rows and base models are: ``rows/KEY-HASH.json``, ``bases/TASK-SEED-HASH/``, ``runs/`` for what is under
    way. HASH is of the warm-up's settings."""

    folder: Path
    warmup_steps: int | None = None
    """of base models; None = as many as the task needs"""

    def row(self, run: GridRun) -> Path:
        """The file of a run's row."""
        return self.folder / "rows" / f"{run.key}-{self._digest(run)}.json"

    def has(self, run: GridRun) -> bool:
        """Whether there is one."""
        return os.path.exists(self.row(run))

    def place(self, run: GridRun) -> Path:
        """Where it works."""
        return self.folder / "runs" / run.key

    def base(self, run: GridRun) -> Path:
        """The folder of its base model: the package's, where one of these settings comes with it, else the store's."""
        name = f"{run.task}-{run.settings['run']['seed']}-{self._digest(run)}"
        shipped = SHIPPED / name
        return shipped if shipped.is_dir() else self.folder / "bases" / name

    def _digest(self, run: GridRun) -> str:
        return hashlib.sha256(json.dumps(self.warmup(run), sort_keys=True).encode()).hexdigest()[:8]

    def warmup(self, run: GridRun) -> Settings:
        """The configuration that makes it."""
        return warmup_settings(run.task, run.settings["run"]["seed"], self.warmup_steps)

    def read(self, runs: Sequence[GridRun]) -> Rows:
        """The rows that there are.

        Raises:
            UserError: files that are no rows of these runs, all of them.
        """
        problems, found = ErrorCollector(), Rows()
        for run in {run.key: run for run in runs if self.has(run)}.values():
            row = problems.attempt(read_stored, self.row(run), run, self.base(run).name)
            if row is not None:
                found[run.key] = labelled(row, run)
        problems.raise_if_any()
        return found

    def lacking(self, handed: Sequence[Handed], runs: Sequence[GridRun]) -> Rows:
        """The rows of these runs that are not here yet.

        Args:
            handed: rows that other machines made.
            runs: of the grid; rows of other runs, or of a base model that was made in another way, are left out.

        Raises:
            UserError: a row contradicts the run that it names.
        """
        wanted, new = {(run.key, self.base(run).name): run for run in runs}, Rows()
        for each in handed:
            run = wanted.get((each.row["key"], each.row["base"]))
            if run is None or each.row["settings"] != run.settings or self.has(run):
                continue
            each.check(run, self.base(run).name)
            new.setdefault(run.key, labelled(each.row, run))
        return new

    def add(self, rows: Rows, runs: Sequence[GridRun]) -> None:
        """Write rows of these runs.

        Raises:
            DiskError: they cannot be written.
        """
        self.make_folders()
        files = {run.key: self.row(run) for run in runs}
        with disk_errors(self.folder / "rows", "a row"):
            for key, row in rows.items():
                write_synced(files[key], json.dumps(row) + "\n")

    def check_output_dir(self) -> None:
        """Refuse a place where no folder can be; reads only.

        Raises:
            UserError: a file is in its way, or it cannot be looked at.
        """
        try:
            there = existing_parent(self.folder)
            if not there.is_dir():
                raise UserError(f"--output {self.folder}: {there} is a file; choose a folder")
        except OSError as error:
            raise UserError(f"--output {self.folder}: {error.strerror}; choose another folder") from None

    def make_folders(self, *more: str) -> None:
        """Make the folders that a command writes to, and ``more`` of them.

        Raises:
            UserError: one of them cannot be.
        """
        self.check_output_dir()
        for name in (*_FOLDERS, *more):
            self._make(self.folder / name)

    def _make(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"--output {self.folder}: the folder {folder} cannot be made: {error.strerror}; move away what is in "
                "its place, or choose an --output that this user can write to"
            ) from None

    @contextmanager
    def held(self, *more: str) -> Iterator[None]:
        """Keep other commands out, and make the folders (see ``make_folders``).

        Raises:
            UserError: another command works here, or they cannot be made.
        """
        self.check_output_dir()
        self._make(self.folder)
        lock = FolderLock(self.folder, words=_WORDS)
        try:
            if lock.note:
                print(f"lock     {lock.note}", flush=True)
            self.make_folders(*more)
            yield
        finally:
            lock.release()
