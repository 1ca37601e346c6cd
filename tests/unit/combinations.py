"""Every combination of what a stream may do, over a real engine, with a judge of every number that would train."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.report.clock import Clock
from megatron_dppo.rewards.item import RewardResult
from megatron_dppo.rollout.batch import CollectedRollouts
from megatron_dppo.rollout.engine import RolloutEngine
from megatron_dppo.rollout.pending import Submission
from megatron_dppo.rollout.saved import SchedulerState, load_rollouts, save_rollouts
from megatron_dppo.rollout.turns import Turns
from megatron_dppo.types import Completion, Prompt, RolloutGroup, SamplingParams
from tests.unit.configs import config
from tests.unit.streams import stream_of

STEPS, PROMPTS, SIBLINGS, TOPK = 4, 2, 2, 3
DRAWING: dict[str, dict[str, Any]] = {
    "exact": {},
    "oversampled": {"oversample": 1.5},
    "stopping": {"oversample": 2.0, "abort_slowest": True},
    "carrying": {"oversample": 2.0, "abort_slowest": True, "partial_rollouts": 2},
    "completed": {"order": "completed"},
}


@dataclass(frozen=True)
class Combination:
    """One way of drawing rollouts."""

    drawing: str
    dynamic: bool
    staleness: int
    turns: bool
    evaluation: bool

    def __str__(self) -> str:
        words = [self.drawing, f"staleness{self.staleness}"]
        return "-".join(words + [name for name in ("dynamic", "turns", "evaluation") if getattr(self, name)])

    @property
    def oldest(self) -> int:
        """Steps that a token may be old."""
        return self.staleness + DRAWING[self.drawing].get("partial_rollouts", 0)


def combinations(*, servers: bool) -> list[Combination]:
    """All of them; ``completed`` is for servers and a staleness of two."""
    every = (
        Combination(*c) for c in itertools.product(DRAWING, (False, True), (0, 1, 2), (False, True), (False, True))
    )
    return [c for c in every if c.drawing != "completed" or (servers and c.staleness == 2)]


async def with_tool(prompt: Prompt, turns: Turns) -> Completion:
    """One to three turns of two tokens with a tool's two tokens after each, and a last turn."""
    for _ in range(1 + int(prompt.prompt_id) % 3):
        await turns.sample(max_new_tokens=2)
        turns.append([5, 6])
    await turns.sample()
    return turns.finish()


