"""Ways to break the program, each with a kill that has to find it."""

from __future__ import annotations

import os
import shutil
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock


@dataclass(frozen=True)
class Mutation:
    """A change of the program in this process, and a point at which it shows."""

    apply: Callable[[], None]
    point: str
    """regular expression; the first point of the changed program whose name it is"""
    mode: str = "node"


def _no_fsync() -> None:
    """Whatever we write stays in memory; Megatron's own shards are synced."""
    for name in ("files", "report.metrics", "mcore.checkpoint.manifest"):
        module = sys.modules[f"megatron_dppo.{name}"]
        mock.patch.object(module, "os", types.SimpleNamespace(**{**vars(os), "fsync": lambda file: None})).start()


def _in_place() -> None:
    """Small files are written over, not beside."""

    def write(path: Path, text: str) -> None:
        with path.open("w", encoding="utf-8") as file:
            file.write(text)
            os.fsync(file.fileno())

    for name, module in list(sys.modules.items()):
        if name.startswith("megatron_dppo") and hasattr(module, "write_synced"):
            module.write_synced = write


def _prune_first() -> None:
    """Old checkpoints go before the new one has its name."""
    from megatron_dppo.mcore.checkpoint import folder as checkpoint_folder

    complete = checkpoint_folder.complete

    def wrong(partial: Path, final: Path) -> None:
        for old in checkpoint_folder.checkpoints(final.parent):
            shutil.rmtree(old)
        complete(partial, final)

    checkpoint_folder.complete = wrong


def _not_atomic() -> None:
    """A checkpoint is written under its own name."""
    from megatron_dppo.mcore.checkpoint import folder as checkpoint_folder

    checkpoint_folder.partial_path = lambda final: final
    checkpoint_folder.complete = lambda partial, final: None


def _metrics_not_cut() -> None:
    """Records of steps that are done again stay."""
    from megatron_dppo.report.metrics import MetricsWriter
    from megatron_dppo.run import run_records

    class Writer(MetricsWriter):
        def __init__(self, *arguments: Any, resumed_step: int | None, **keywords: Any) -> None:
            super().__init__(*arguments, resumed_step=resumed_step and 10**9, **keywords)

    run_records.MetricsWriter = Writer  # type: ignore[misc]


def _prompts_again() -> None:
    """The position in the data is not restored."""
    from megatron_dppo.run.checkpoints import Checkpoints

    restore = Checkpoints.restore

    def wrong(self: Any, point: Any) -> Any:
        restored = restore(self, point)
        self.collector.stream.cursor = 0
        return restored

    Checkpoints.restore = wrong  # type: ignore[method-assign]


def _optimizer_anew() -> None:
    """The optimizer's state is not loaded."""
    from megatron_dppo.mcore.optim import Optimizer

    Optimizer.load_state_dict = lambda self, state: None  # type: ignore[method-assign]


_MID_SAVE = r".* save \| close checkpoints/step_000002(\.partial)?/__0_0\.distcp \| before #1"
MUTATIONS = {
    "no fsync": Mutation(_no_fsync, r".* save \| rename checkpoints/step_000001\.partial .* after #1", "power"),
    "files in place": Mutation(_in_place, r".* evaluate \| write samples\.jsonl \| torn #3"),
    "prune first": Mutation(_prune_first, r".* save \| rename checkpoints/step_000002\.partial .* before #1"),
    "not atomic": Mutation(_not_atomic, _MID_SAVE),
    "metrics not cut": Mutation(_metrics_not_cut, r".* save \| rename checkpoints/step_000002\.partial .* before #1"),
    "prompts again": Mutation(_prompts_again, _MID_SAVE),
    "optimizer anew": Mutation(_optimizer_anew, _MID_SAVE),
}
