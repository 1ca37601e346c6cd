"""The plan of a run: every kind of rank rehearsed, and what follows from the numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_dppo.commands.plan.arithmetic import (
    Batch,
    Rollouts,
    TokenBytes,
    Transfers,
    batch_of,
    columns_of,
    gradient_bytes,
    rollouts,
    server_bytes,
    transfers,
)
from megatron_dppo.commands.plan.child import Question
from megatron_dppo.commands.plan.machine import GpuNode
from megatron_dppo.commands.plan.measured import Measured
from megatron_dppo.commands.plan.models import adapter_counts, model_config, parameter_counts
from megatron_dppo.commands.plan.rehearsals import Rehearsals
from megatron_dppo.commands.plan.rehearse import Role, roles
from megatron_dppo.commands.plan.teacher import TeacherModel
from megatron_dppo.config.layout import Layout, ModelShape, resolve_layout
from megatron_dppo.config.schema import Config
from megatron_dppo.hf.folder import model_shape

TIGHT = 0.1
"""Part of the memory that allocator and kernels may take beyond what is counted here."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """What is trained."""

    hf_config: Any
    shape: ModelShape
    parameters: int
    expert_parameters: int
    """of these, in routed experts"""
    trained: tuple[int, int]
    """the same two of what has gradients: of all weights, or of the adapters"""
    note: str | None
    """where the sizes come from, if not from the folder"""
    teacher: TeacherModel | None = None

    @classmethod
    def of(cls, config: Config) -> Model:
        """That of ``model.path``.

        Raises:
            CheckpointError: no such folder, and no known model of that name.
        """
        hf_config, note = model_config(config.model.path)
        shape = model_shape(hf_config)
        parameters, experts = parameter_counts(hf_config)
        trained = adapter_counts(hf_config, config.lora) if config.lora.rank else (parameters, experts)
        return cls(
            hf_config=hf_config,
            shape=shape,
            parameters=parameters,
            expert_parameters=experts,
            trained=trained,
            note=note,
            teacher=TeacherModel.of(config),
        )


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """One kind of rank."""

    role: Role
    measured: Measured
    total: int
    """bytes at the peak with everything that torch does not allocate, and what colocated servers have at that time"""
    sampling: int | None
    """of these, bytes while colocated servers sample; None = they have GPUs of their own"""
    update_seconds: float
    """one optimizer update, all its micro-batches"""
    communication_seconds: float
    """of these in collectives, as if nothing overlapped"""
    host_seconds: float
    """of these on the host and on the way there and back, for the optimizer that is offloaded"""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run on ``world_size`` trainer GPUs."""

    config: Config
    layout: Layout
    machine: GpuNode
    model: Model
    batch: Batch
    ranks: dict[str, RankPlan]
    rollouts: Rollouts
    columns: TokenBytes
    transfers: Transfers

    @property
    def too_large(self) -> list[str]:
        """The rank kinds that do not fit."""
        return [name for name, rank in self.ranks.items() if rank.total > self.machine.memory]

    @property
    def room(self) -> int:
        """Bytes that the fullest kind of rank leaves; below 0 = it does not fit."""
        return self.machine.memory - max(rank.total for rank in self.ranks.values())

    @property
    def is_tight(self) -> bool:
        """Whether it fits, with less to spare than allocator and kernels may take."""
        return 0 <= self.room < TIGHT * self.machine.memory

    @property
    def step_seconds(self) -> float:
        """The updates of a step, on the slowest kind of rank: the others wait for it."""
        return self.batch.updates * max(rank.update_seconds for rank in self.ranks.values())


def make_plan(
    config: Config,
    world_size: int,
    machine: GpuNode,
    rehearsals: Rehearsals,
    *,
    model: Model | None = None,
    kinds: Sequence[str] | None = None,
    few_layers: bool = False,
) -> Plan:
    """Rehearse a configuration.

    Args:
        config: of the run.
        world_size: trainer processes.
        machine: what they run on.
        rehearsals: who does it.
        model: ``Model.of(config)``, if it is known.
        kinds: of ranks; None = all that the layout has.
        few_layers: see ``Rehearsals.ask``; not of a model whose layers differ.

    Raises:
        UserError: the configuration cannot run on so many processes, or a rank cannot be rehearsed.
    """
    model = model or Model.of(config)
    layout = resolve_layout(config.parallel, config.batch, world_size, model.shape)
    batch = batch_of(config, layout)
    moved = transfers(config, model.parameters, model.trained, layout, machine)
    teacher = model.teacher.hf_config if model.teacher is not None and config.distillation.is_exact else None
    chosen = roles(layout, model.shape.num_experts is not None, None if kinds is None else list(kinds))
    found = rehearsals.ask(
        [
            Question(
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
            name: _rank_plan(config, role, measured, batch, layout, machine, moved, model.teacher)
            for (name, role), measured in zip(chosen.items(), found, strict=True)
        },
        rollouts=rollouts(config, model.hf_config, model.parameters, machine),
        columns=columns_of(config, model.hf_config, layout),
        transfers=moved,
    )


_ONCE = ("reduce", "update")
"""Phases that an update has once, however many micro-batches it has."""


def once_an_update(phase: str, collective: str) -> bool:
    """Whether a collective does not come with every micro-batch; Megatron's DDP alone sends several buffers as one."""
    return phase in _ONCE or "coalesced" in collective


def _rank_plan(
    config: Config,
    role: Role,
    measured: Measured,
    batch: Batch,
    layout: Layout,
    machine: GpuNode,
    moved: Transfers,
    teacher: TeacherModel | None,
) -> RankPlan:
    times = batch.micro_batches / measured.micro_batches
    compute = sum(work.seconds * (1 if phase in _ONCE else times) for phase, work in measured.work.items())
    communication = sum(
        machine.seconds_of_collective(name, ranks, size) * (1 if once_an_update(phase, name) else times)
        for phase, name, ranks, _, size in measured.collectives
    )
    # The pipeline fills and drains: pp - 1 micro-batches' time in which a stage waits.
    bubble = 1 + (layout.pp - 1) / (layout.vpp * batch.micro_batches)
    host = machine.seconds_on_host(measured.offloaded, gradient_bytes(config))
    # Buffers of the weight sync are there between updates, when activations are not.
    buffer = moved.sync_buffer if role.rank == 0 or moved.sync_by_handle else 0
    between = sum(measured.static.values()) + buffer
    if teacher is not None:  # it looks at the responses between updates too
        between = max(between, sum(measured.static.values()) + teacher.bytes_on_device(config, layout))
    started = max(measured.start_peak.total, 0 if teacher is None else teacher.bytes_on_rank(config, layout))
    total, sampling = max(measured.peak.total, started, between) + machine.reserved, None
    if config.rollout.servers.colocated:
        # The weights are gathered and read by the probe when the servers have all of their memory.
        sampling = round(server_bytes(config, machine)) + measured.static["weights"] + buffer
        sampling += machine.asleep + machine.reserved
        total = max(sampling, total + machine.asleep)
    return RankPlan(
        role=role,
        measured=measured,
        total=total,
        sampling=sampling,
        update_seconds=(compute + communication) * bubble + host,
        communication_seconds=communication,
        host_seconds=host,
    )
