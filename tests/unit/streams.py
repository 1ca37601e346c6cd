"""A stream of numbers as prompts, over engines that answer by a rule, and the loop around it without training."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from columns import ids, logs
from megatron_dppo.config.schema import Config
from megatron_dppo.report.clock import Clock
from megatron_dppo.rewards.item import RewardResult
from megatron_dppo.rollout.batch import CollectedRollouts
from megatron_dppo.rollout.engine import GroupRequest, GroupState, SampledFuture
from megatron_dppo.rollout.saved import SchedulerState, describe_incompatibility
from megatron_dppo.rollout.scheduler import RolloutScheduler
from megatron_dppo.setup.engines import rollout_sampling_params
from megatron_dppo.types import Completion, Prompt, SamplingParams
from tests.unit.configs import config


class Numbers:
    """An endless stream of prompts whose text is their position."""

    def __getitem__(self, index: int) -> Prompt:
        return Prompt(prompt_id=f"row:{index}", text=str(index), token_ids=(index, 1), label="")


class FakeEngine:
    """Answers with the seed, in a thread of its own; notices new weights in the middle of its work."""

    def __init__(self) -> None:
        self.policy_version, self.busy = -1, 0
        self.asked: list[list[int]] = []
        self._thread = ThreadPoolExecutor(1)

    def submit(
        self, groups: Sequence[GroupRequest], params: SamplingParams, enough: int, keep: Collection[int] = ()
    ) -> list[SampledFuture]:
        assert enough == len(groups) and [g.prompt.text for g in groups] == [str(g.key) for g in groups]
        self.asked.append([group.key for group in groups])
        futures: list[SampledFuture] = [Future() for _ in groups]
        self.busy += 1
        self._thread.submit(self._answer, groups, params, futures)
        return futures

    def _answer(self, groups: Sequence[GroupRequest], params: SamplingParams, futures: Sequence[SampledFuture]) -> None:
        version, place = self.policy_version, 0
        result = []
        for group in groups:
            result.append([self._completion(params.seed, place + i, version) for i in range(group.siblings)])
            place += group.siblings
        self.busy -= 1
        for future, completions in zip(futures, result, strict=True):
            future.set_result(completions)

    def _completion(self, seed: int, place: int, version: int) -> Completion:
        return Completion(
            token_ids=ids([seed, place]),
            logprobs=logs([-0.1, -math.inf]),
            finish_reason="stop",  # type: ignore[arg-type]
            policy_version=version,
            text="",
        )

    def unfinished(self) -> dict[int, GroupState]:
        return {}

    def restore(self, groups: Mapping[int, GroupState]) -> None:
        assert not groups

    def update_weights(self, version: int) -> None:
        assert not self.busy, "the engine samples and gets new weights"
        self.policy_version = version


class FakeScorer:
    """Groups of the prompts for which ``has_signal`` says so get two different rewards."""

    description = "reward.function = 'math'"

    def __init__(self, has_signal: Callable[[int], bool] = lambda i: True) -> None:
        self._has_signal = has_signal

    def score(self, items: Sequence[Any], *, is_batch: bool) -> list[Any]:
        return [
            RewardResult(reward=float(i % 2 if self._has_signal(int(item.prompt)) else 0))
            for i, item in enumerate(items)
        ]


@dataclass
class Run:
    """As much of a run as a stream sees."""

    config: Any
    engine: Any
    stream: RolloutScheduler
    step: int = 0

    def steps(self, until: int) -> list[CollectedRollouts]:
        """The loop without training: the version of the weights is the number of steps done."""
        self.engine.update_weights(self.step)
        result = []
        while self.step < until:
            result.append(self.stream.collect(self.step, self.engine.policy_version, Clock()))
            self.stream.wait_before_update(Clock())
            self.step += 1
            self.engine.update_weights(self.step)
        return result


def make(
    engine: Any,
    scorer: Any,
    *,
    staleness: int = 0,
    dp: int = 1,
    rank: int = 0,
    rollout: Mapping[str, Any],
) -> Run:
    """A run of six steps of four prompts a rank, two answers each."""
    sizes = {"prompts_per_step": 4 * dp, "samples_per_prompt": 2, "max_new_tokens": 400}
    result = config(
        run={"output_dir": "out", "num_steps": 6}, train={"max_staleness": staleness}, rollout=sizes | dict(rollout)
    )
    groups: Any = SimpleNamespace(replica=None, dp=None)
    return Run(result, engine, stream_of(result, Numbers(), groups, rank, dp, engine, scorer))


def stream_of(
    config: Config, prompts: Any, groups: Any, rank: int, dp: int, engine: Any, scorer: Any
) -> RolloutScheduler:
    """The stream of a configuration."""
    return RolloutScheduler(
        rollout=config.rollout,
        params=rollout_sampling_params(config),
        prompts=prompts,
        groups=groups,
        dp_rank=rank,
        dp=dp,
        engine=engine,
        scorer=scorer,
        num_steps=config.run.num_steps,
        max_staleness=config.train.max_staleness,
    )


def unusable(saved: SchedulerState, was: Mapping[str, Any], config: Config) -> str:
    """``describe_incompatibility`` for a configuration."""
    return describe_incompatibility(
        saved,
        was,
        config.train,
        {"data": config.data, "rollout": config.rollout, "agent": config.agent, "reward": config.reward},
    )


def versions(collected: CollectedRollouts) -> list[int]:
    return [group.rollouts[0].completion.policy_version for group in collected.groups]


def positions(collected: CollectedRollouts) -> list[int]:
    return [int(group.prompt.text) for group in collected.groups]


def values(collected: CollectedRollouts) -> dict[str, float]:
    return {name: metric.numerator / metric.denominator for name, metric in collected.metrics(1).items()}
