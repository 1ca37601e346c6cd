"""Sinks of each step's metrics besides ``metrics.jsonl``: TensorBoard, Weights & Biases and other trackers."""

import contextlib
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megatron_dppo.config.run import LogConfig
from megatron_dppo.errors import ConfigError, ErrorCollector
from megatron_dppo.report.trackers import (
    LoggedSteps,
    RunLabels,
    begin_new_runs,
    finite_values,
    open_trackers,
    require_trackers,
    run_id,
)


class Sink:
    """A receiver of metrics, here one without tables."""

    shows_tables = False

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add the values of one step."""
        raise NotImplementedError

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]], step: int) -> None:
        """Show a table; sinks without tables ignore it."""

    def finish(self) -> None:
        """Close the sink."""


class TensorBoardSink(Sink):
    """TensorBoard events. Events of steps after ``resumed_step`` are purged."""

    shows_tables = True

    def __init__(self, folder: Path, resumed_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard keeps events of the interrupted run; purge those that will be written again.
        purge = None if resumed_step is None else resumed_step + 1
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=purge)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add one scalar for each value."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]], step: int) -> None:
        """Add a table as text."""
        self._writer.add_text(name, markdown_table(columns, rows), step)
        self._writer.flush()

    def finish(self) -> None:
        """Close the file. Each record was flushed when it was written, so a full disk loses nothing here."""
        with contextlib.suppress(OSError):
            self._writer.close()


class WandbSink(Sink):
    """A run in Weights & Biases, one per folder. A resumed run continues it."""

    shows_tables = True

    def __init__(self, project: str, folder: Path, config: Mapping[str, object], labels: RunLabels) -> None:
        self._wandb = require_wandb(project)
        # Before wandb creates its folder, because an existing folder marks a run of an older version.
        identity = run_id(folder, "wandb")
        self._run = self._wandb.init(
            project=project,
            dir=str(folder),
            config=dict(config),
            resume="allow",
            id=identity,
            name=labels.name,
            group=labels.group,
            tags=list(labels.tags) or None,
            mode="offline" if labels.offline else None,
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add the values of one step."""
        self._run.log(dict(values), step=step)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]], step: int) -> None:
        """Add a table."""
        table = self._wandb.Table(columns=list(columns), data=[list(row) for row in rows])
        self._run.log({name: table}, step=step)

    def finish(self) -> None:
        """End the run."""
        self._run.finish()


class TrackerSink(Sink):
    """A run in a tracker that ``accelerate`` supports, without tables."""

    def __init__(self, tracker: Any) -> None:
        self._tracker = tracker

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add the values that are numbers."""
        self._tracker.log(finite_values(values), step=step)

    def finish(self) -> None:
        """End the run."""
        self._tracker.finish()


class ContinuedSink(Sink):
    """A run in a tracker that gets each metric of a step once, also after a resume from an earlier step.

    No tracker takes values back. So the steps between the checkpoint and the interruption keep the values of the
    interrupted attempt; ``metrics.jsonl`` has those of the attempt that continued.
    """

    def __init__(self, sink: Sink, name: str, folder: Path, resumed_step: int | None) -> None:
        self.shows_tables = sink.shows_tables
        self._sink = sink
        self._logged = LoggedSteps(folder, run_id(folder, name))
        if resumed_step is not None and self._logged.last > resumed_step:
            print(
                f"note     {name} keeps the interrupted attempt's values of steps {resumed_step + 1} to "
                f"{self._logged.last}; {folder / 'metrics.jsonl'} gets those of this attempt",
                file=sys.stderr,
                flush=True,
            )

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add the values of one step that the tracker does not have."""
        new = {name: value for name, value in values.items() if not self._logged.has(name, step)}
        if new:
            # Recorded first: a kill in between leaves a gap, never a step that is shown twice.
            self._logged.add(new, step)
            self._sink.log(new, step)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]], step: int) -> None:
        """Show a table, unless the tracker has it."""
        if not self._logged.has(name, step):
            self._logged.add([name], step)
            self._sink.log_table(name, columns, rows, step)

    def finish(self) -> None:
        """End the run."""
        self._sink.finish()


def open_sinks(folder: Path, config: Mapping[str, object], log: LogConfig, resumed_step: int | None) -> list[Sink]:
    """Open every sink that ``[log]`` enables; the other arguments are those of ``MetricsWriter``."""
    labels = RunLabels(
        project=log.project or log.wandb_project or "megatron_dppo",
        name=log.name or folder.resolve().name,
        group=log.group,
        tags=tuple(log.tags),
        offline=log.offline,
    )
    sinks: list[Sink] = []
    if log.tensorboard:
        sinks.append(TensorBoardSink(folder, resumed_step))
    if resumed_step is None:
        begin_new_runs(folder)
    tracked: list[tuple[str, Sink]] = []
    if log.wandb_project:
        tracked.append(("wandb", WandbSink(log.wandb_project, folder, config, labels)))
    opened = open_trackers(log.trackers, folder, labels, config)
    tracked.extend((name, TrackerSink(tracker)) for name, tracker in zip(log.trackers, opened, strict=True))
    return sinks + [ContinuedSink(sink, name, folder, resumed_step) for name, sink in tracked]


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return rows as a Markdown table; text that could be markup is escaped.

    Example:
        >>> print(markdown_table(["token", "n"], [["a|b", 3]]))
        | token | n |
        |---|---|
        | a&#124;b | 3 |
    """
    lines = [columns, *rows]
    cells = [["-" if value is None else _plain(str(value)) for value in line] for line in lines]
    text = ["| " + " | ".join(line) + " |" for line in cells]
    return "\n".join([text[0], "|---" * len(columns) + "|", *text[1:]])


def _plain(text: str) -> str:
    """Replace characters of Markdown and HTML with numeric references."""
    return "".join(f"&#{ord(c)};" if c in "|<>&*_`[]\\\n\r#" else c for c in text)


def require_sinks(log: LogConfig) -> None:
    """Check that everything that ``[log]`` enables is installed and has its key."""
    problems = ErrorCollector()
    if log.tensorboard:
        problems.attempt(_require_tensorboard)
    problems.attempt(require_trackers, log.trackers)
    project = log.wandb_project
    if project is not None and problems.attempt(require_wandb, project) is not None and not log.offline:
        problems.attempt(_require_wandb_key, project)
    problems.raise_if_any()


def _require_tensorboard() -> None:
    if importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            "log.tensorboard = true needs the package tensorboard: pip install tensorboard, or set it to false"
        )


def _require_wandb_key(project: str) -> None:
    """Check the key, because a run without a terminal must not wait for somebody to type one."""
    if os.environ.get("WANDB_MODE", "online") != "online" or os.environ.get("WANDB_API_KEY"):
        return
    file = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    if not (file.is_file() and host in file.read_text(encoding="utf-8", errors="replace")):
        raise ConfigError(
            f"log.wandb_project = {project!r}, but Weights & Biases has no API key: export WANDB_API_KEY, "
            "run wandb login, or set log.offline = true (or export WANDB_MODE=offline)"
        )


def require_wandb(project: str) -> Any:
    """Return the package ``wandb``; called early, so that a missing package is reported before the training."""
    try:
        import wandb
    except ImportError as error:
        raise ConfigError(
            f"log.wandb_project = {project!r} needs the package wandb: pip install 'megatron-dppo[wandb]'"
        ) from error
    return wandb
