"""Protocol of a rollout engine: groups go in, futures of completions come out, and no sampled token is lost."""

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from megatron_dppo.rollout.response import PartialResponse
from megatron_dppo.types import Completion, Prompt, SamplingParams

SampledFuture = Future[list[Completion] | None]
"""Completions of a group, siblings in order. None: the group was canceled before it was complete."""
GroupState = tuple[Completion | PartialResponse, ...]
"""Responses of an incomplete group, siblings in order."""


@dataclass(frozen=True)
class GroupRequest:
    """One group to be sampled."""

    key: int
    """Identity of the group. A group that the engine holds under this key is continued."""
    prompt: Prompt
    siblings: int
    """Number of responses."""


class RolloutEngine(Protocol):
    """Engine that samples responses with known weights.

    An engine holds the sampled tokens of an incomplete group under the group's key in two cases: the group was canceled
    and its key was in ``keep``, or ``restore`` passed it in.
    """

    @property
    def policy_version(self) -> int:
        """Version of the weights that a new request is sampled with; -1 before the first weights."""

    def submit(
        self, groups: Sequence[GroupRequest], params: SamplingParams, enough: int, keep: Collection[int] = ()
    ) -> list[SampledFuture]:
        """Sample groups until ``enough`` of them are complete, and cancel the others; a few more may be complete.

        May return before the groups are complete, and may be called from any thread. A future holds an exception where
        sampling failed. No key is in flight; the tokens of canceled groups are held for keys in ``keep``. Each response
        has its own random numbers: they depend on ``params.seed``, on its index in this call, and on how often it was
        continued.
        """

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Completion]:
        """Sample one completion per prompt, in order, and wait for all. Repeat a prompt for several samples."""

    def unfinished(self) -> dict[int, GroupState]:
        """Return the sampled tokens of every group in flight or held, by key. Groups in flight continue afterwards."""

    def restore(self, groups: Mapping[int, GroupState]) -> None:
        """Hold groups that another engine returned from ``unfinished``."""

    def close(self) -> None:
        """Cancel everything and free the engine's resources."""
