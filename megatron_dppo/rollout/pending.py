"""Submitted groups, their futures, and the thread that scores them."""

import itertools
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from megatron_dppo.report.clock import Clock
from megatron_dppo.report.printable import printable
from megatron_dppo.rewards.item import RewardItem, RewardResult
from megatron_dppo.rewards.scorer import RewardScorer
from megatron_dppo.rollout.engine import SampledFuture
from megatron_dppo.types import Completion, Prompt, Rollout, RolloutGroup


class PromptSlot(NamedTuple):
    """A prompt that was taken from the prompt stream."""

    position: int
    """Index in the prompt stream."""
    first_step: int
    """Rollout step that the prompt was first submitted for."""


ScoredFuture = Future[list[RolloutGroup | None]]
"""Scored groups of a submission, in order. None: the group was canceled before it was complete."""


@dataclass(frozen=True, eq=False)
class Submission:
    """Groups that were submitted to the engine together."""

    step: int
    """Rollout step that the groups are for."""
    sampled_at: int
    """Number of rollout steps that were done at submission."""
    slots: Sequence[PromptSlot]
    """Prompts of this data-parallel rank."""
    sampled: Sequence[SampledFuture] = ()
    """Futures of the sampled groups, in the order of ``slots``. Empty on ranks that receive their rollouts from another
    rank."""
    scored: ScoredFuture | None = None
    """Scored groups. None on ranks that receive their rollouts from another rank."""

    def wait(self, clock: Clock, part: str) -> list[RolloutGroup | None]:
        """Wait for the groups and return them, or raise the exception that sampling or scoring raised.

        The wait for the engine counts as ``part`` of the clock, the wait for scores as ``reward``.
        """
        assert self.scored is not None
        with clock.part(part):
            for future in self.sampled:
                # Only waits: ``scored.result()`` below raises the same exception.
                future.exception()
        with clock.part("reward"):
            return self.scored.result()


