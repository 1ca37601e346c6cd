"""The greedy responses of ReMax: which prompts, with which sampling, and in which order beside the others."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_dppo.rollout.engine import GroupRequest, SampledFuture
from megatron_dppo.rollout.scheduler import RolloutScheduler
from megatron_dppo.setup.engines import greedy_sampling_params, rollout_sampling_params
from megatron_dppo.types import SamplingParams
from tests.unit.configs import config
from tests.unit.streams import FakeEngine, FakeScorer, Numbers, Run, positions


class GreedyEngine(FakeEngine):
    """Answers as its parent; a greedy response has the position of its prompt as its only token."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[float, list[int]]] = []

    def submit(
        self, groups: Sequence[GroupRequest], params: SamplingParams, enough: int, keep: Collection[int] = ()
    ) -> list[SampledFuture]:
        self.calls.append((params.temperature, [int(group.prompt.text) for group in groups]))
        if params.temperature:
            return super().submit(groups, params, enough, keep)
        assert all(group.key < 0 and group.siblings == 1 for group in groups) and enough == len(groups)
        assert params == SamplingParams(max_new_tokens=400, temperature=0.0, seed=params.seed)
        renamed = [GroupRequest(int(group.prompt.text), group.prompt, 1) for group in groups]
        return super().submit(renamed, params, enough, keep)


class PromptScorer(FakeScorer):
    """Rewards the only response of a submission's prompt, which is greedy here, by the prompt."""

    def score(self, items: Sequence[Any], *, is_batch: bool) -> list[Any]:
        rewards = super().score(items, is_batch=is_batch)
        prompts = [item.prompt for item in items]
        if len(set(prompts)) < len(prompts):
            return rewards
        return [reward.__class__(reward=float(prompt)) for reward, prompt in zip(rewards, prompts, strict=True)]


def make(staleness: int, **rollout: Any) -> Run:
    """A run of six steps of four prompts, two samples each, and a greedy response."""
    settings = config(
        run={"output_dir": "out", "num_steps": 6},
        train={"max_staleness": staleness, "advantage": "remax"},
        rollout={"prompts_per_step": 4, "samples_per_prompt": 2, "max_new_tokens": 400, "top_p": 0.9, **rollout},
    )
    engine: Any = GreedyEngine()
    groups: Any = SimpleNamespace(replica=None, dp=None)
    stream = RolloutScheduler(
        rollout=settings.rollout,
        params=rollout_sampling_params(settings),
        prompts=Numbers(),
        groups=groups,
        dp_rank=0,
        dp=1,
        engine=engine,
        scorer=PromptScorer(lambda i: i % 3 > 0),
        num_steps=6,
        max_staleness=staleness,
        greedy=greedy_sampling_params(settings.rollout, settings.run.seed),
    )
    return Run(settings, engine, stream)


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("rollout", [{}, {"oversample": 1.5, "dynamic_sampling": True}])
def test_every_group_of_a_step_has_the_greedy_response_to_its_prompt(staleness: int, rollout: dict[str, Any]) -> None:
    run = make(staleness, **rollout)
    collected = run.steps(6)
    for each in collected:
        assert [group.greedy.reward for group in each.groups if group.greedy] == positions(each)
        assert all(len(group.rollouts) == 2 for group in each.groups)
    greedy = [prompts for temperature, prompts in run.engine.calls if not temperature]
    assert greedy == [positions(each) for each in collected], "one call a step, for its groups alone"
    # Before the requests of later steps, which a local engine answers in the order of its calls.
    first = next(i for i, (temperature, _) in enumerate(run.engine.calls) if not temperature)
    later = [min(prompts) for temperature, prompts in run.engine.calls[:first] if temperature]
    assert max(later) < min(p for each in collected[1:] for p in positions(each))
