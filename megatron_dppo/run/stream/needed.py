"""Which columns of the rollouts a rank computes with: what the others of its replica need not be sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_dppo.types import Completion, RolloutGroup
from megatron_dppo.types.token_columns import TOKEN_COLUMNS


@dataclass(frozen=True)
class Needed:
    """Of one rank."""

    topk: bool = True
    """whether it computes the loss: the last pipeline stage"""
    layers: tuple[int, ...] | None = None
    """whose routes it replays; None = all"""

    def of(self, groups: Sequence[RolloutGroup | None]) -> list[RolloutGroup | None]:
        """The groups without the other columns; ``routed_experts`` then has these layers only."""
        return [
            group
            and replace(group, rollouts=tuple(replace(r, completion=self._of(r.completion)) for r in group.rollouts))
            for group in groups
        ]

    def _of(self, completion: Completion) -> Completion:
        if not self.topk:
            unread: dict[str, Any] = {c.response: None for c in TOKEN_COLUMNS if c.is_loss_only and c.response}
            completion = replace(completion, **unread)
        if self.layers is not None and completion.routed_experts is not None:
            completion = replace(completion, routed_experts=completion.routed_experts[:, list(self.layers)])
        return completion
