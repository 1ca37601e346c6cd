"""A simulated server that lies in one way, judged by the guard and the sampling test as in a step of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_dppo.config.schema import Config
from megatron_dppo.errors import TrainingStopped
from megatron_dppo.parallel.groups import ParallelGroups
from megatron_dppo.policy.server_sums import TokenSource, sum_tokens
from megatron_dppo.rollout.batch import CollectedRollouts
from megatron_dppo.rollout.repeats import repeat_sums
from megatron_dppo.run.guard_state import GuardState
from megatron_dppo.types import Completion, FinishReason, Prompt, Rollout, RolloutGroup, VersionSpan
from megatron_dppo_engines.sampling_sums import sum_ranks
from tests.unit.configs import config
from tests.unit.run.simulated_servers import _log_softmax as log_softmax

VOCAB = 64
URL = "http://liar"
Dtype = Literal["fp32", "bf16"]
Floats = NDArray[np.float64]
ROUNDING = {"fp32": 1e-6, "bf16": 0.015}
"""Standard deviation of the server's logits from the trainer's."""
PROMPTS, SIBLINGS, LENGTH = 25, 4, 32


@dataclass(frozen=True)
class Answers:
    """Numbers that the server returns for a step. Each token is a row."""

    tokens: NDArray[np.int64]
    """Shape [num_tokens]."""
    sampled_from: Floats
    """Log-probabilities that the server computes. Shape [num_tokens, VOCAB]."""
    policy: Floats
    """Those of the trainer. Shape [num_tokens, VOCAB]."""
    reported: Floats
    """Log-probabilities that the server reports. Shape [num_tokens, VOCAB]."""
    changed: Floats | None = None
    """Those that it reports of the sampled tokens, if they are others. Shape [num_tokens]."""

    @property
    def logprobs(self) -> Floats:
        """Reported log-probabilities of the sampled tokens. Shape [num_tokens]."""
        if self.changed is not None:
            return self.changed
        chosen: Floats = self.reported[np.arange(len(self.tokens)), self.tokens]
        return chosen

    def with_logprobs(self, logprobs: Floats) -> Answers:
        """Return the same with other numbers of the sampled tokens."""
        return replace(self, changed=np.minimum(logprobs, 0.0))


Random = np.random.Generator
Lie = Callable[[Random, Answers], Answers]


def draw(random: Random, log_p: Floats) -> NDArray[np.int64]:
    """Return a token of each row."""
    below = np.cumsum(np.exp(log_p), 1)
    drawn: NDArray[np.int64] = (random.random((len(log_p), 1)) * below[:, -1:] > below).sum(1)
    return np.minimum(drawn, VOCAB - 1)


def honest(random: Random, dtype: Dtype) -> Answers:
    """Return the answers of an honest server: half of the distributions are nearly certain."""
    size = PROMPTS * SIBLINGS * LENGTH
    sharpness = np.where(random.random(size) < 0.5, random.uniform(4, 8, size), random.uniform(0.5, 3, size))
    logits = random.normal(size=(size, VOCAB)) * sharpness[:, None]
    rounded = log_softmax(logits + random.normal(size=logits.shape) * ROUNDING[dtype])
    return Answers(draw(random, rounded), rounded, log_softmax(logits), rounded)


def judge(answers: Answers, state: GuardState, dtype: Dtype) -> str:
    """Return what a step of the run says of the only server. Empty if it trains."""
    settings = settings_of(dtype)
    num_tokens = len(answers.tokens)
    best = answers.reported.argmax(1)
    best_logprobs = answers.reported[np.arange(num_tokens), best]
    ranks = sum_ranks(answers.tokens.astype(np.int32), best[:, None].astype(np.int32), np.exp(best_logprobs)[:, None])
    groups = _groups(answers)
    repeats = repeat_sums(groups)
    collected = CollectedRollouts(
        groups=groups, ages=[0] * len(groups), dropped_groups={}, token_ages={0: num_tokens}, repeats=repeats
    )
    rows = torch.from_numpy(answers.policy[np.arange(num_tokens), answers.tokens])
    entropy = torch.from_numpy(-(np.exp(answers.policy) * answers.policy).sum(1))
    reported = torch.from_numpy(answers.logprobs)
    parts = [slice(i, i + LENGTH) for i in range(0, num_tokens, LENGTH)]
    first, *others = [
        sum_tokens(reported[p], rows[p], entropy=entropy[p], divergence=torch.zeros(LENGTH).double()) for p in parts
    ]
    sums = reduce(add, others, first)
    try:
        guard = state.begin_step(settings, ParallelGroups(), collected, {URL: ranks})
        guard({"abs_prob_diff": sums.mean("prob_diff")}, {TokenSource(URL, False): sums})
    except TrainingStopped as stop:
        return str(stop)
    return ""


def settings_of(dtype: Dtype) -> Config:
    """Return a configuration with one server."""
    return config(
        model={"dtype": dtype},
        rollout={"dtype": dtype, "engine": "sglang", "servers": {"urls": [URL]}},
        train={"max_first_prob_diff": "auto"},
    )


def _groups(answers: Answers) -> list[RolloutGroup]:
    logprobs = torch.from_numpy(answers.logprobs).float()
    tokens = torch.from_numpy(answers.tokens).int()
    groups = []
    for number in range(PROMPTS):
        prompt = Prompt(prompt_id=str(number), text="p", token_ids=(1,), label="")
        rollouts = []
        for sibling in range(SIBLINGS):
            where = slice((number * SIBLINGS + sibling) * LENGTH, (number * SIBLINGS + sibling + 1) * LENGTH)
            completion = Completion(
                token_ids=tokens[where],
                logprobs=logprobs[where],
                finish_reason=FinishReason.STOP,
                policy_version=0,
                policy_versions=(VersionSpan(0, 0, LENGTH, URL),),
                text="",
            )
            rollouts.append(Rollout(prompt=prompt, completion=completion, reward=0.0))
        groups.append(RolloutGroup(prompt=prompt, rollouts=tuple(rollouts)))
    return groups


def words_of_stop(lie: Lie, dtype: Dtype, *, seed: int = 0, steps: int = 20) -> tuple[int, str]:
    """Return step and text of the stop. The probe is told the truth.

    Raises:
        AssertionError: No step stopped.
    """
    random = np.random.default_rng(seed)
    settings = settings_of(dtype)
    state = GuardState.from_config(settings.rollout, settings.train)
    truth = honest(random, dtype)
    at = np.arange(len(truth.tokens)), truth.tokens
    state.history.probed[URL] = float(np.abs(np.exp(truth.policy[at]) - np.exp(truth.reported[at])).mean())
    for step in range(1, steps + 1):
        if text := judge(lie(random, honest(random, dtype)), state, dtype):
            return step, text
    raise AssertionError("the lie trains")
