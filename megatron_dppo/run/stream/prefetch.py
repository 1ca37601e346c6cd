"""Which weights sample which batch of rollouts, and the background thread that samples ahead. No collectives here.

At the start of step s (the policy has the weights of s steps) batch s is taken, and what is missing of the batches
s + 1 to s + max_staleness is sampled in the background with the weights at hand, while step s trains. The loop waits
for that before it gives new weights to the engine. So batch b is sampled with the weights of step
max(0, b - max_staleness), whatever the clock says. See docs/rollout.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from megatron_dppo.config.schema import Config
from megatron_dppo.report.clock import Clock
from megatron_dppo.rollout.store import load_groups, save_groups
from megatron_dppo.types import Prompt, RolloutGroup


@dataclass(frozen=True, kw_only=True)
class Batch:
    """This rank's rollouts of one step, as they were sampled; nothing is refilled or left out yet."""

    step: int
    """the rollout step that trains on it, from 0"""
    sampled_at: int
    """rollout steps that were done when its weights were published"""
    cursor: int
    """position in the stream of prompts of its first one, over all ranks"""
    prompts_per_rank: int
    groups: tuple[RolloutGroup, ...] = ()
    """Empty on ranks that get their rollouts from the leader of their model-parallel group."""

    def positions(self, dp_rank: int) -> range:
        """Where in the stream the prompts of a data-parallel rank are."""
        first = self.cursor + dp_rank * self.prompts_per_rank
        return range(first, first + self.prompts_per_rank)


class Prefetch:
    """The batches that are sampled before their step.

    Args:
        max_staleness: rollout steps that the weights of a batch may be old; 0 = nothing is sampled ahead.
        device: of the engine; CUDA's current device is a property of each thread.
    """

    def __init__(self, max_staleness: int, device: torch.device) -> None:
        self._max_staleness = max_staleness
        self._ready: dict[int, Batch] = {}
        self._running: list[tuple[Batch, Future[list[RolloutGroup]]]] = []
        self._thread = ThreadPoolExecutor(1, "prefetch", initializer=_use, initargs=(device,))

    def missing(self, step: int, num_steps: int) -> list[int]:
        """Steps whose batches are to be sampled ahead at the start of ``step``."""
        known = self._ready.keys() | {batch.step for batch, _ in self._running}
        last = min(step + self._max_staleness, num_steps - 1)
        return [later for later in range(step + 1, last + 1) if later not in known]

    def start(self, batch: Batch, sample: Callable[[], list[RolloutGroup]]) -> None:
        """Sample a batch in the background, after those that were started before. ``sample`` runs no collective."""
        self._running.append((batch, self._thread.submit(sample)))

    def wait(self, clock: Clock) -> None:
        """Until nothing runs in the background; the engine may get new weights then.

        Raises:
            Exception: what ``sample`` raised, as it was.
        """
        if not self._running:
            return
        with clock.part("prefetch_wait"):
            for batch, future in self._running:
                self._ready[batch.step] = replace(batch, groups=tuple(future.result()))
        self._running.clear()

    def take(self, step: int) -> Batch | None:
        """The batch of ``step``; None when it was not sampled ahead (as the first one never is)."""
        return self._ready.pop(step, None)

    def ready(self) -> list[Batch]:
        """Finished batches, by step: what a checkpoint has to hold."""
        return [self._ready[step] for step in sorted(self._ready)]

    def restore(self, batches: list[Batch]) -> None:
        """The batches of a checkpoint."""
        self._ready = {batch.step: batch for batch in batches}

    def close(self) -> None:
        """Wait for what runs now; drop the rest and all results."""
        self._thread.shutdown(wait=True, cancel_futures=True)


def describe_batches(batches: Sequence[Batch], dp: int) -> dict[str, Any]:
    """What ``state.json`` says of the batches in a checkpoint; ``save_batches`` writes the rollouts themselves."""
    plain = [{f.name: getattr(batch, f.name) for f in fields(batch) if f.name != "groups"} for batch in batches]
    return {"dp": dp, "batches": plain}


def save_batches(batches: Sequence[Batch], dp_rank: int, checkpoint: Path) -> None:
    """Write this data-parallel rank's rollouts into a checkpoint's folder."""
    for batch in batches:
        save_groups(_file(checkpoint, batch.step, dp_rank), batch.groups)


def load_batches(
    described: Mapping[str, Any], dp_rank: int, checkpoint: Path, prompt: Callable[[int], Prompt]
) -> list[Batch]:
    """The inverse of ``describe_batches`` and ``save_batches``; ``prompt`` gives prompt i of the stream.

    Raises:
        CheckpointError: a file is missing or damaged, or the data set is another one.
    """
    batches = [Batch(**plain) for plain in described["batches"]]
    return [
        replace(
            batch,
            groups=tuple(
                load_groups(_file(checkpoint, batch.step, dp_rank), [prompt(i) for i in batch.positions(dp_rank)])
            ),
        )
        for batch in batches
    ]


def why_unusable(described: Mapping[str, Any], was: Mapping[str, Any], config: Config, dp: int) -> str:
    """Why the batches of a checkpoint cannot be trained on by this run; empty when they can.

    Args:
        described: what ``describe_batches`` gave.
        was: the configuration of the run that wrote them, as JSON.
        config: this run's.
        dp: this run's data-parallel size.
    """
    if described["dp"] != dp:
        return f"the data-parallel size was {described['dp']} and is {dp}"
    if any(batch["step"] - batch["sampled_at"] > config.train.max_staleness for batch in described["batches"]):
        return f"they are older than train.max_staleness = {config.train.max_staleness} allows"
    if config.needs_engine_routing and was["train"].get("router_replay") not in ("rollout", "compare"):
        return "they were sampled without the experts that train.router_replay needs"
    now = config.model_dump(mode="json")
    changed = [name for name in ("data", "rollout", "reward") if was[name] != now[name]]
    return f"the section [{changed[0]}] has changed" if changed else ""


def _file(checkpoint: Path, step: int, dp_rank: int) -> Path:
    return checkpoint / f"rollouts_{step:06d}_{dp_rank:05d}.safetensors"


def _use(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
