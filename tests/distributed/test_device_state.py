"""A training whose state leaves the device between updates is, bit for bit, the training in which it stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.losses import policy_objective
from megatron_dppo.parallel.platform import Platform
from megatron_dppo.policy.update import Updater
from tests.distributed.parity import LOSS, STEPS, Case, HFSide, build_trainer, config_for, samples
from tests.distributed.spawn import run_distributed

pytestmark = pytest.mark.distributed

OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("bf16", {"expert_model_parallel_size": 2, **OVERLAP}, {}),
    ("fp32", {}, {}),  # the optimizer's parameters are views of the model's
    ("bf16", {"use_distributed_optimizer": False}, {"grad_reduce_in_fp32": False}),
]


def state_of(trainer: Any) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Weights, gradients and optimizer state."""
    from megatron_dppo.mcore.optim import optimizer_tensors

    weights = [p for model in trainer.models for p in model.parameters()]
    return weights, [p.main_grad for p in weights], list(optimizer_tensors(trainer.optimizer))


def held(tensors: list[Tensor]) -> int:
    """Bytes of their storages."""
    return sum({id(s): s.nbytes() for s in (tensor.untyped_storage() for tensor in tensors)}.values())


def lend_device(trainer: Any, batches: Any) -> dict[str, Tensor]:
    """Everything leaves and comes back, as in a step with colocated servers; the weights that were exported."""
    from megatron_dppo.mcore.offload import gpu_tensors

    trainer.optimizer.finish_overlapped_gather()
    readings, _ = trainer.token_logprobs(batches, None)
    weights, gradients, optimizer = state_of(trainer)
    shared = {id(tensor.untyped_storage()) for tensor in weights}
    own = [tensor for tensor in optimizer if id(tensor.untyped_storage()) not in shared]
    before = [tensor.detach().clone() for tensor in (*weights, *optimizer)]
    pointers = [tensor.storage_offset() for tensor in (*weights, *gradients, *optimizer)]
    trainer.device_state.offload(weights=False)
    assert held(gradients) == held(own) == 0 < held(weights)
    exported = {name: tensor.clone() for name, tensor in trainer.export_weights()}
    for result, expected in zip(trainer.token_logprobs(batches, None)[0], readings, strict=True):  # as the probe does
        assert torch.equal(result.logprobs, expected.logprobs)
    trainer.device_state.offload(weights=True)
    parts = [part.optimizer for part in trainer.optimizer.megatron.chained_optimizers]
    of_offloaded = [tensor for part in parts for tensor in gpu_tensors(part)]
    assert held(weights) == held(optimizer) == held(of_offloaded) == 0
    trainer.device_state.restore()
    after = state_of(trainer)
    for result, expected in zip((*after[0], *after[2]), before, strict=True):
        assert torch.equal(result, expected)
    assert [tensor.storage_offset() for part in after for tensor in part] == pointers
    assert not any(tensor.any() for tensor in after[1])
    return exported


def train(trainer: Any, dtype: str, folder: Path | None) -> list[Any]:
    """Numbers of every update; with a folder the state leaves before each, and goes through a checkpoint after one."""
    local_samples = samples()[trainer.dp_rank :: trainer.layout.dp]
    batches = Updater(trainer, config_for(Case(), dtype).train, LOSS).pack_batches(local_samples)
    numbers: list[Any] = []
    for step in range(STEPS):
        if folder is not None:
            exported = lend_device(trainer, batches)
        else:
            exported = {name: tensor.clone() for name, tensor in trainer.export_weights()}
        trainer.optimizer.set_step(step)
        metrics = trainer.accumulate(batches, policy_objective(LOSS))
        numbers.append((exported, metrics, trainer.apply(metrics).grad_norm))
        if folder is not None and step == 1:
            path = trainer.save(folder, step, {}, keep=1).path
            trainer.update(batches, policy_objective(LOSS))  # to be undone
            lend_device(trainer, batches)
            trainer.load(path)
    trainer.optimizer.finish_overlapped_gather()
    return [*numbers, [tensor.detach().clone() for part in state_of(trainer)[::2] for tensor in part]]


def compare(result: Any, expected: Any, what: str) -> None:
    if isinstance(result, Tensor):
        assert torch.equal(result, expected), what
    elif isinstance(result, dict):
        assert result.keys() == expected.keys()
        for name in result:
            compare(result[name], expected[name], f"{what}, {name}")
    elif isinstance(result, list | tuple):
        assert len(result) == len(expected)
        for i, pair in enumerate(zip(result, expected, strict=True)):
            compare(*pair, f"{what}, {i}")
    else:
        assert result == expected, f"{what}: {result} != {expected}"


def with_and_without(rank: int, world_size: int, path: str) -> None:
    from megatron_dppo.mcore.shims import apply_shims

    here = Platform.detect(force_cpu=True)
    apply_shims(here)
    from megatron.core import parallel_state

    from megatron_dppo.mcore import host_memory as device_state

    device_state.BUFFER_BYTES = 10_000  # several pieces for most storages
    for i, (dtype, parallel, optimizer) in enumerate(CASES):
        results = []
        for folder in (None, Path(path) / str(i)):
            case = Case(parallel)
            trainer = build_trainer(case, HFSide(case).model, here, dtype, optimizer=optimizer)
            results.append(train(trainer, dtype, folder))
            dist.barrier()
            parallel_state.destroy_model_parallel()
        compare(results[1], results[0], f"{dtype} {parallel} {optimizer}")
        assert not torch.equal(
            results[0][-1][0], results[0][0][0]["model.embed_tokens.weight"][: len(results[0][-1][0])]
        )


def test_state_that_leaves_the_device_changes_no_number(tmp_path: Path) -> None:
    run_distributed(with_and_without, 2, str(tmp_path))
