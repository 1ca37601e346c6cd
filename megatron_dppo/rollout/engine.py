"""What the loop needs of a rollout engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from megatron_dppo.types import Completion, Prompt, SamplingParams


class RolloutEngine(Protocol):
    """Samples responses with known weights."""

    @property
    def policy_version(self) -> int:
        """Version of the weights that the next ``generate`` uses; -1 before it was given any."""

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Completion]:
        """One completion a prompt, in order; repeat a prompt for several samples."""

    def close(self) -> None:
        """Free what the engine holds."""
