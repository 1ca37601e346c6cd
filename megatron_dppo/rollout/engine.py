"""What a run needs of a rollout engine: groups go in, futures of completions come out, and nothing sampled is lost."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from megatron_dppo.rollout.response import PartialResponse
from megatron_dppo.types import Completion, Prompt, SamplingParams

Sampled = Future[list[Completion] | None]
"""The completions of a group, siblings in order; None = it was stopped before it was complete"""
GroupState = tuple[Completion | PartialResponse, ...]
"""The responses of a group that is not complete, siblings in order"""


@dataclass(frozen=True)
class GroupRequest:
    """One group to be sampled."""

    key: int
    """its identity; a group that the engine holds under this key goes on"""
    prompt: Prompt
    siblings: int
    """responses"""


class RolloutEngine(Protocol):
    """Samples responses with known weights.

    Of a group that is not complete an engine holds what was sampled, under the group's key: when it was stopped and its
    key was in ``keep``, and when it was given to ``restore``.
    """

    @property
    def policy_version(self) -> int:
        """Version of the weights that a request gets now; -1 before it was given any."""

    def submit(
        self, groups: Sequence[GroupRequest], params: SamplingParams, enough: int, keep: Collection[int] = ()
    ) -> list[Sampled]:
        """Sample groups until ``enough`` of them are complete, and stop the others; a few more may be complete.

        May return before they are, from any thread. The result of a future is an exception where sampling failed.

        Args:
            groups: all different from those under way.
            params: of the new tokens. Responses draw different numbers: by ``params.seed``, by their place in this
                call, and by how often they were continued.
            enough: complete groups that are wanted; ``len(groups)`` = all.
            keep: keys of groups whose tokens are held when they are stopped.
        """

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Completion]:
        """One completion a prompt, in order; repeat a prompt for several samples. Returns when all are there."""

    def unfinished(self) -> dict[int, GroupState]:
        """What was sampled of every group that is under way or held, by key; what is under way goes on afterwards."""

    def restore(self, groups: Mapping[int, GroupState]) -> None:
        """Hold these, as another engine had them."""

    def close(self) -> None:
        """Stop everything, and free what the engine holds."""
