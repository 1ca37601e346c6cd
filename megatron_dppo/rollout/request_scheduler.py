"""Requests to a rollout engine and their seeds, as functions of the configuration, the step and the prompt."""

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from megatron_dppo.config.data import EvalConfig
from megatron_dppo.config.rollout import RolloutConfig
from megatron_dppo.rollout.engine import GroupRequest, RolloutEngine
from megatron_dppo.rollout.pending import GroupScoring, PromptSlot, Submission
from megatron_dppo.types import Prompt, SamplingParams


def sampling_params(settings: RolloutConfig | EvalConfig, max_new_tokens: int, seed: int) -> SamplingParams:
    """Return the sampling parameters of ``[rollout]`` or ``[eval]``, with which no further column is recorded."""
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        min_p=settings.min_p,
        seed=seed,
    )


def sampling_seed(seed: int, purpose: str, step: int, dp_rank: int) -> int:
    """Return the seed of a step and a data-parallel rank, derived from the run's seed so that resume is exact."""
    # A string is seeded by its SHA-512, equal in every process; ``hash`` of a string is not.
    return random.Random(f"{seed}/{purpose}/{step}/{dp_rank}").getrandbits(31)


class Prompts(Protocol):
    """Endless stream of prompts."""

    def __getitem__(self, position: int, /) -> Prompt:
        """Return the prompt at a position."""


@dataclass
class RequestScheduler:
    """Submits groups to this rank's engine. Calls of a batch-invariant one are collectives of all ranks."""

    rollout: RolloutConfig
    params: SamplingParams
    prompts: Prompts
    engine: RolloutEngine | None
    """None on ranks that receive their rollouts from the leader of their model-parallel group."""
    scoring: GroupScoring
    dp_rank: int
    one_by_one: bool
    """Submit each group by itself, so that a step may take single groups."""
    leads: bool = True
    """False where the engine belongs to another rank too, which then scores the groups of both."""
    # Keys of groups from the prompt stream are positions (0, 1, ...), so all other groups count down from -1.
    _keys: Iterator[int] = field(default_factory=lambda: itertools.count(-1, -1), init=False)

    def submit(
        self, step: int, sampled_at: int, slots: Sequence[PromptSlot], enough: int, attempt: int = 0
    ) -> list[Submission]:
        """Submit the groups of some prompts, of which ``enough`` complete ones are needed.

        The configuration decides if the others are canceled. ``attempt`` is the number of the refill round, or 0.
        """
        if not self.one_by_one:
            return [self._submit(step, sampled_at, slots, enough, f"rollout {attempt}")]
        # The position in the purpose gives each group a seed of its own, whatever it is submitted with.
        return [self._submit(step, sampled_at, [slot], 1, f"rollout {attempt} {slot.position}") for slot in slots]

    def submit_prompts(self, prompts: Sequence[Prompt], siblings: int, params: SamplingParams, step: int) -> Submission:
        """Submit groups of prompts that do not come from the prompt stream."""
        if self.engine is None:
            return Submission(step, step, ())
        groups = [GroupRequest(next(self._keys), prompt, siblings) for prompt in prompts]
        # A collective engine is called on every rank, even with no prompts.
        sampled = self.engine.submit(groups, params, len(groups)) if groups or self.rollout.batch_invariant else []
        if not self.leads:
            return Submission(step, step, ())
        return Submission(step, step, (), sampled, self.scoring.score_when_sampled(prompts, sampled))

    def resubmit(self, submission: Submission, enough: int) -> Submission:
        """Submit again what was in flight when a checkpoint was written; return any other submission unchanged."""
        # A collective engine leaves nothing in flight.
        if self.engine is None or self.rollout.batch_invariant or submission.scored is not None:
            return submission
        (resubmitted,) = self.submit(submission.step, submission.sampled_at, submission.slots, enough)
        return resubmitted

    def carried_positions(self, step: int, slots: Sequence[PromptSlot]) -> set[int]:
        """Return the positions of the groups that continue in a later step if they are canceled in ``step``."""
        return {slot.position for slot in slots if step - slot.first_step < self.rollout.partial_rollouts}

    def _submit(self, step: int, sampled_at: int, slots: Sequence[PromptSlot], enough: int, purpose: str) -> Submission:
        if self.engine is None:
            return Submission(step, sampled_at, slots)
        rollout = self.rollout
        prompts = [self.prompts[slot.position] for slot in slots]
        params = replace(self.params, seed=sampling_seed(self.params.seed, purpose, step, self.dp_rank))
        sampled = self.engine.submit(
            [
                GroupRequest(slot.position, prompt, rollout.samples_per_prompt)
                for slot, prompt in zip(slots, prompts, strict=True)
            ],
            params,
            enough if rollout.abort_slowest else len(slots),
            self.carried_positions(step, slots),
        )
        if not self.leads:
            return Submission(step, sampled_at, slots)
        return Submission(step, sampled_at, slots, sampled, self.scoring.score_when_sampled(prompts, sampled))


def oversampled(count: int, factor: float) -> int:
    """Return ``count * factor`` rounded up, ignoring binary rounding errors (100 * 1.1 gives 110)."""
    return math.ceil(round(count * factor, 6))
