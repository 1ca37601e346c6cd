"""The optimizer's state on the host: the same bits as without offloading, before and after a resume, either way, and
also when all that is left on the device is lent to servers before each update."""

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
from tests.distributed.parity import LOSS, Case, HFSide, build_trainer, config_for, samples
from tests.distributed.spawn import run_distributed
from tests.distributed.test_device_state import lend_device

pytestmark = pytest.mark.distributed

CASE = Case({"expert_model_parallel_size": 2}, family="qwen3_next")
"""A model with weights in fp32 (``A_log``) and bf16."""
HOST = {"use_precision_aware_optimizer": True, "optimizer_cpu_offload": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "host": HOST,
    "half": HOST | {"optimizer_offload_fraction": 0.5, "overlap_cpu_optimizer_d2h_h2d": True},
}
ROUNDED = SETTINGS["half"] | {"grad_reduce_in_fp32": False}
"""The part on the device makes fp32 copies of its bf16 gradients; without offloading they are clipped otherwise."""
CONTINUED = [("plain", "half"), ("half", "host"), ("host", "plain")]


def state_of(trainer: Any) -> dict[tuple[str, str], Tensor]:
    """Fp32 copy, moments and number of updates of this rank's part of each parameter, and the weights."""
    parts = trainer.optimizer.megatron.chained_optimizers
    actual = {}
    for name, parameter in trainer.models[0].named_parameters():
        assert parameter.dtype == (torch.float32 if name.endswith("A_log") else torch.bfloat16)
        actual[name, "weight"] = parameter.detach().clone()
        for part in parts:
            if parameter in part.model_param_gbuf_map:
                kept = part._get_main_param_and_optimizer_states(parameter)
                actual |= {(name, key): kept[key].detach().clone() for key in ("param", "exp_avg", "exp_avg_sq")}
    return actual


def update(trainer: Any, steps: range, *, lends: bool = False) -> tuple[list[Any], dict[tuple[str, str], Tensor]]:
    """Metrics and gradient norms, and the state after the updates."""
    local_samples = samples()[trainer.dp_rank :: trainer.layout.dp]
    batches = Updater(trainer, config_for(CASE).train, LOSS).pack_batches(local_samples)
    numbers = []
    for step in steps:
        if lends:
            lend_device(trainer, batches)
        trainer.optimizer.set_step(step)
        result = trainer.update(batches, policy_objective(LOSS))
        assert not result.skipped
        numbers.append((result.metrics, result.grad_norm))
    return numbers, state_of(trainer)


def compare(trained: Any, reference: Any, what: str) -> None:
    (numbers, actual), (expected_numbers, expected) = trained, reference
    assert numbers == expected_numbers, what
    assert actual.keys() == expected.keys() and len(actual) > 100
    for key, tensor in actual.items():
        assert torch.equal(tensor, expected[key]), f"{what}: {key} differs"


def check_output_dir(trainer: Any, name: str) -> None:
    """Return the number of optimizers that Megatron made for host and GPU of the two parts of the state."""
    for part in trainer.optimizer.megatron.chained_optimizers:
        hosts, device = getattr(part.optimizer, "cpu_optimizers", []), getattr(part.optimizer, "gpu_optimizer", None)
        parameters = sum(len(group["params"]) for group in part.optimizer.param_groups)
        if name == "half":
            offloaded = sum(p.numel() for one in hosts for group in one.param_groups for p in group["params"])
            total = sum(p.numel() for group in part.optimizer.param_groups for p in group["params"])
            assert 1 < len(hosts) < parameters and device is not None and 0.5 * total <= offloaded < 0.9 * total
        else:
            assert len(hosts) == (name == "host") and device is None


def offload(rank: int, world_size: int, path: str) -> None:
    from megatron_dppo.mcore.shims import apply_shims

    here = Platform.detect(force_cpu=True)
    apply_shims(here)
    from megatron.core import parallel_state

    from megatron_dppo.mcore.checkpoint.folder import checkpoints

    def build(settings: dict[str, Any]) -> Any:
        return build_trainer(CASE, HFSide(CASE).model, here, "bf16", optimizer=settings)

    def leave() -> None:
        dist.barrier()
        parallel_state.destroy_model_parallel()

    expected: Any = None
    for name, settings in SETTINGS.items():
        trainer = build(settings)
        check_output_dir(trainer, name)
        update(trainer, range(2))
        trainer.save(Path(path) / name, 2, {}, keep=1)
        actual = update(trainer, range(2, 4), lends=name != "plain")
        expected = expected or actual
        compare(actual, expected, name)
        leave()
    for source, name in CONTINUED:
        trainer = build(SETTINGS[name])
        trainer.load(checkpoints(Path(path) / source)[0])
        compare(update(trainer, range(2, 4), lends=True), expected, f"{source} continued by {name}")
        leave()
    rounded = []
    for lends in (False, True):
        rounded.append(update(build(ROUNDED), range(2), lends=lends))
        leave()
    compare(rounded[1], rounded[0], "bf16 gradients")


def test_state_on_the_host_is_that_of_the_device_and_each_continues_the_other_also_with_colocated_servers(
    tmp_path: Path,
) -> None:
    run_distributed(offload, 2, str(tmp_path))
