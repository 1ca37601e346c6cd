"""Requests to a rollout engine and their seeds, as functions of the configuration, the step and the prompt."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace
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


class RequestScheduler:
    """Submits groups to this rank's engine.

    Args:
        engine: None on ranks that receive their rollouts from the leader of their model-parallel group.
        one_by_one: Submit each group by itself, so that a step may take single groups.
        leads: False where the engine belongs to another rank too, which then scores the groups of both.
    """

    def __init__(
        self,
        rollout: RolloutConfig,
        params: SamplingParams,
        prompts: Prompts,
        engine: RolloutEngine | None,
        scoring: GroupScoring,
        dp_rank: int,
        *,
        one_by_one: bool,
        leads: bool = True,
    ) -> None:
        self._rollout = rollout
        self._params = params
        self._prompts = prompts
        self._engine = engine
        self._scoring = scoring
        self._dp_rank = dp_rank
        self._one_by_one = one_by_one
        self._leads = leads
        self._is_collective = rollout.batch_invariant
        """True if each call of the engine is a collective of all ranks."""
        # Keys of groups from the prompt stream are positions (0, 1, ...), so all other groups count down from -1.
        self._keys = itertools.count(-1, -1)

    def submit(
        self, step: int, sampled_at: int, slots: Sequence[PromptSlot], enough: int, attempt: int = 0
    ) -> list[Submission]:
        """Submit the groups of some prompts, of which ``enough`` complete ones are needed.

        The configuration decides if the others are canceled. ``attempt`` is the number of the refill round, or 0.
        """
        if not self._one_by_one:
            return [self._submit(step, sampled_at, slots, enough, f"rollout {attempt}")]
        # The position in the purpose gives each group a seed of its own, whatever it is submitted with.
        return [self._submit(step, sampled_at, [slot], 1, f"rollout {attempt} {slot.position}") for slot in slots]

    def submit_prompts(self, prompts: Sequence[Prompt], siblings: int, params: SamplingParams, step: int) -> Submission:
        """Submit groups of prompts that do not come from the prompt stream."""
        if self._engine is None:
            return Submission(step, step, ())
        groups = [GroupRequest(next(self._keys), prompt, siblings) for prompt in prompts]
        # A collective engine is called on every rank, even with no prompts.
        sampled = self._engine.submit(groups, params, len(groups)) if groups or self._is_collective else []
        if not self._leads:
            return Submission(step, step, ())
        return Submission(step, step, (), sampled, self._scoring.score_when_sampled(prompts, sampled))

    def resubmit(self, submission: Submission, enough: int) -> Submission:
        """Submit again what was in flight when a checkpoint was written; return any other submission unchanged."""
        # A collective engine leaves nothing in flight.
        if self._engine is None or self._is_collective or submission.scored is not None:
            return submission
        (resubmitted,) = self.submit(submission.step, submission.sampled_at, submission.slots, enough)
        return resubmitted

    def carried_positions(self, step: int, slots: Sequence[PromptSlot]) -> set[int]:
        """Return the positions of the groups that continue in a later step if they are canceled in ``step``."""
        return {slot.position for slot in slots if step - slot.first_step < self._rollout.partial_rollouts}

    def _submit(self, step: int, sampled_at: int, slots: Sequence[PromptSlot], enough: int, purpose: str) -> Submission:
        if self._engine is None:
            return Submission(step, sampled_at, slots)
        rollout = self._rollout
        prompts = [self._prompts[slot.position] for slot in slots]
        params = replace(self._params, seed=sampling_seed(self._params.seed, purpose, step, self._dp_rank))
        sampled = self._engine.submit(
            [
                GroupRequest(slot.position, prompt, rollout.samples_per_prompt)
                for slot, prompt in zip(slots, prompts, strict=True)
            ],
            params,
            enough if rollout.abort_slowest else len(slots),
            self.carried_positions(step, slots),
        )
        if not self._leads:
            return Submission(step, sampled_at, slots)
        return Submission(step, sampled_at, slots, sampled, self._scoring.score_when_sampled(prompts, sampled))


def oversampled(count: int, factor: float) -> int:
    """Return ``count * factor`` rounded up, ignoring binary rounding errors (100 * 1.1 gives 110)."""
    return math.ceil(round(count * factor, 6))
