"""What an engine is asked for, and by which seed: functions of the configuration, the step and the prompt alone."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from megatron_dppo.config.data import EvalConfig
from megatron_dppo.config.rollout import RolloutConfig
from megatron_dppo.rollout.engine import GroupRequest, RolloutEngine
from megatron_dppo.rollout.pending import Draw, GroupScoring, PromptSlot
from megatron_dppo.types import Prompt, SamplingParams


def sampling_params(
    settings: RolloutConfig | EvalConfig, max_new_tokens: int, seed: int, **recorded: Any
) -> SamplingParams:
    """By ``[rollout]`` or ``[eval]``; ``recorded`` says what is reported beside tokens and log-probabilities."""
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        min_p=settings.min_p,
        seed=seed,
        **recorded,
    )


def sampling_seed(seed: int, purpose: str, step: int, dp_rank: int) -> int:
    """A seed for a step and a data-parallel rank, a function of the run's seed alone (so that resume is exact).

    Args:
        seed: ``run.seed``.
        purpose: different draws of one step have different names.
        step: the rollout step.
        dp_rank: data-parallel rank.
    """
    return random.Random(f"{seed}/{purpose}/{step}/{dp_rank}").getrandbits(31)


class Prompts(Protocol):
    """An endless stream of prompts."""

    def __getitem__(self, position: int, /) -> Prompt:
        """The prompt at a position."""


class Asking:
    """Asks this rank's engine for groups.

    Args:
        rollout: how many, and which may be stopped or go on later.
        params: how the run samples; the seeds of requests follow from its seed.
        prompts: of the run.
        engine: None on ranks that get their rollouts from the leader of their model-parallel group.
        scoring: of what was sampled.
        dp_rank: data-parallel rank.
        one_by_one: groups are asked for one by one, so that a step may take each without the others.
        leads: False where the engine is that of another rank as well, which scores what both have sampled.
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
        self._one_by_one, self._leads = one_by_one, leads
        self._together = rollout.batch_invariant
        """whether each call of the engine is a collective of all ranks"""
        self._rollout, self._params = rollout, params
        self._prompts, self._engine = prompts, engine
        self._scoring, self._dp_rank = scoring, dp_rank
        self._keys = itertools.count(-1, -1)  # those of the stream are positions

    def draws(
        self, step: int, sampled_at: int, places: Sequence[PromptSlot], enough: int, attempt: int = 0
    ) -> list[Draw]:
        """Ask for the groups of some prompts.

        Args:
            step: that they are for.
            sampled_at: rollout steps done.
            places: the prompts.
            enough: complete groups that are needed; the others may be stopped, if the configuration says so.
            attempt: 0, or a round of replacement.
        """
        if not self._one_by_one:
            return [self._draw(step, sampled_at, places, enough, f"rollout {attempt}")]
        return [self._draw(step, sampled_at, [p], 1, f"rollout {attempt} {p.position}") for p in places]

    def others(self, prompts: Sequence[Prompt], siblings: int, params: SamplingParams, step: int) -> Draw:
        """Ask for groups of prompts that are not of the stream."""
        if self._engine is None:
            return Draw(step, step, ())
        groups = [GroupRequest(next(self._keys), prompt, siblings) for prompt in prompts]
        sampled = self._engine.submit(groups, params, len(groups)) if groups or self._together else []
        if not self._leads:
            return Draw(step, step, ())
        return Draw(step, step, (), sampled, self._scoring.follow(prompts, sampled))

    def again(self, draw: Draw, enough: int) -> Draw:
        """A draw that was under way when a checkpoint was written; any other one as it is."""
        # An engine of all ranks leaves nothing under way.
        if self._engine is None or self._together or draw.scored is not None:
            return draw
        (asked,) = self.draws(draw.step, draw.sampled_at, draw.places, enough)
        return asked

    def kept(self, step: int, places: Sequence[PromptSlot]) -> set[int]:
        """Which groups go on later, when they are stopped in a step."""
        return {place.position for place in places if step - place.since < self._rollout.partial_rollouts}

    def _draw(self, step: int, sampled_at: int, places: Sequence[PromptSlot], enough: int, purpose: str) -> Draw:
        if self._engine is None:
            return Draw(step, sampled_at, places)
        rollout = self._rollout
        prompts = [self._prompts[place.position] for place in places]
        params = replace(self._params, seed=sampling_seed(self._params.seed, purpose, step, self._dp_rank))
        sampled = self._engine.submit(
            [
                GroupRequest(place.position, prompt, rollout.samples_per_prompt)
                for place, prompt in zip(places, prompts, strict=True)
            ],
            params,
            enough if rollout.abort_slowest else len(places),
            self.kept(step, places),
        )
        if not self._leads:
            return Draw(step, sampled_at, places)
        return Draw(step, sampled_at, places, sampled, self._scoring.follow(prompts, sampled))


def oversampled(count: int, factor: float) -> int:
    """``count * factor`` rounded up, but for what is only the error of a product in binary (100 * 1.1)."""
    return math.ceil(round(count * factor, 6))
