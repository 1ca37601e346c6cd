"""Which ranks of a layout differ, and so are rehearsed."""

from __future__ import annotations

from megatron_dppo.config.layout import Layout
from megatron_dppo.errors import PlanError
from megatron_dppo.plan.rehearse import Role

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
