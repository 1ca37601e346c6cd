"""A checkpoint that is written while the model goes on is that of the moment it was asked for."""

from __future__ import annotations

import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_dppo.errors import DiskError
from megatron_dppo.parallel.objects import all_gather_objects
from megatron_dppo.parallel.platform import Platform
from tests.distributed.parity import Case, HFSide, build_trainer
from tests.distributed.spawn import run_distributed

pytestmark = pytest.mark.distributed


def state_of(trainer: Any) -> list[torch.Tensor]:
    from megatron_dppo.mcore.optim import optimizer_tensors

    weights = [p for model in trainer.models for p in model.parameters()]
    return [*weights, *optimizer_tensors(trainer.optimizer)]


def spoil(trainer: Any) -> None:
    for tensor in state_of(trainer):
        tensor.data.fill_(torch.nan)


def save_and_go_on(rank: int, world_size: int, path: str) -> None:
    from megatron_dppo.mcore.shims import apply_shims

    here = Platform.detect(force_cpu=True)
    apply_shims(here)
    from megatron_dppo.mcore.checkpoint.manifest import read_manifest
    from megatron_dppo.mcore.setup import new_background_group

    trainer = build_trainer(Case({}), HFSide(Case()).model, here, "bf16")
    world, folder = trainer.groups.world, Path(path)
    assert world is not None
    group = new_background_group(world)
    generator = torch.Generator().manual_seed(rank)
    for tensor in state_of(trainer)[len(list(trainer.models[0].parameters())) :]:
        tensor.data.copy_(torch.rand(tensor.shape, generator=generator))
    before = [tensor.detach().clone() for tensor in state_of(trainer)]

    trainer.save(folder, 1, {}, keep=9)
    # The same step elsewhere: a checkpoint has its number.
    written = read_manifest(trainer.save(folder.with_name("undisturbed"), 2, {}, keep=9).path)
    saving = trainer.save(folder, 2, {}, keep=9, background_group=group)
    spoil(trainer)
    for _ in range(50):  # collectives of training, beside those of the save
        dist.all_reduce(torch.ones(1000))
        all_gather_objects(rank, world)
    assert read_manifest(saving.wait()) == written, "not the files of a save that nothing disturbs"
    trainer.load(saving.path)
    for result, expected in zip(state_of(trainer), before, strict=True):
        assert torch.equal(result, expected)

    # A disk that fails while the model trains is told when one asks, and costs no older checkpoint.
    saving = trainer.save(folder, 3, {}, keep=9, background_group=group)
    saving.wait()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    saving = trainer.save(folder, 4, {}, keep=1, background_group=group)
    with pytest.raises(DiskError, match="checkpoint of step 4"):
        saving.wait()
    assert saving.is_done
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [p.name for p in sorted(folder.iterdir())] == [
        "step_000001",
        "step_000002",
        "step_000003",
        "step_000004.partial",
    ]
    assert trainer.save(folder, 4, {}, keep=1, background_group=group).wait().name == "step_000004"
    dist.barrier()
    assert [p.name for p in folder.iterdir()] == ["step_000004"]


def test_a_save_in_the_background_is_of_the_moment_it_began_and_tells_when_it_fails(tmp_path: Path) -> None:
    run_distributed(save_and_go_on, 2, str(tmp_path))
