"""Metrics: global reduction of (numerator, denominator) pairs, and the writer of ``metrics.jsonl``."""

import contextlib
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.config.run import LogConfig
from megatron_dppo.errors import ConfigError
from megatron_dppo.files import write_synced
from megatron_dppo.parallel.groups import ParallelGroups
from megatron_dppo.parallel.objects import all_gather_objects, is_leader
from megatron_dppo.report.records import read_metrics
from megatron_dppo.report.sinks import open_sinks
from megatron_dppo.types import Metric

_Pair = tuple[str, float, float]


def reduce_metrics(
    local: Sequence[Mapping[str, Metric]], group: dist.ProcessGroup | None, *, contributes: bool = True
) -> dict[str, float]:
    """Combine the metrics of micro-batches and of all ranks; the result is bit-identical on every rank.

    A mean is the sum of numerators over the sum of denominators, and its name is missing if that is 0. Ranks may have
    different names, or none. Those that hold copies of a peer's metrics (tensor-parallel ranks above 0) do not
    contribute. Without a group it is this rank alone.
    """
    # Objects instead of tensors: ranks may have different metric names.
    gathered = all_gather_objects(_sum_locally(local) if contributes else {}, group)
    total: dict[str, _Pair] = {}
    # Add in the order of ranks on every rank, so that the sums are bit-identical everywhere.
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
        # Python's max keeps or drops a NaN by the order of its arguments. Here a NaN always stays visible.
        largest = math.nan if math.isnan(left[1]) or math.isnan(right[1]) else max(left[1], right[1])
        return "max", largest, 1.0
    return "mean", left[1] + right[1], left[2] + right[2]


def _sum_locally(local: Sequence[Mapping[str, Metric]]) -> dict[str, _Pair]:
    """Return the sums of this rank in float64."""
    flat = [(name, metric) for part in local for name, metric in part.items()]
    numbers = _to_floats([value for _, metric in flat for value in (metric.numerator, metric.denominator)])
    result: dict[str, _Pair] = {}
    for (name, metric), numerator, denominator in zip(flat, numbers[::2], numbers[1::2], strict=True):
        pair: _Pair = (metric.kind, numerator, denominator)
        result[name] = _add(result[name], pair) if name in result else pair
    return result


def _to_floats(values: Sequence[Tensor | float]) -> list[float]:
    """Return all values, with a single transfer from the device for all tensors."""
    tensors = [value.detach().double().reshape(()) for value in values if isinstance(value, Tensor)]
    moved = iter(torch.stack(tensors).tolist() if tensors else [])
    return [next(moved) if isinstance(value, Tensor) else float(value) for value in values]


class MetricsWriter:
    """Writer of one record per step to ``metrics.jsonl`` and, if enabled, to TensorBoard and trackers.

    Records of steps after ``resumed_step`` are dropped: the interrupted run wrote them. None starts a new file.
    """

    def __init__(self, folder: Path, config: Mapping[str, object], log: LogConfig, *, resumed_step: int | None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "metrics.jsonl"
        # Rewrite the file without records after the checkpoint: these steps are computed again.
        keep = [] if resumed_step is None else [r for r in read_metrics(self.path) if r["step"] <= resumed_step]
        write_synced(self.path, "".join(json.dumps(record) + "\n" for record in keep))
        # Readable too, for ``_restore_if_deleted``.
        self._file = self.path.open("a+", encoding="utf-8")
        self._sinks = open_sinks(folder, config, log, resumed_step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add the values of one step; keys start with ``train/ rollout/ eval/ perf/``."""
        self._restore_if_deleted()
        # JSON has no NaN or infinity.
        clean = {k: (v if math.isfinite(v) else None) for k, v in values.items()}
        self._file.write(json.dumps({"step": step, **clean}) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())  # A checkpoint of this step must not outlive its record.
        for sink in self._sinks:
            sink.log(values, step)

    def _restore_if_deleted(self) -> None:
        """Write the file again if it was deleted or renamed: the open handle still has its records."""
        try:
            is_current = os.path.samestat(self.path.stat(), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            self._file.seek(0)
            records = self._file.read()
            self._file.close()
            write_synced(self.path, records)
            self._file = self.path.open("a+", encoding="utf-8")
            print(
                f"warning  {self.path} was deleted or renamed during the run; it is written again with its "
                f"{records.count(chr(10))} records",
                file=sys.stderr,
                flush=True,
            )
            return
        if not is_current:
            raise ConfigError(
                f"{self.path} was replaced by another file during the run, and the records of this step are not "
                "written to it. Let no other program write this file, and rerun the same command to resume from the "
                "last checkpoint"
            )

    @property
    def has_tables(self) -> bool:
        """True if a sink can show tables."""
        return any(sink.shows_tables for sink in self._sinks)

    def write_table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Show a table in the sinks that support tables."""
        for sink in self._sinks:
            sink.log_table(name, columns, rows, step)

    def close(self) -> None:
        """Close every sink. Each record was flushed when it was written, so a full disk loses nothing here."""
        with contextlib.suppress(OSError):
            self._file.close()
        for sink in self._sinks:
            sink.finish()


def reduce_over_samples(groups: ParallelGroups, local: dict[str, Metric]) -> dict[str, float]:
    """Reduce per-sample metrics; one rank of each model-parallel group contributes."""
    return reduce_metrics([local], groups.world, contributes=is_leader(groups.replica))


def add_prefix(prefix: str, values: dict[str, float]) -> dict[str, float]:
    """Return the same values under ``prefix/name``."""
    return {f"{prefix}/{name}": value for name, value in values.items()}
