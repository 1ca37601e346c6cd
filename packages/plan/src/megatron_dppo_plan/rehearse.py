"""Rehearsal of one rank on fake tensors and fake process groups.

Call ``rehearse`` once per process; the process cannot be reused.
"""

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
class RankRole:
    """Rank to rehearse, and its assumptions."""

    rank: int
    expert_load: float = 1.0
    """Tokens of its experts relative to a balanced router."""
    micro_batches: int = 1
    as_gpu: bool = True
    """True for a rank on a GPU. False for one on the CPU, to compare with a real rank."""


def prepare() -> None:
    """Import everything that ``rehearse`` needs and patch Megatron for it. Call once, before ``rehearse``."""
    from megatron_dppo.mcore.shims import apply_shims

    apply_shims(Platform.detect(force_cpu=True))


def rehearse(
    config: Config, hf_config: Any, layout: Layout, role: RankRole, time_of: TimeOf | None = None, teacher: Any = None
) -> Any:
    """Return the ``UpdateMeasurement`` of one update of this rank.

    ``teacher`` is the transformers config of the loss' teacher.
    """
    os.environ.update(RANK=str(role.rank), WORLD_SIZE=str(layout.world_size), LOCAL_RANK="0")
    dist.init_process_group("fake", store=FakeStore(), rank=role.rank, world_size=layout.world_size)
    platform = Platform.detect(force_cpu=True)
    from megatron_dppo.losses import policy_objective
    from megatron_dppo.mcore.model import padded_vocab_size
    from megatron_dppo_plan.arithmetic import optimizer_bytes
    from megatron_dppo_plan.assumed_values import AssumedValues
    from megatron_dppo_plan.measure import measure_update, trainer_builder
    from megatron_dppo_plan.measurement import scale_optimizer
    from megatron_dppo_plan.megatron_replacements import Assumptions
    from megatron_dppo_plan.meter import Meter
    from megatron_dppo_plan.models import sample_rows
    from megatron_dppo_plan.replacements import replace_for_rehearsal
    from megatron_dppo_plan.teacher import make_teacher_targets

    config, bytes_per_parameter = _with_plain_optimizer(config)
    batches = sample_rows(config, hf_config, layout, role.micro_batches)
    local_tokens = len(batches[0].tokens) // (layout.cp * (layout.tp if layout.sequence_parallel else 1))
    assumed = Assumptions(row=(local_tokens, 1, hf_config.hidden_size), expert_load=role.expert_load)
    replace_for_rehearsal(assumed, as_gpu=role.as_gpu)
    build = trainer_builder(config, hf_config, layout, platform, DictWeights(()))
    make_targets = None
    # Megatron numbers pipeline stages outermost.
    is_last_stage = role.rank * layout.pp // layout.world_size == layout.pp - 1
    if teacher is not None and is_last_stage:
        shard_width = padded_vocab_size(hf_config.vocab_size, layout.tp) // layout.tp
        make_targets = partial(make_teacher_targets, config, teacher.hidden_size, local_tokens, shard_width)
    # The numbers of the batch are assumed: no weight has a value here.
    statistics = dict.fromkeys(config.loss.declared_statistics(), 1.0)
    objective = policy_objective(config.loss, statistics=statistics)
    with FakeTensorMode(allow_non_fake_inputs=True), AssumedValues():
        measured = measure_update(build, batches, objective, Meter(time_of), make_targets)
    if bytes_per_parameter is None:
        return measured
    return scale_optimizer(measured, bytes_per_parameter / optimizer_bytes(config))


def _with_plain_optimizer(config: Config) -> tuple[Config, float | None]:
    """Replace Transformer Engine's optimizer, which needs a GPU, by the plain one.

    Return the bytes per parameter of the real optimizer too. None if it is the plain one.
    """
    from megatron_dppo_plan.arithmetic import optimizer_bytes_on_device

    optimizer = config.optimizer
    if not optimizer.use_precision_aware_optimizer or optimizer.optimizer_cpu_offload:
        return config, None
    fp32_dtypes = dict.fromkeys(("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"), "fp32")
    plain = optimizer.model_copy(update={"use_precision_aware_optimizer": False, **fp32_dtypes})
    return config.model_copy(update={"optimizer": plain}), optimizer_bytes_on_device(config)


HOT_EXPERT_LOAD = 3.0
"""Assumed tokens of the busiest expert rank relative to a balanced router."""


def rank_roles(
    layout: Layout, has_experts: bool, kinds: list[str] | None = None, *, table: str | list[list[str]] | None = None
) -> dict[str, RankRole]:
    """Return the rank kinds of a layout by name.

    ``first``, ``middle`` and ``last`` are pipeline stages (one kind, ``all``, without a pipeline). ``hot`` is a rank of
    the first stage, whose activations live longest, with experts that receive ``HOT_EXPERT_LOAD`` times their share, at
    most all tokens. It exists only with expert parallelism; otherwise every rank has all experts. ``table`` is
    ``pipeline_model_parallel_layout``, by which ``middle`` is the stage with the most layers.
    """
    stages = {"all": 0} if layout.pp == 1 else {"first": 0, "last": layout.pp - 1}
    if layout.pp > 2:
        from megatron_dppo.mcore.pipeline import fullest_middle_stage

        middle = layout.pp // 2 if table is None else fullest_middle_stage(table, layout.pp)
        stages = {"first": 0, "middle": middle, "last": layout.pp - 1}
    # Megatron numbers pipeline stages outermost.
    ranks_per_stage = layout.world_size // layout.pp
    count = rehearsed_micro_batches(layout)
    available = {name: RankRole(rank=stage * ranks_per_stage, micro_batches=count) for name, stage in stages.items()}
    if has_experts and layout.ep > 1:
        available["hot"] = RankRole(rank=0, micro_batches=count, expert_load=min(HOT_EXPERT_LOAD, layout.ep))
    unknown = [kind for kind in kinds or () if kind not in available]
    if unknown:
        raise PlanError(f"--rank-kinds {' '.join(unknown)}: this layout has {', '.join(available)}")
    return available if not kinds else {kind: available[kind] for kind in kinds}


def rehearsed_micro_batches(layout: Layout) -> int:
    """Return enough micro-batches to fill the pipeline. More would not increase memory."""
    return layout.pp * layout.vpp if layout.pp > 1 else 1
