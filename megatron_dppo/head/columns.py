"""Inputs of the head, by row, that do not depend on the logits."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from megatron_dppo.head.checks import check_sets, check_slots
from megatron_dppo.head.row_plan import RowPlan
from megatron_dppo.head.rows import VocabShard
from megatron_dppo.types import TokenTargets


class RowColumns(NamedTuple):
    """Targets and looked-up ids of some rows."""

    targets: TokenTargets
    labels: Tensor
    """Index of the label in this shard, -1 if another shard holds it. Shape [n]."""
    ids: Tensor | None
    valid: Tensor | None
    local_ids: Tensor | None
    """Index of each id in this shard, -1 for another shard's id or an unused slot. Shape [n, K]."""

    @classmethod
    def of(cls, head: VocabShard, targets: TokenTargets, plan: RowPlan | None, vocab_size: int) -> RowColumns:
        """Check the targets and build the columns of all rows of the plan."""
        if targets.sequence_ids is not None:
            raise ValueError(
                "dppo_head_loss sees some rows at a time, so a loss of whole sequences (gspo, a sequence mask) cannot "
                "use it, but targets.sequence_ids is given; use vocab_parallel_head_stats, or for a loss of single "
                "tokens pass targets without sequence_ids"
            )
        check_slots(targets, None if plan is None else plan.rows)
        targets = targets if plan is None else targets.select(plan.rows, plan.on_host)
        check_sets(targets.sampling_mask, targets.labels, vocab_size)
        ids, valid = looked_up_ids(targets)
        return cls(targets, head.local(targets.labels), ids, valid, None if ids is None else head.local(ids, valid))

    def select(self, rows: Tensor | slice) -> RowColumns:
        """Return some of the rows."""
        ids, valid, local_ids = (None if column is None else column[rows] for column in self[2:])
        return RowColumns(self.targets.select(rows), self.labels[rows], ids, valid, local_ids)


def looked_up_ids(targets: TokenTargets) -> tuple[Tensor | None, Tensor | None]:
    """Return the ids that the head looks up, which are all slots but the label's, and a mask of the used ones."""
    if targets.rollout_topk_ids is None:
        return None, None
    ids = targets.rollout_topk_ids[:, :-1].long()
    return ids, ids >= 0
