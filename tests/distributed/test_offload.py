"""The optimizer's state on the host: the same bits as without offloading, before and after a resume, either way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.losses import policy_objective
from megatron_dppo.platform import Platform
from megatron_dppo.policy.update import Updater
from tests.distributed.parity import LOSS, Case, HFSide, build_trainer, config_for, samples
from tests.distributed.spawn import run_distributed

pytestmark = pytest.mark.distributed

CASE = Case({"expert_model_parallel_size": 2})
HOST = {"use_precision_aware_optimizer": True, "optimizer_cpu_offload": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "host": HOST,
    "half": HOST | {"optimizer_offload_fraction": 0.5, "overlap_cpu_optimizer_d2h_h2d": True},
}
CONTINUED = [("plain", "half"), ("half", "host"), ("host", "plain")]


def state_of(trainer: Any) -> dict[tuple[str, str], Tensor]:
    """Fp32 copy, moments and number of updates of this rank's part of each parameter, and the weights."""
    parts = trainer.optimizer.megatron.chained_optimizers
    found = {}
    for name, parameter in trainer.models[0].named_parameters():
        found[name, "weight"] = parameter.detach().clone()
        for part in parts:
            if parameter in part.model_param_gbuf_map:
                kept = part._get_main_param_and_optimizer_states(parameter)
                found |= {(name, key): kept[key].detach().clone() for key in ("param", "exp_avg", "exp_avg_sq")}
    return found


def update(trainer: Any, steps: range) -> dict[tuple[str, str], Tensor]:
    mine = samples()[trainer.dp_rank :: trainer.layout.dp]
    batches = Updater(trainer, config_for(CASE).train, LOSS).plan(mine)
    for step in steps:
        trainer.optimizer.set_step(step)
        assert not trainer.update(batches, policy_objective(LOSS)).skipped
    return state_of(trainer)


def compare(found: dict[tuple[str, str], Tensor], expected: dict[tuple[str, str], Tensor], what: str) -> None:
    assert found.keys() == expected.keys() and len(found) > 100
    for key, tensor in found.items():
        assert torch.equal(tensor, expected[key]), f"{what}: {key} differs"


def check_place(trainer: Any, name: str) -> None:
    """How many optimizers Megatron has made for host and GPU of the two parts of the state."""
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
    from megatron_dppo.mcore.compat import apply_shims

    here = Platform.detect(force_cpu=True)
    apply_shims(here)
    from megatron.core import parallel_state

    from megatron_dppo.mcore.checkpoint import checkpoints

    def build(name: str) -> Any:
        return build_trainer(CASE, HFSide(CASE).model, here, "bf16", optimizer=SETTINGS[name])

    def leave() -> None:
        dist.barrier()
        parallel_state.destroy_model_parallel()

    expected: dict[tuple[str, str], Tensor] = {}
    for name in SETTINGS:
        trainer = build(name)
        check_place(trainer, name)
        update(trainer, range(2))
        trainer.save(Path(path) / name, 2, {}, keep=1)
        found = update(trainer, range(2, 4))
        expected = expected or found
        compare(found, expected, name)
        leave()
    for source, name in CONTINUED:
        trainer = build(name)
        trainer.load(checkpoints(Path(path) / source)[0])
        compare(update(trainer, range(2, 4)), expected, f"{source} continued by {name}")
        leave()


def test_state_on_the_host_is_that_of_the_device_and_each_continues_the_other(tmp_path: Path) -> None:
    run_distributed(offload, 2, str(tmp_path))
