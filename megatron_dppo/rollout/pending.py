"""Groups that were asked for together: which prompts, by which step, and their futures."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

from megatron_dppo.report.clock import Clock
from megatron_dppo.rewards.item import RewardItem, RewardResult
from megatron_dppo.rewards.scorer import RewardScorer
from megatron_dppo.rollout.engine import Sampled
from megatron_dppo.types import (
    Completion,
    Prompt,
    Rollout,
    RolloutGroup,
)


class PromptSlot(NamedTuple):
    """A prompt that was taken from the stream."""

    position: int
    """in the stream"""
    since: int
    """the rollout step that it was first drawn for"""


Scored = Future[list[RolloutGroup | None]]
"""The groups of a draw in order; None = it was stopped before it was complete"""


@dataclass(frozen=True, eq=False)
class Draw:
    """Groups that were asked for together."""

    step: int
    """the rollout step that they are for"""
    sampled_at: int
    """rollout steps that were done when they were asked for"""
    places: Sequence[PromptSlot]
    """of this data-parallel rank"""
    sampled: Sequence[Sampled] = ()
    """in the order of the places; empty on ranks that get their rollouts from another one"""
    scored: Scored | None = None
    """None on those ranks"""

    def wait(self, clock: Clock, part: str) -> list[RolloutGroup | None]:
        """All of this rank's groups; waiting for the engine counts as ``part`` of the clock, for the rest as reward.

        Raises:
            Exception: what failed while they were sampled or scored, as it was.
        """
        assert self.scored is not None
        with clock.part(part):
            for future in self.sampled:
                future.exception()  # raised below, with those of the reward
        with clock.part("reward"):
            return self.scored.result()


class GroupScoring:
    """Scores the groups of a draw, in a thread of its own, as soon as all of them are sampled.

    They are scored in one call: a reward function for batches gets them together, and one that fails on all of several
    groups ends the run.
    """

    def __init__(self, scorer: RewardScorer) -> None:
        self._scorer, self._thread = scorer, ThreadPoolExecutor(1, "scoring")
        self._numbers, self._order = itertools.count(), WeakKeyDictionary[Scored, int]()

    def follow(self, prompts: Sequence[Prompt], sampled: Sequence[Sampled]) -> Scored:
        """The scored groups of ``prompts``, once they are sampled."""
        scored: Scored = Future()
        left = len(sampled)

        def one_is_done(_: Sampled) -> None:  # an engine sets its futures in one thread
            nonlocal left
            left -= 1
            if not left:
                self._thread.submit(self._settle, scored, prompts, sampled)

        for future in sampled:
            future.add_done_callback(one_is_done)
        if not sampled:
            scored.set_result([])
        return scored

    def finished(self, draws: Sequence[Draw]) -> list[Draw]:
        """Those that are scored, in the order in which they were."""
        # Those of a checkpoint were complete before all others.
        done = [(self._order.get(d.scored, -1), i) for i, d in enumerate(draws) if d.scored and d.scored.done()]
        return [draws[i] for _, i in sorted(done)]

    def close(self) -> None:
        """Wait for what runs now; drop the rest."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _settle(self, scored: Scored, prompts: Sequence[Prompt], sampled: Sequence[Sampled]) -> None:
        self._order[scored] = next(self._numbers)
        try:
            scored.set_result(self._score(prompts, [future.result() for future in sampled]))
        except BaseException as error:
            scored.set_exception(error)

    def _score(self, prompts: Sequence[Prompt], found: Sequence[list[Completion] | None]) -> list[RolloutGroup | None]:
        complete = [(prompt, group) for prompt, group in zip(prompts, found, strict=True) if group is not None]
        completions = [completion for _, group in complete for completion in group]
        some = [prompt for prompt, _ in complete]
        scored = iter(score_completions(self._scorer, some, completions, is_batch=len(found) > 1))
        return [None if group is None else next(scored) for group in found]


def score_completions(
    scorer: RewardScorer, prompts: Sequence[Prompt], completions: Sequence[Completion], *, is_batch: bool = True
) -> list[RolloutGroup]:
    """The scored group of each prompt; ``completions`` of siblings side by side, as many of each prompt.

    A completion that has a reward keeps it; the reward function and its shaping are for the others. ``is_batch`` as in
    ``RewardScorer.score``.

    Raises:
        RewardError: see ``RewardScorer.score``.
    """
    n = len(completions) // max(1, len(prompts))
    repeated = [prompt for prompt in prompts for _ in range(n)]
    items = [
        RewardItem(
            prompt=prompt.text,
            completion=completion.text,
            label=prompt.label,
            # A plain string: a scoring process would import torch to unpickle the enum, in the first sample's time.
            metadata={**prompt.metadata, "finish_reason": str(completion.finish_reason)},
            token_ids=tuple(completion.token_ids.tolist()),
            messages=prompt.messages,
        )
        for prompt, completion in zip(repeated, completions, strict=True)
        if not _is_settled(completion)
    ]
    scored = iter(scorer.score(items, is_batch=is_batch))
    results = [_settled(c) if _is_settled(c) else next(scored) for c in completions]
    rollouts = [
        Rollout(
            prompt=prompt,
            completion=completion,
            reward=result.reward,
            reward_failed=result.failed,
            reward_parts=result.parts,
            eval_score=result.eval_score,
        )
        for prompt, completion, result in zip(repeated, completions, results, strict=True)
    ]
    return [RolloutGroup(prompt=p, rollouts=tuple(rollouts[i * n : (i + 1) * n])) for i, p in enumerate(prompts)]


def _is_settled(completion: Completion) -> bool:
    return bool(completion.failure) or completion.reward is not None


def _settled(completion: Completion) -> RewardResult:
    failed = bool(completion.failure)
    return RewardResult(reward=0.0 if failed else completion.reward or 0.0, failed=failed, error=completion.failure)
