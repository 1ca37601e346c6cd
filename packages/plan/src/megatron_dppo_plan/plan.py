"""Plan of a run: a rehearsal of every kind of rank, and estimates from its measurements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from megatron_dppo.config.layout import Layout, ModelShape, layer_split, resolve_layout
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import ConfigError
from megatron_dppo.hf.folder import model_shape
from megatron_dppo.setup.local_engine_memory import LocalEngineMemory
from megatron_dppo_plan.arithmetic import (
    BatchPlan,
    KvCachePlan,
    TokenBytes,
    TransferPlan,
    gradient_bytes,
    plan_batch,
    plan_kv_cache,
    plan_token_bytes,
    plan_transfers,
    server_memory_bytes,
)
from megatron_dppo_plan.child import RehearsalRequest
from megatron_dppo_plan.machine import GpuNode
from megatron_dppo_plan.measurement import UpdateMeasurement
from megatron_dppo_plan.models import count_adapter_parameters, count_parameters, load_model_config
from megatron_dppo_plan.rehearsal_pool import RehearsalPool
from megatron_dppo_plan.rehearse import RankRole, rank_roles
from megatron_dppo_plan.step_time import StepPlan, plan_step, served_model
from megatron_dppo_plan.teacher import PlannedTeacher

TIGHT = 0.1
"""Fraction of the memory that allocator and kernels may need beyond the plan."""


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """Sizes of the model to train."""

    hf_config: Any
    shape: ModelShape
    parameters: int
    expert_parameters: int
    """Parameters of routed experts."""
    trained: tuple[int, int]
    """Parameters with gradients (all, or the adapters'), and how many of these are in routed experts."""
    note: str | None
    """Source of the sizes if it is not the folder. None otherwise."""
    teacher: PlannedTeacher | None = None

    @classmethod
    def from_config(cls, config: Config) -> PlannedModel:
        """Return the sizes of ``model.path`` and of the teacher."""
        if config.model.provider != "builtin":
            raise ConfigError(
                f"plan rehearses the layers of the families of docs/models.md, and cannot with model.provider = "
                f"{config.model.provider!r}. Fix: --model.provider builtin, if it has the model's family"
            )
        hf_config, note = load_model_config(config.model.path)
        shape = model_shape(hf_config)
        parameters, experts = count_parameters(hf_config)
        trained = count_adapter_parameters(hf_config, config.lora) if config.lora.rank else (parameters, experts)
        return cls(
            hf_config=hf_config,
            shape=shape,
            parameters=parameters,
            expert_parameters=experts,
            trained=trained,
            note=note,
            teacher=PlannedTeacher.from_config(config),
        )


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """Estimate of one kind of rank."""

    role: RankRole
    measured: UpdateMeasurement
    total: int
    """Peak bytes, with memory outside torch, of the local engine and of colocated servers."""
    between_updates: int
    """Bytes of the trainer between updates: with buckets of the weight sync, or a teacher that scores responses."""
    sampling: int | None
    """Bytes while colocated servers sample. None if servers have separate GPUs."""
    update_seconds: float
    """Time of one optimizer update with all micro-batches."""
    communication_seconds: float
    """Time of its collectives, without overlap."""
    host_seconds: float
    """Time of an offloaded optimizer, on the host and on the link to it."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run on ``world_size`` trainer GPUs."""

    config: Config
    layout: Layout
    machine: GpuNode
    model: PlannedModel
    batch: BatchPlan
    ranks: dict[str, RankPlan]
    kv_cache: KvCachePlan
    token_bytes: TokenBytes
    local_engine: LocalEngineMemory
    transfers: TransferPlan
    step: StepPlan

    @property
    def oversized_ranks(self) -> list[str]:
        """Rank kinds that do not fit."""
        return [name for name, rank in self.ranks.items() if rank.total > self.machine.memory]

    @property
    def free_bytes(self) -> int:
        """Free bytes on the fullest kind of rank. Negative if it does not fit."""
        return self.machine.memory - max(rank.total for rank in self.ranks.values())

    @property
    def fits(self) -> bool:
        """True if the run fits the memory of GPUs and hosts."""
        return not self.oversized_ranks and self.fits_host

    @property
    def fits_host(self) -> bool:
        """True if a node's host memory suffices for the run."""
        return self.step.fits_host(self.machine)

    @property
    def is_tight(self) -> bool:
        """True if the run fits, but with less free memory than allocator and kernels may need."""
        return 0 <= self.free_bytes < TIGHT * self.machine.memory


def make_plan(
    config: Config,
    world_size: int,
    machine: GpuNode,
    rehearsals: RehearsalPool,
    *,
    model: PlannedModel | None = None,
    kinds: Sequence[str] | None = None,
    few_layers: bool = False,
    servers: int | None = None,
    mean_response: int | None = None,
) -> Plan:
    """Plan a run by a rehearsal of its ranks.

    ``kinds`` None plans all kinds of ranks that the layout has. ``few_layers`` is ignored for layers that are split
    unevenly. A ``RehearsalTimeout`` ends it at the time limit of ``rehearsals``.
    """
    model = model or PlannedModel.from_config(config)
    layout = resolve_layout(config.parallel, config.batch, world_size, model.shape, config.model.transformer)
    batch = plan_batch(config, layout, mean_response)
    transfers = plan_transfers(config, model.parameters, model.trained, layout, machine)
    local_engine = LocalEngineMemory.from_config(config.rollout, config.data, model.hf_config, model.parameters, layout)
    teacher = model.teacher.hf_config if model.teacher is not None and config.distillation.is_exact else None
    chosen = rank_roles(
        layout,
        model.shape.num_experts is not None,
        None if kinds is None else list(kinds),
        table=cast("str | list[list[str]] | None", config.model.transformer.get("pipeline_model_parallel_layout")),
    )
    rehearsed = _with_alltoall(config)
    measurements = rehearsals.run(
        [
            RehearsalRequest(
                config=rehearsed, hf_config=model.hf_config, layout=layout, machine=machine, role=role, teacher=teacher
            )
            for role in chosen.values()
        ],
        few_layers=few_layers and not layer_split(config.model.transformer),
    )
    ranks = {
        name: _rank_plan(config, role, measured, batch, layout, machine, transfers, model, local_engine)
        for (name, role), measured in zip(chosen.items(), measurements, strict=True)
    }
    kv_cache = plan_kv_cache(config, model.hf_config, model.parameters, machine)
    token_bytes = plan_token_bytes(config, model.hf_config, layout, batch)
    # In host memory: a rank's optimizer, and the state that leaves the GPU while colocated servers sample.
    moved = ("weights", "optimizer") if config.rollout.servers.colocated else ()
    measured_ranks = [rank.measured for rank in ranks.values()]
    step = plan_step(
        config,
        layout,
        machine,
        batch,
        kv_cache,
        token_bytes,
        transfers,
        served_model(model.hf_config, model.parameters, model.expert_parameters, kv_cache),
        updates=batch.updates * max(rank.update_seconds for rank in ranks.values()),
        host_per_rank=max(each.host + sum(each.static[name] for name in moved) for each in measured_ranks),
        shape=model.shape,
        servers=servers,
    )
    return Plan(
        config=config,
        layout=layout,
        machine=machine,
        model=model,
        batch=batch,
        ranks=ranks,
        kv_cache=kv_cache,
        token_bytes=token_bytes,
        local_engine=local_engine,
        transfers=transfers,
        step=step,
    )


_FLEX_FIELDS = ("moe_flex_", "moe_enable_deepep", "moe_deepep_", "moe_hybridep_")
"""Prefixes of ``model.transformer`` fields that only the flex dispatcher reads."""


def _with_alltoall(config: Config) -> Config:
    """Return the configuration with the alltoall dispatcher for flex, whose kernels need a GPU.

    Both keep the same tensors: a token is copied for each of its experts after it has arrived.
    """
    if config.model.transformer.get("moe_token_dispatcher_type") != "flex":
        return config
    fields = {key: value for key, value in config.model.transformer.items() if not key.startswith(_FLEX_FIELDS)}
    fields["moe_token_dispatcher_type"] = "alltoall"
    return config.model_copy(update={"model": config.model.model_copy(update={"transformer": fields})})


def dispatch_ratio(config: Config, hf_config: Any, layout: Layout) -> float:
    """Return the bytes of the dispatcher's all-to-alls over those of ``alltoall``.

    DeepEP sends a token once to each rank that has some of its k experts; alltoall sends it k times. The expectation is
    that of k experts without preference.
    """
    if config.model.transformer.get("moe_token_dispatcher_type") != "flex":
        return 1.0
    experts = model_shape(hf_config).num_experts or 1
    topk = hf_config.num_experts_per_tok
    is_missed = math.comb(experts - experts // layout.ep, topk) / math.comb(experts, topk)
    return layout.ep * (1 - is_missed) / topk


_ONCE_PER_UPDATE = ("reduce", "update")
"""Phases that run once per update, whatever the number of micro-batches."""


def is_once_per_update(phase: str, collective: str = "") -> bool:
    """Return True if work or a collective runs once per update. Only Megatron's DDP coalesces buffers, once."""
    return phase in _ONCE_PER_UPDATE or "coalesced" in collective


def _rank_plan(
    config: Config,
    role: RankRole,
    measured: UpdateMeasurement,
    batch: BatchPlan,
    layout: Layout,
    machine: GpuNode,
    transfers: TransferPlan,
    model: PlannedModel,
    local_engine: LocalEngineMemory,
) -> RankPlan:
    teacher = model.teacher
    # Time: the rehearsed micro-batches stand for all of them; reduction and optimizer run once per update.
    scale = batch.full_rows / measured.micro_batches
    compute = sum(work.seconds * (1 if is_once_per_update(phase) else scale) for phase, work in measured.work.items())
    dispatched = dispatch_ratio(config, model.hf_config, layout)
    communication = sum(
        machine.collective_seconds(name, ranks, size)
        * (dispatched if name.startswith("alltoall") else 1)
        * (1 if is_once_per_update(phase, name) else scale)
        for phase, name, ranks, _, size in measured.collectives
    )
    # The pipeline fills and drains: each stage is idle for the time of pp - 1 micro-batches.
    bubble = 1 + (layout.pp - 1) / (layout.vpp * batch.micro_batches)
    host = machine.host_optimizer_seconds(measured.offloaded, gradient_bytes(config))

    # Memory between updates: buckets of the weight sync, or the teacher that scores responses. Activations are freed.
    static = sum(measured.static.values())
    buckets = transfers.sync_buffer if role.rank == 0 or transfers.sync_by_handle else 0
    between_updates = static + buckets
    start = measured.start_peak.total
    if teacher is not None:
        between_updates = max(between_updates, static + teacher.bytes_on_device(config, layout))
        start = max(start, teacher.bytes_on_rank(config, layout))
    # The local engine keeps its copy of the weights, and may sample later steps during updates.
    sampled = static + local_engine.batch
    updated = measured.peak.total + (local_engine.batch if config.train.max_staleness else 0)
    total = max(updated, start, between_updates, sampled) + local_engine.weights + machine.reserved

    # Colocated servers: the trainer's weights are gathered for the sync, and read by the probe, while the servers have
    # all of their memory. During updates the servers sleep.
    sampling = None
    if config.rollout.servers.colocated:
        sampling = round(server_memory_bytes(config, machine)) + measured.static["weights"] + buckets
        sampling += machine.sleeping_server_bytes + machine.reserved
        total = max(sampling, total + machine.sleeping_server_bytes)
    return RankPlan(
        role=role,
        measured=measured,
        total=total,
        between_updates=between_updates,
        sampling=sampling,
        update_seconds=(compute + communication) * bubble + host,
        communication_seconds=communication,
        host_seconds=host,
    )
