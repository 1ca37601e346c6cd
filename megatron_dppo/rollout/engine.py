"""What the loop needs of a rollout engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor

from megatron_dppo.types import Completion, Prompt, SamplingParams


class RolloutEngine(Protocol):
    """Samples responses with known weights."""

    policy_version: int
    """Version of the weights that the next ``generate`` uses; -1 before the first ``update_weights``."""

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Completion]:
        """One completion a prompt, in order; repeat a prompt for several samples."""

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take new weights, full tensors by Hugging Face name."""

    def close(self) -> None:
        """Free what the engine holds."""
