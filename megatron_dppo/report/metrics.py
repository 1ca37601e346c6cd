"""Metrics: global reduction of (numerator, denominator) pairs, and the files they go to."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.errors import ConfigError, Problems
from megatron_dppo.files.atomic import write_synced
from megatron_dppo.report.records import read_metrics
from megatron_dppo.report.trackers import Labels, finite, open_trackers, require_trackers, run_id
from megatron_dppo.types import Metric

_Pair = tuple[str, float, float]


def reduce_metrics(
    local: Sequence[Mapping[str, Metric]], group: dist.ProcessGroup | None, *, contributes: bool = True
) -> dict[str, float]:
    """Combine the metrics of micro-batches and of all ranks; the result is bit-identical on every rank.

    Args:
        local: the metrics of each micro-batch of this rank; ranks may have different names, or none.
        group: the ranks to reduce over; None = this one alone.
        contributes: False on ranks that hold copies of a peer's metrics (tensor parallel ranks above 0).

    Returns:
        mean: sum of numerators over sum of denominators; max: the largest value. A mean over nothing is no number: its
        name is missing.
    """
    mine = _sum_locally(local) if contributes else {}
    gathered: list[dict[str, _Pair]] = [mine]
    if group is not None and dist.get_world_size(group) > 1:
        gathered = [{} for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(gathered, mine, group=group)
    total: dict[str, _Pair] = {}
    for part in gathered:
        for name, pair in part.items():
            total[name] = _add(total[name], pair) if name in total else pair
    return {
        name: value if kind == "max" else value / denominator
        for name, (kind, value, denominator) in total.items()
        if kind == "max" or denominator
    }


def _add(left: _Pair, right: _Pair) -> _Pair:
    if left[0] == "max":
        # Python's max keeps or loses a NaN by the order of its arguments; here it always stays visible.
        largest = math.nan if math.isnan(left[1]) or math.isnan(right[1]) else max(left[1], right[1])
        return "max", largest, 1.0
    return "mean", left[1] + right[1], left[2] + right[2]


def _sum_locally(local: Sequence[Mapping[str, Metric]]) -> dict[str, _Pair]:
    """The sums of this rank in float64."""
    flat = [(name, metric) for part in local for name, metric in part.items()]
    numbers = _to_floats([value for _, metric in flat for value in (metric.numerator, metric.denominator)])
    result: dict[str, _Pair] = {}
    for (name, metric), numerator, denominator in zip(flat, numbers[::2], numbers[1::2], strict=True):
        pair: _Pair = (metric.kind, numerator, denominator)
        result[name] = _add(result[name], pair) if name in result else pair
    return result


def _to_floats(values: Sequence[Tensor | float]) -> list[float]:
    """All values, with one transfer from the device for all tensors together."""
    tensors = [value.detach().double().reshape(()) for value in values if isinstance(value, Tensor)]
    moved = iter(torch.stack(tensors).tolist() if tensors else [])
    return [next(moved) if isinstance(value, Tensor) else float(value) for value in values]


class MetricsWriter:
    """Writes one record a step to ``metrics.jsonl`` and, when asked, to TensorBoard and trackers.

    Args:
        folder: where the files go.
        config: the resolved configuration, for the run's page in Weights & Biases.
        tensorboard: write TensorBoard events.
        wandb_project: a project name, or None.
        trackers: names of others (``report.trackers``).
        labels: what the run is called there; None = by its folder.
        resumed_step: records of later steps belong to a run that was cut off, and are dropped.

    Raises:
        ConfigError: Weights & Biases is asked for but not installed.
    """

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        *,
        tensorboard: bool,
        wandb_project: str | None,
        resumed_step: int | None,
        trackers: Sequence[str] = (),
        labels: Labels | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "metrics.jsonl"
        keep = [] if resumed_step is None else [r for r in read_metrics(self.path) if r["step"] <= resumed_step]
        write_synced(self.path, "".join(json.dumps(record) + "\n" for record in keep))
        self._file = self.path.open("a", encoding="utf-8")
        self._tensorboard = _open_tensorboard(folder, resumed_step) if tensorboard else None
        labels = labels or Labels(project=wandb_project or "megatron_dppo", name=folder.name)
        self._wandb = _open_wandb(wandb_project, folder, config, labels) if wandb_project else None
        self._trackers = open_trackers(trackers, folder, labels, config)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add the values of one step; keys start with ``train/ rollout/ eval/ perf/``."""
        clean = {k: (v if math.isfinite(v) else None) for k, v in values.items()}
        self._file.write(json.dumps({"step": step, **clean}) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())  # a checkpoint of this step must not outlive its record
        if self._tensorboard is not None:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, step)
            self._tensorboard.flush()
        if self._wandb is not None:
            self._wandb.log(dict(values), step=step)
        for tracker in self._trackers:
            tracker.log(finite(values), step=step)

    @property
    def has_tables(self) -> bool:
        """Whether a sink is open that shows tables."""
        return self._tensorboard is not None or self._wandb is not None

    def write_table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Show a table beside the curves: as text in TensorBoard, as a table in Weights & Biases."""
        if self._tensorboard is not None:
            self._tensorboard.add_text(name, markdown_table(columns, rows), step)
            self._tensorboard.flush()
        if self._wandb is not None:
            table = require_wandb("").Table(columns=list(columns), data=[list(row) for row in rows])
            self._wandb.log({name: table}, step=step)

    def close(self) -> None:
        """Close every sink; each record was flushed when it was written, so a full disk takes nothing here."""
        with contextlib.suppress(OSError):
            self._file.close()
        if self._tensorboard is not None:
            with contextlib.suppress(OSError):
                self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()
        for tracker in self._trackers:
            tracker.finish()


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Rows as Markdown; what could be markup is shown as it is.

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
    """Characters of Markdown and HTML by their numbers."""
    return "".join(f"&#{ord(c)};" if c in "|<>&*_`[]\\\n\r#" else c for c in text)


def _open_tensorboard(folder: Path, resumed_step: int | None) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    purge = None if resumed_step is None else resumed_step + 1
    return SummaryWriter(str(folder / "tensorboard"), purge_step=purge)


def require_sinks(
    *, tensorboard: bool, wandb_project: str | None, offline: bool = False, trackers: Sequence[str] = ()
) -> None:
    """Whether everything that the log asks for is installed and has its key.

    Raises:
        ConfigError: with what to install, or where the key goes; both at once.
    """
    problems = Problems()
    if tensorboard:
        problems.attempt(_require_tensorboard)
    problems.attempt(require_trackers, trackers)
    if wandb_project is not None and problems.attempt(require_wandb, wandb_project) is not None and not offline:
        problems.attempt(_require_wandb_key, wandb_project)
    problems.raise_if_any()


def _require_tensorboard() -> None:
    if importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            "log.tensorboard = true needs the package tensorboard: pip install tensorboard, or set it to false"
        )


def _require_wandb_key(project: str) -> None:
    """A run without a terminal must not wait for somebody to type a key."""
    if os.environ.get("WANDB_MODE", "online") != "online" or os.environ.get("WANDB_API_KEY"):
        return
    file = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    if not (file.is_file() and host in file.read_text(encoding="utf-8", errors="replace")):
        raise ConfigError(
            f"log.wandb_project = {project!r}, but there is no key: export WANDB_API_KEY, run wandb login, or set "
            "log.offline = true (or export WANDB_MODE=offline)"
        )


def require_wandb(project: str) -> Any:
    """The package ``wandb``; called early, so that its absence is known before hours of training.

    Raises:
        ConfigError: with the command that installs it.
    """
    try:
        import wandb
    except ImportError as error:
        raise ConfigError(
            f"log.wandb_project = {project!r} needs the package wandb: pip install 'megatron-dppo[wandb]'"
        ) from error
    return wandb


def _open_wandb(project: str, folder: Path, config: Mapping[str, Any], labels: Labels) -> Any:
    wandb = require_wandb(project)
    identity = run_id(folder, "wandb")  # before wandb makes its folder, by which older runs are told
    return wandb.init(
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