class GroupScoring:
    """Thread that scores the groups of a submission as soon as all of them are sampled.

    The groups of a submission are scored in one call: a batched reward function receives them together, and a reward
    that fails on all of several groups ends the run.
    """

    def __init__(self, scorer: RewardScorer) -> None:
        self._scorer = scorer
        # One thread, so that submissions are numbered in the order in which they are scored.
        self._thread = ThreadPoolExecutor(1, "scoring")
        self._numbers = itertools.count()
        self._order = WeakKeyDictionary[ScoredFuture, int]()
        self._has_warned = False

    def score_when_sampled(self, prompts: Sequence[Prompt], sampled: Sequence[SampledFuture]) -> ScoredFuture:
        """Return a future of the scored groups of ``prompts``."""
        scored: ScoredFuture = Future()
        remaining = len(sampled)

        # An engine sets its futures in one thread, so the counter needs no lock.
        def count_down(_: SampledFuture) -> None:
            nonlocal remaining
            remaining -= 1
            if not remaining:
                self._thread.submit(self._settle, scored, prompts, sampled)

        for future in sampled:
            future.add_done_callback(count_down)
        if not sampled:
            scored.set_result([])
        return scored

    def select_scored(self, submissions: Sequence[Submission]) -> list[Submission]:
        """Return the submissions that are scored, in the order in which they were."""
        # Submissions that a checkpoint restored were complete before all others and have no number.
        done = [(self._order.get(s.scored, -1), i) for i, s in enumerate(submissions) if s.scored and s.scored.done()]
        return [submissions[i] for _, i in sorted(done)]

    def close(self) -> None:
        """Wait for the score in progress and drop the others."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _settle(self, scored: ScoredFuture, prompts: Sequence[Prompt], sampled: Sequence[SampledFuture]) -> None:
        """Score sampled groups and set the result or the exception of ``scored``."""
        self._order[scored] = next(self._numbers)
        try:
            scored.set_result(self._score(prompts, [future.result() for future in sampled]))
        # SystemExit of a reward function too: a future without a result would be waited for forever.
        except BaseException as error:
            scored.set_exception(error)

    def _score(
        self, prompts: Sequence[Prompt], sampled: Sequence[list[Completion] | None]
    ) -> list[RolloutGroup | None]:
        complete = [(prompt, group) for prompt, group in zip(prompts, sampled, strict=True) if group is not None]
        completions = [completion for _, group in complete for completion in group]
        complete_prompts = [prompt for prompt, _ in complete]
        # A single group may fail alone; the scheduler checks the groups of a step together.
        groups = score_completions(
            self._scorer, complete_prompts, completions, is_batch=len(sampled) > 1, on_failure=self._warn_once
        )
        remaining = iter(groups)
        return [None if group is None else next(remaining) for group in sampled]

    def _warn_once(self, failed: Sequence[RewardResult], num_results: int) -> None:
        """Print the first failed reward of this rank; the metrics count all of them."""
        if self._has_warned:
            return
        self._has_warned = True
        print(
            f"warning  rewards: {len(failed)} of {num_results} samples failed. First error: "
            f"{printable(failed[0].error)}. Failed samples give no gradient; rollout/reward_failed_fraction counts "
            "them",
            file=sys.stderr,
            flush=True,
        )


def score_completions(
    scorer: RewardScorer,
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    *,
    is_batch: bool = True,
    on_failure: Callable[[Sequence[RewardResult], int], None] | None = None,
) -> list[RolloutGroup]:
    """Return the scored group of each prompt.

    Every prompt has the same number of completions, siblings side by side. One that has a reward keeps it, unshaped.
    ``on_failure`` is called with the failed results and the number of all results.
    """
    # A collective engine is called without prompts, too.
    siblings = len(completions) // max(1, len(prompts))
    repeated_prompts = [prompt for prompt in prompts for _ in range(siblings)]
    items = [
        RewardItem(
            prompt=prompt.text,
            completion=completion.text,
            label=prompt.label,
            metadata={**prompt.metadata, **_response_metadata(completion)},
            source=prompt.source,
            token_ids=tuple(completion.token_ids.tolist()),
            messages=prompt.messages,
            max_new_tokens=None if prompt.limits is None else prompt.limits.max_new_tokens,
        )
        for prompt, completion in zip(repeated_prompts, completions, strict=True)
        if not _has_result(completion)
    ]
    scored = iter(scorer.score(items, is_batch=is_batch))
    results = [_existing_result(c) if _has_result(c) else next(scored) for c in completions]
    if on_failure is not None and (failed := [result for result in results if result.failed]):
        on_failure(failed, len(results))
    rollouts = [
        Rollout(
            prompt=prompt,
            completion=completion,
            reward=result.reward,
            reward_failed=result.failed,
            reward_parts=result.parts,
            eval_score=result.eval_score,
        )
        for prompt, completion, result in zip(repeated_prompts, completions, results, strict=True)
    ]
    return [
        RolloutGroup(prompt=prompt, rollouts=tuple(rollouts[i * siblings : (i + 1) * siblings]))
        for i, prompt in enumerate(prompts)
    ]


def _response_metadata(completion: Completion) -> dict[str, Any]:
    """Return what reward functions get of a response besides its text."""
    # A plain string: a scoring process would import torch to unpickle the enum, in the first sample's time.
    metadata: dict[str, Any] = {"finish_reason": str(completion.finish_reason)}
    if completion.segment_texts:
        metadata["segments"] = list(completion.segment_texts)
    return metadata


def _has_result(completion: Completion) -> bool:
    """Return True if generation has set a reward or failed, so that the reward function is not called."""
    return bool(completion.failure) or completion.reward is not None


def _existing_result(completion: Completion) -> RewardResult:
    failed = bool(completion.failure)
    return RewardResult(
        reward=0.0 if failed else completion.reward or 0.0,
        parts={} if failed else completion.reward_parts,
        failed=failed,
        error=completion.failure,
    )
