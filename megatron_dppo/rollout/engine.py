"""What the loop needs of a rollout engine."""

from __future__ import annotations

from collections.abc import Collection, Sequence
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


class StoppingEngine(RolloutEngine, Protocol):
    """One that can stop responses and continue them."""

    def generate_first(
        self,
        prompts: Sequence[Prompt],
        keys: Sequence[int],
        siblings: int,
        params: SamplingParams,
        enough: int,
        keep: Collection[int],
    ) -> list[list[Completion] | None]:
        """Groups of completions, until ``enough`` are complete; the others are stopped, and come back as None.

        Args:
            prompts: one a group.
            keys: the identity of each; a group that an earlier call kept under its key is continued.
            siblings: completions of a group.
            params: of all of them.
            enough: complete groups that are wanted; a few more may come.
            keep: keys of groups whose tokens are kept when they are stopped; everything else is dropped.
        """
