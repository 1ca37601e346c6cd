"""Plan of a run: a rehearsal of every kind of rank, and estimates from its measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_dppo.commands.plan.arithmetic import (
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
from megatron_dppo.commands.plan.child import RehearsalRequest
from megatron_dppo.commands.plan.machine import GpuNode
from megatron_dppo.commands.plan.measurement import UpdateMeasurement
from megatron_dppo.commands.plan.models import count_adapter_parameters, count_parameters, load_model_config
from megatron_dppo.commands.plan.rehearsal_pool import RehearsalPool
from megatron_dppo.commands.plan.rehearse import RankRole, rank_roles
from megatron_dppo.commands.plan.teacher import PlannedTeacher
from megatron_dppo.config.layout import Layout, ModelShape, resolve_layout
from megatron_dppo.config.schema import Config
from megatron_dppo.hf.folder import model_shape

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
        """Return the sizes of ``model.path`` and of the teacher.

        Raises:
            CheckpointError: Neither a folder nor a known model.
        """
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
    """Peak bytes, with memory outside torch and that of colocated servers."""
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
    transfers: TransferPlan

    @property
    def oversized_ranks(self) -> list[str]:
        """Rank kinds that do not fit."""
        return [name for name, rank in self.ranks.items() if rank.total > self.machine.memory]

    @property
    def free_bytes(self) -> int:
        """Free bytes on the fullest kind of rank. Negative if it does not fit."""
        return self.machine.memory - max(rank.total for rank in self.ranks.values())

    @property
    def is_tight(self) -> bool:
        """True if the run fits, but with less free memory than allocator and kernels may need."""
        return 0 <= self.free_bytes < TIGHT * self.machine.memory

    @property
    def step_seconds(self) -> float:
        """Time of a step's updates on the slowest kind of rank, which all others wait for."""
        return self.batch.updates * max(rank.update_seconds for rank in self.ranks.values())


def make_plan(
    config: Config,
    world_size: int,
    machine: GpuNode,
    rehearsals: RehearsalPool,
    *,
    model: PlannedModel | None = None,
    kinds: Sequence[str] | None = None,
    few_layers: bool = False,
) -> Plan:
    """Plan a run by a rehearsal of its ranks.

    Args:
        config: Configuration of the run.
        world_size: Number of trainer processes.
        machine: Machine of the trainer.
        rehearsals: Pool that rehearses.
        model: ``PlannedModel.from_config(config)``. None computes it.
        kinds: Kinds of ranks. None plans all that the layout has.
        few_layers: See ``RehearsalPool.run``. Ignored for models whose layers differ.

    Raises:
        UserError: The configuration cannot run on this many processes, or a rank cannot be rehearsed.
    """
    model = model or PlannedModel.from_config(config)
    layout = resolve_layout(config.parallel, config.batch, world_size, model.shape)
    batch = plan_batch(config, layout)
    transfers = plan_transfers(config, model.parameters, model.trained, layout, machine)
    teacher = model.teacher.hf_config if model.teacher is not None and config.distillation.is_exact else None
    chosen = rank_roles(layout, model.shape.num_experts is not None, None if kinds is None else list(kinds))
    measurements = rehearsals.run(
        [
            RehearsalRequest(
                config=config, hf_config=model.hf_config, layout=layout, machine=machine, role=role, teacher=teacher
            )
            for role in chosen.values()
        ],
        few_layers=few_layers and not model.shape.dense_layers,
    )
    return Plan(
        config=config,
        layout=layout,
        machine=machine,
        model=model,
        batch=batch,
        ranks={
            name: _rank_plan(config, role, measured, batch, layout, machine, transfers, model.teacher)
            for (name, role), measured in zip(chosen.items(), measurements, strict=True)
        },
        kv_cache=plan_kv_cache(config, model.hf_config, model.parameters, machine),
        token_bytes=plan_token_bytes(config, model.hf_config, layout),
        transfers=transfers,
    )


_ONCE_PER_UPDATE = ("reduce", "update")
"""Phases that run once per update, whatever the number of micro-batches."""


def is_once_per_update(phase: str, collective: str) -> bool:
    """Return True if a collective runs once per update. Only Megatron's DDP coalesces buffers, once per update."""
    return phase in _ONCE_PER_UPDATE or "coalesced" in collective


def _rank_plan(
    config: Config,
    role: RankRole,
    measured: UpdateMeasurement,
    batch: BatchPlan,
    layout: Layout,
    machine: GpuNode,
    transfers: TransferPlan,
    teacher: PlannedTeacher | None,
) -> RankPlan:
    # Time: the rehearsed micro-batches stand for all of them; reduction and optimizer run once per update.
    scale = batch.micro_batches / measured.micro_batches
    compute = sum(work.seconds * (1 if phase in _ONCE_PER_UPDATE else scale) for phase, work in measured.work.items())
    communication = sum(
        machine.collective_seconds(name, ranks, size) * (1 if is_once_per_update(phase, name) else scale)
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
    total = max(measured.peak.total, start, between_updates) + machine.reserved

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
        sampling=sampling,
        update_seconds=(compute + communication) * bubble + host,
        communication_seconds=communication,
        host_seconds=host,
    )
