"""The checkpoint of a stopped warm-up, on two ranks: when it is damaged, one error says so; whole, it goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_dppo.errors import CheckpointError
from megatron_dppo.run.session import warmup_from_config
from tests.distributed.parity import Case, config_for, samples
from tests.distributed.spawn import run_distributed
from tests.distributed.test_checkpoints import damages, make_trainer, put

pytestmark = pytest.mark.distributed

STEPS = 4


class StopAfter:
    """A signal that comes in the given step of the warm-up."""

    def __init__(self, steps: int) -> None:
        self.left, self.name, self.deferring = steps, "SIGTERM", False

    def requested(self) -> bool:
        self.left -= 1
        return self.left == 0


def warm_up(trainer: Any, folder: Path, stop_after: int) -> list[int]:
    """The steps that it did, until the signal or its end."""
    from megatron_dppo.run.stop_signal import Stopped
    from megatron_dppo.run.warmup import run_warmup

    config = config_for(Case(), warmup={"num_steps": STEPS, "batch_size": 4})
    done: list[int] = []
    stop: Any = StopAfter(stop_after)
    try:
        run_warmup(
            trainer,
            samples(),  # type: ignore[arg-type]
            warmup_from_config(config),
            checkpoints=folder / "checkpoints",
            resume=config.checkpoint,
            report=lambda step, loss: done.append(step),
            stop=stop,
        )
    except Stopped:
        assert len(done) == stop_after
    return done


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.export_weights()}


def all_checks(rank: int, world_size: int, path: str) -> None:
    trainer, folder = make_trainer(), Path(path)
    assert warm_up(trainer, folder, 2) == [0, 1]
    checkpoint = folder / "checkpoints/warmup/step_000002"
    for name in sorted(file.name for file in checkpoint.iterdir()):
        file, before = checkpoint / name, weights(trainer)
        whole = file.read_bytes()
        for what, data in damages(file):
            put(file, data)
            with pytest.raises(CheckpointError) as raised:
                warm_up(trainer, folder, STEPS)
            message = str(raised.value)
            assert f"{checkpoint}, the checkpoint of an interrupted warm-up, is damaged: " in message, (name, what)
            assert name in message and f"delete {checkpoint.parent}" in message and "\n" not in message, message
            put(file, whole)
        assert all(torch.equal(before[n], tensor) for n, tensor in weights(trainer).items()), "nothing was loaded"
    if rank == 0:
        partial = checkpoint.with_name("step_000003.partial")
        partial.mkdir()
        (partial / "state.json").write_text("{}")  # a save that a kill has cut off: it does not count
    dist.barrier()
    assert warm_up(trainer, folder, STEPS + 1) == [2, 3], "it goes on where it was stopped"


def test_a_damaged_checkpoint_of_the_warm_up_is_one_error_and_a_whole_one_goes_on(tmp_path: Path) -> None:
    run_distributed(all_checks, 2, str(tmp_path), timeout=480)
