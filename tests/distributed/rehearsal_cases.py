"""One update of a tiny model, by real processes and rehearsed, under the same meter."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_dppo.config.layout import Layout, resolve_layout
from megatron_dppo.config.schema import Config
from megatron_dppo.hf.folder import DictWeights, model_shape, stream_model
from megatron_dppo_plan.child import RehearsalRequest
from megatron_dppo_plan.machine import MACHINES
from megatron_dppo_plan.rehearse import RankRole
from tests.distributed.parity import Case, config_for, hf_config, hf_reference
from tests.distributed.spawn import run_distributed

MICRO_BATCHES = 2


def inputs(case: Case, world_size: int, dtype: str = "fp32") -> tuple[Config, Any, Layout]:
    """Return the inputs of a rehearsal. Replayed routes make the experts equally busy, as a rehearsal assumes. They
    have weights where layers are recomputed."""
    with_weights = bool(case.transformer)
    model = hf_config(case.tied, case.dense, case.shared, case.dense_layers, case.family)
    has_experts = model_shape(model).num_experts is not None
    replay = {"train": {"router_replay": "rollout", "router_replay_weights": with_weights}} if has_experts else {}
    # The longest sample fills a row.
    data = {"max_prompt_tokens": case.micro_batch_tokens - 8}
    config = config_for(case, dtype, data=data, **replay)
    split = config.model.transformer
    return config, model, resolve_layout(config.parallel, config.batch, world_size, model_shape(model), split)


def real(case: Case, world_size: int, folder: Path, dtype: str = "fp32") -> list[Any]:
    """The ``UpdateMeasurement`` of every rank of a real run."""
    run_distributed(_real_rank, world_size, case, dtype, str(folder))
    return [pickle.loads((folder / f"real{rank}").read_bytes()) for rank in range(world_size)]


def _real_rank(rank: int, world_size: int, case: Case, dtype: str, folder: str) -> None:
    from megatron_dppo.mcore.shims import apply_shims
    from megatron_dppo.parallel.platform import Platform

    platform = Platform.detect(force_cpu=True)
    apply_shims(platform)
    loaded = dict(stream_model(hf_reference(case.tied, case.dense, case.shared, case.dense_layers, case.family)))
    measured = update(*inputs(case, world_size, dtype), loaded, platform)
    (Path(folder) / f"real{rank}").write_bytes(pickle.dumps(measured))
    dist.barrier()


def update(config: Config, model: Any, layout: Layout, loaded: dict[str, torch.Tensor], platform: Any) -> Any:
    """The ``UpdateMeasurement`` of the first update of this rank, with these weights; in a process group."""
    from megatron_dppo.losses import policy_objective
    from megatron_dppo_plan.measure import measure_update, trainer_builder
    from megatron_dppo_plan.meter import Meter
    from megatron_dppo_plan.models import sample_rows

    class Copies(DictWeights):
        """Tensors that are gone once they are read, as those of a file."""

        def __getitem__(self, name: str) -> torch.Tensor:
            return super().__getitem__(name).clone()

    build = trainer_builder(config, model, layout, platform, Copies(loaded.items()))
    batches = sample_rows(config, model, layout, MICRO_BATCHES)
    return measure_update(build, batches, policy_objective(config.loss), Meter())


def rehearsal_request(case: Case, world_size: int, rank: int, dtype: str = "fp32") -> RehearsalRequest:
    """One rank of a case, rehearsed as on the CPU."""
    config, model, layout = inputs(case, world_size, dtype)
    role = RankRole(rank=rank, micro_batches=MICRO_BATCHES, as_gpu=False)
    return RehearsalRequest(config=config, hf_config=model, layout=layout, role=role, machine=MACHINES["h100"])
