"""One rank of a run on fake tensors and fake process groups; once a process, which is good for nothing else then."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_dppo.config.layout import Layout
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import PlanError
from megatron_dppo.hf.folder import DictWeights
from megatron_dppo.parallel.platform import Platform

TimeOf = Callable[[int, torch.dtype, int], float]


@dataclass(frozen=True, kw_only=True)
class Role:
    """Which rank is rehearsed, and as what."""

    rank: int
    expert_load: float = 1.0
    """tokens of its experts over those of a balanced router"""
    micro_batches: int = 1
    as_gpu: bool = True
    """False = as on the CPU, to be compared with a real rank there"""


def prepare() -> None:
    """Import everything that ``rehearse`` needs, with Megatron made fit for it; needed once, before it."""
    from megatron_dppo.mcore.compat.shims import apply_shims

    apply_shims(Platform.detect(force_cpu=True))


def rehearse(
    config: Config, hf_config: Any, layout: Layout, role: Role, time_of: TimeOf | None = None, teacher: Any = None
) -> Any:
    """The ``Measured`` of one update of this rank; ``teacher`` is the transformers config of the loss' teacher."""
    os.environ.update(RANK=str(role.rank), WORLD_SIZE=str(layout.world_size), LOCAL_RANK="0")
    dist.init_process_group("fake", store=FakeStore(), rank=role.rank, world_size=layout.world_size)
    platform = Platform.detect(force_cpu=True)
    from megatron_dppo.commands.plan.answers import Answers
    from megatron_dppo.commands.plan.arithmetic import optimizer_bytes
    from megatron_dppo.commands.plan.measure import measured_update, trainer_builder
    from megatron_dppo.commands.plan.measured import with_smaller_optimizer
    from megatron_dppo.commands.plan.meter import Meter
    from megatron_dppo.commands.plan.models import rows
    from megatron_dppo.commands.plan.replacements import replace_for_rehearsal
    from megatron_dppo.commands.plan.teacher import make_teacher_targets
    from megatron_dppo.losses import policy_objective
    from megatron_dppo.mcore.model import padded_vocab_size
    from megatron_dppo.mcore.rehearsal import Assumptions

    config, kept = _without_transformer_engine(config)
    batches = rows(config, hf_config, layout, role.micro_batches)
    local = len(batches[0].tokens) // (layout.cp * (layout.tp if layout.sequence_parallel else 1))
    assumed = Assumptions(row=(local, 1, hf_config.hidden_size), expert_load=role.expert_load)
    replace_for_rehearsal(assumed, as_gpu=role.as_gpu)
    build = trainer_builder(config, hf_config, layout, platform, DictWeights(()))
    make_targets, is_last = None, role.rank * layout.pp // layout.world_size == layout.pp - 1
    if teacher is not None and is_last:
        width = padded_vocab_size(hf_config.vocab_size, layout.tp) // layout.tp
        make_targets = partial(make_teacher_targets, config, teacher.hidden_size, local, width)
    with FakeTensorMode(allow_non_fake_inputs=True), Answers():
        measured = measured_update(build, batches, policy_objective(config.loss), Meter(time_of), make_targets)
    return measured if kept is None else with_smaller_optimizer(measured, kept / optimizer_bytes(config))


def _without_transformer_engine(config: Config) -> tuple[Config, float | None]:
    """With the optimizer that can be rehearsed, and the bytes of each parameter that the real one keeps, if fewer."""
    from megatron_dppo.commands.plan.arithmetic import optimizer_bytes_on_device

    chosen = config.optimizer
    if not chosen.use_precision_aware_optimizer or chosen.optimizer_cpu_offload:
        return config, None
    full = dict.fromkeys(("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"), "fp32")
    plain = chosen.model_copy(update={"use_precision_aware_optimizer": False, **full})
    return config.model_copy(update={"optimizer": plain}), optimizer_bytes_on_device(config)


HOT = 3.0
"""An assumption: the tokens of the busiest expert rank over those of a balanced router."""


KINDS = ("first", "middle", "last", "hot")


def roles(layout: Layout, has_experts: bool, kinds: list[str] | None = None) -> dict[str, Role]:
    """The rank kinds of a layout by name.

    ``first``, ``middle`` and ``last`` are pipeline stages (one kind, ``all``, without a pipeline). ``hot`` is the first
    stage's rank, whose activations live longest, with experts that get ``HOT`` times their share, or all tokens if that
    is less; there is none without expert parallelism, where every rank has all experts.

    Args:
        layout: of the run.
        has_experts: whether the model has some.
        kinds: which of them; None = all that there are.

    Raises:
        PlanError: a kind that this layout does not have.
    """
    stages = {"all": 0} if layout.pp == 1 else {"first": 0, "last": layout.pp - 1}
    if layout.pp > 2:
        stages = {"first": 0, "middle": layout.pp // 2, "last": layout.pp - 1}
    per_stage = layout.world_size // layout.pp  # Megatron counts pipeline stages outermost
    count = rehearsed_micro_batches(layout)
    found = {name: Role(rank=stage * per_stage, micro_batches=count) for name, stage in stages.items()}
    if has_experts and layout.ep > 1:
        found["hot"] = Role(rank=0, micro_batches=count, expert_load=min(HOT, layout.ep))
    unknown = [kind for kind in kinds or () if kind not in found]
    if unknown:
        raise PlanError(f"--rank-kinds {' '.join(unknown)}: this layout has {', '.join(found)}")
    return found if not kinds else {kind: found[kind] for kind in kinds}


def rehearsed_micro_batches(layout: Layout) -> int:
    """Enough to fill the pipeline: with more of them memory grows no further."""
    return layout.pp * layout.vpp if layout.pp > 1 else 1