@dataclass
class Loop:
    """The loop of a run without training.

    Args:
        combination: how it draws.
        engine: real.
        kind: ``rollout.engine``.
        prompt_at: the prompts.
        publish: gives the engine the weights of a version.
        reference: log-probabilities ``[R, V]`` of a version for prompt and response, by another program; NaN where it
            cannot tell.
        limit: longest response.
    """

    combination: Combination
    engine: RolloutEngine
    kind: str
    prompt_at: Callable[[int], Prompt]
    publish: Callable[[int], None]
    reference: Callable[[int, tuple[int, ...], tuple[int, ...]], Tensor]
    limit: int
    step: int = 0

    def __post_init__(self) -> None:
        how = self.combination
        rollout = {
            "engine": self.kind,
            "prompts_per_step": PROMPTS,
            "samples_per_prompt": SIBLINGS,
            "max_new_tokens": self.limit,
            "dynamic_sampling": how.dynamic,
            "generate": "unused:function" if how.turns else None,
            **DRAWING[how.drawing],
        }
        self.config = config(
            run={"output_dir": "out", "num_steps": STEPS},
            train={"max_staleness": how.staleness},
            loss={"name": "dppo_topk_tv", "topk": TOPK},
            rollout=rollout,
        )
        groups: Any = SimpleNamespace(replica=None, dp=None)
        scorer: Any = _Scorer()
        self.stream = stream_of(self.config, _Prompts(self.prompt_at), groups, 0, 1, self.engine, scorer)
        self.evaluation: Submission | None = None

    def steps(self, until: int) -> Iterator[CollectedRollouts]:
        """Each step's groups, checked."""
        self.publish(self.step)
        while self.step < until:
            if self.combination.evaluation:
                params = SamplingParams(max_new_tokens=self.limit, temperature=0.0)
                self.evaluation = self.stream.submit([self.prompt_at(i) for i in range(3)], 1, params, self.step)
            collected = self.stream.collect(self.step, self.step, Clock())
            self._check(collected)
            self.stream.wait_before_update(Clock())
            self._check_evaluation()
            self.step += 1
            self.publish(self.step)
            yield collected

    def save(self, folder: Path) -> None:
        """As a checkpoint does."""
        folder.mkdir()
        save_rollouts(self.stream.stored_rollouts(), 0, folder)
        self.saved = self.stream.state()

    def resume(self, other: Loop, folder: Path) -> None:
        """Go on where another run was saved."""
        saved = SchedulerState.from_json(other.saved.to_json())
        self.step = other.step
        self.stream.restore(saved, load_rollouts(saved, 1, 0, folder, self.prompt_at))

    def check_prompts(self, trained: list[CollectedRollouts]) -> None:
        """Check that each prompt that was taken is trained on, waiting, or left out, once."""
        saved = self.stream.state()
        there = [int(group.prompt.prompt_id) for c in trained for group in c.groups]
        there += [place.position for places in saved.waiting for place in places]
        there += [place.position for submissions in saved.submissions for each in submissions for place in each.slots]
        assert len(there) == len(set(there)) and all(p < saved.cursor for p in there)
        assert saved.cursor - len(there) == sum(sum(c.dropped_groups.values()) for c in trained)

    def _check(self, collected: CollectedRollouts) -> None:
        assert len(collected.groups) == PROMPTS
        for group, age in zip(collected.groups, collected.ages, strict=True):
            assert len(group.rollouts) == SIBLINGS
            oldest = max(self._check_completion(group.prompt, r.completion) for r in group.rollouts)
            assert age == oldest <= self.combination.oldest
        if not self.combination.oldest:
            assert collected.token_ages.keys() == {0}

    def _check_completion(self, prompt: Prompt, c: Completion) -> int:
        """Each number against the reference; returns the age of the oldest token."""
        assert c.logprobs is not None and c.topk_logprobs is not None and c.topk_token_ids is not None
        assert 0 < len(c.token_ids) == len(c.logprobs) <= self.limit
        assert c.token_ids.dtype == torch.int32 and (c.loss_mask is None or c.loss_mask.dtype == torch.bool)
        covered = [i for span in c.policy_versions for i in range(span.start, span.end)]
        given = [] if c.loss_mask is None else (~c.loss_mask).nonzero().squeeze(1).tolist()
        assert sorted([*covered, *given]) == list(range(len(c.token_ids)))
        assert c.token_ids[given].tolist() == ([5, 6] * 3 * self.combination.turns)[: len(given)]
        for version, start, end, _server in c.policy_versions:
            right = self.reference(version, prompt.token_ids, tuple(c.token_ids.tolist()))[start:end]
            known = ~right[:, 0].isnan()
            own = right.gather(1, c.token_ids[start:end, None].long()).squeeze(1)
            torch.testing.assert_close(c.logprobs[start:end][known], own[known], atol=2e-5, rtol=0)
            best = right.gather(1, c.topk_token_ids[start:end, :TOPK].long())
            torch.testing.assert_close(c.topk_logprobs[start:end, :TOPK][known], best[known], atol=2e-5, rtol=0)
        return self.step - min(span.policy_version for span in c.policy_versions)

    def _check_evaluation(self) -> None:
        if self.evaluation is None:
            return
        groups = self.stream.wait_for(self.evaluation, Clock())
        assert [int(group.prompt.prompt_id) for group in groups] == [0, 1, 2]
        for group in groups:
            assert {span.policy_version for span in group.rollouts[0].completion.policy_versions} == {self.step}
        self.evaluation = None


@dataclass(frozen=True)
class _Prompts:
    prompt_at: Callable[[int], Prompt]

    def __getitem__(self, position: int, /) -> Prompt:
        return self.prompt_at(position)


class _Scorer:
    """By a rule that leaves some groups without signal."""

    def score(self, items: Any, *, is_batch: bool) -> list[Any]:
        return [RewardResult(reward=float(sum(i.token_ids) % 3 > 0)) for i in items]


def numbers(groups: list[RolloutGroup]) -> list[Any]:
    """All that trains, for ``columns.same``."""
    return [(g.prompt.prompt_id, r.reward, replace(r.completion, text="")) for g in groups for r in g.rollouts]
