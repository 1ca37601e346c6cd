"""The optimizer's state in boxes: every range of every shape, and Megatron's own format reads and is read."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_dppo.parallel.platform import Platform
from tests.distributed.parity import Case, HFSide, build_trainer
from tests.distributed.spawn import run_distributed

pytestmark = pytest.mark.distributed

LAYOUTS: list[dict[str, Any]] = [
    {"expert_model_parallel_size": 2},  # dense weights on four ranks, experts on two
    {"tensor_model_parallel_size": 2},  # a vocabulary of 117 is padded
]
PIPELINE: list[dict[str, Any]] = [{"pipeline_model_parallel_size": 2}]
"""Other layers on each rank, in the same boxes."""
SHAPES = [(), (1,), (7,), (3, 4), (1, 5), (5, 1), (2, 3, 4), (3, 1, 2), (2, 2, 2, 2)]


def test_the_boxes_of_a_range_are_its_elements_in_their_order() -> None:
    from megatron_dppo.mcore.optimizer_shards import split_range

    for shape in SHAPES:
        values = torch.arange(prod(shape)).view(shape)
        for start in range(values.numel() + 1):
            for stop in range(start, values.numel() + 1):
                result = []
                for offset, size in split_range(shape, start, stop):
                    assert len(offset) == len(size) == len(shape)
                    result += (
                        values[tuple(slice(i, i + n) for i, n in zip(offset, size, strict=True))].flatten().tolist()
                    )
                assert result == list(range(start, stop)), (shape, start, stop)


def test_a_large_range_is_a_few_boxes_however_many_rows_it_has() -> None:
    from megatron_dppo.mcore.optimizer_shards import split_range

    assert len(list(split_range((151936, 2048), 12345, 311_000_000))) == 3
    assert len(list(split_range((128, 768, 2048), 2048 * 769 + 5, 2048 * 768 * 127 + 2049))) == 5


def parts(trainer: Any) -> list[Any]:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    result = [p for p in trainer.optimizer.megatron.chained_optimizers if isinstance(p, DistributedOptimizer)]
    assert result, "the case needs a distributed optimizer"
    return result


def fill(trainer: Any, seed: int) -> list[torch.Tensor]:
    """Other values on each rank and in each tensor; a copy of them."""
    from megatron_dppo.mcore.optim import optimizer_tensors

    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    tensors = list(optimizer_tensors(trainer.optimizer))
    for tensor in tensors:
        tensor.data.copy_(torch.rand(tensor.shape, generator=generator))
    return [tensor.detach().clone() for tensor in tensors]


def states(trainer: Any) -> list[torch.Tensor]:
    from megatron_dppo.mcore.optim import optimizer_tensors

    return list(optimizer_tensors(trainer.optimizer))


def own_format(trainer: Any) -> None:
    """Megatron's own gathering instead of boxes."""
    for part in parts(trainer):
        del part.sharded_param_state_fully_reshardable, part.load_parameter_state_from_fully_reshardable


def boxes_and_own_format(rank: int, world_size: int, layouts: list[dict[str, Any]], path: str) -> None:
    from megatron_dppo.mcore.shims import apply_shims

    here = Platform.detect(force_cpu=True)
    apply_shims(here)
    from megatron.core import parallel_state

    from megatron_dppo.mcore.optimizer_shards import use_box_sharding

    for i, layout in enumerate(layouts):
        trainer = build_trainer(Case(layout), HFSide(Case(layout)).model, here, "bf16")
        folder = Path(path) / str(i)
        seeded = fill(trainer, 1)
        checkpoint = trainer.save(folder, 1, {}, keep=9).path
        sizes = [file.stat().st_size for file in checkpoint.glob("__*.distcp")]
        assert len(sizes) == world_size and max(sizes) < 1.5 * min(sizes), f"{layout}: not all ranks write: {sizes}"
        fill(trainer, 2)
        trainer.load(checkpoint)
        if dist.get_rank(trainer.groups.tp) == 0:  # norms and routers of the others were not written: here they differ
            compare(states(trainer), seeded, f"{layout}: saved and loaded")
        expected = [tensor.detach().clone() for tensor in states(trainer)]
        own_format(trainer)
        fill(trainer, 2)
        trainer.load(checkpoint)
        compare(states(trainer), expected, f"{layout}: boxes read by Megatron")
        gathered = trainer.save(folder, 2, {}, keep=9).path
        for part in parts(trainer):
            use_box_sharding(part)
        fill(trainer, 3)
        trainer.load(gathered)
        compare(states(trainer), expected, f"{layout}: Megatron's read in boxes")
        dist.barrier()
        parallel_state.destroy_model_parallel()


def compare(result: list[torch.Tensor], expected: list[torch.Tensor], what: str) -> None:
    for i, (a, b) in enumerate(zip(result, expected, strict=True)):
        assert torch.equal(a, b), f"{what}: state {i} of {len(expected)} differs"


@pytest.mark.parametrize("layouts", [LAYOUTS, pytest.param(PIPELINE, marks=pytest.mark.long)], ids=["", "pipeline"])
def test_boxes_are_megatrons_own_format_and_all_ranks_write(layouts: list[dict[str, Any]], tmp_path: Path) -> None:
    run_distributed(boxes_and_own_format, 4, layouts, str(tmp_path))
