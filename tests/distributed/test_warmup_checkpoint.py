"""The checkpoint of a stopped warm-up, on two ranks: when it is damaged, one error says so; whole, it goes on.

Its weights are then those of transformers in float64 after the same supervised updates.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_dppo.errors import CheckpointError
from megatron_dppo.hf.folder import stream_model
from megatron_dppo.parallel.platform import Platform
from megatron_dppo.run.policy_setup import warmup_from_config
from tests.distributed.parity import (
    TOLERANCE,
    Case,
    HFSide,
    build_trainer,
    config_for,
    on_cpu,
    samples,
    use_small_chunks,
    worst,
)
from tests.distributed.spawn import run_distributed
from tests.distributed.test_checkpoints import damages, put

pytestmark = pytest.mark.distributed

STEPS, BATCH = 4, 4
CASE = Case({"expert_model_parallel_size": 2}, family="qwen3_next")


class StopAfter:
    """A signal that comes in the given step of the warm-up."""

    def __init__(self, steps: int) -> None:
        self.left, self.name, self.deferring = steps, "SIGTERM", False

    def requested(self) -> bool:
        self.left -= 1
        return self.left == 0


def warm_up(trainer: Any, folder: Path, stop_after: int) -> list[int]:
    """The steps that it did, until the signal or its end."""
    from megatron_dppo.process.stop_signal import Stopped
    from megatron_dppo.run.warmup import run_warmup

    config = config_for(Case(), warmup={"num_steps": STEPS, "batch_size": BATCH})
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


def expected_weights() -> dict[str, torch.Tensor]:
    """The weights after the warm-up: each update has the mean over all tokens of the responses of its batch."""
    hf = HFSide(CASE)
    for step in range(STEPS):
        batch = hf.samples[step * BATCH : (step + 1) * BATCH]
        hf.optimizer.zero_grad()
        (-torch.cat([hf.logprobs(sample)[sample.loss_mask] for sample in batch]).mean()).backward()
        hf.step()
    return dict(stream_model(hf.model))


def all_checks(rank: int, world_size: int, path: str) -> None:
    from megatron_dppo.mcore.shims import apply_shims

    platform = Platform.detect(force_cpu=True)
    apply_shims(platform)
    use_small_chunks()
    trainer, folder = build_trainer(CASE, HFSide(CASE).model, platform, "fp32"), Path(path)
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
    error = worst(on_cpu(trainer.export_weights()), expected_weights())
    assert error < TOLERANCE, f"weights off by {error:.1e}"


def test_a_damaged_checkpoint_of_the_warm_up_is_one_error_and_a_whole_one_goes_on(tmp_path: Path) -> None:
    run_distributed(all_checks, 2, str(tmp_path), timeout=480)
