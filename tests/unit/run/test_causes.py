"""Lies of servers and the words of the cause: the guard, the sampling test and the probe judge simulated servers."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from megatron_dppo.weights.probe_requests import ProbeError
from megatron_dppo.weights.verdict import verify_response
from tests.unit.policies import TOKENS, VOCAB, Policy, ask
from tests.unit.run.lying_servers import (
    LENGTH,
    SIBLINGS,
    Answers,
    Dtype,
    Floats,
    Lie,
    Random,
    draw,
    log_softmax,
    words_of_stop,
)
from tests.unit.run.lying_servers import VOCAB as STEP_VOCAB

DTYPES: tuple[Dtype, ...] = ("fp32", "bf16")


def sampled(change: Callable[[Floats], Floats]) -> Lie:
    """Sample from a changed distribution, and report the right one."""
    return lambda random, truth: replace(truth, tokens=draw(random, change(truth.sampled_from)))


def tempered(temperature: float) -> Callable[[Floats], Floats]:
    return lambda table: log_softmax(table / temperature)


def top_k(count: int) -> Callable[[Floats], Floats]:
    return lambda table: log_softmax(np.where(table >= np.sort(table, 1)[:, -count][:, None], table, -np.inf))


def top_p(mass: float) -> Callable[[Floats], Floats]:
    def change(table: Floats) -> Floats:
        order = np.argsort(-table, 1)
        best_first = np.take_along_axis(table, order, 1)
        p = np.exp(best_first)
        allowed = np.empty_like(table)
        np.put_along_axis(allowed, order, np.where(np.cumsum(p, 1) - p < mass, best_first, -np.inf), 1)
        return log_softmax(allowed)

    return change


def without_a_quarter(table: Floats) -> Floats:
    return log_softmax(np.where(np.arange(STEP_VOCAB) < STEP_VOCAB * 3 // 4, table, -np.inf))


def report_over_fewer_tokens(random: Random, truth: Answers) -> Answers:
    fewer = replace(truth, reported=without_a_quarter(truth.reported))
    # A token outside of these has to have some number.
    return replace(fewer, changed=np.where(np.isfinite(fewer.logprobs), fewer.logprobs, truth.logprobs))


def flat(sharpness: float) -> Lie:
    """Report log-probabilities over fewer tokens, of a policy to which all tokens are about equally probable."""

    def lie(random: Random, truth: Answers) -> Answers:
        table = log_softmax(random.normal(size=truth.policy.shape) * sharpness)
        return report_over_fewer_tokens(random, Answers(draw(random, table), table, table, table))

    return lie


def report_at(temperature: float) -> Lie:
    return lambda random, truth: replace(truth, reported=log_softmax(truth.reported / temperature))


def copy_the_first_sibling(random: Random, truth: Answers) -> Answers:
    index = np.arange(len(truth.tokens))
    first = index // (SIBLINGS * LENGTH) * (SIBLINGS * LENGTH) + index % LENGTH
    return Answers(truth.tokens[first], truth.sampled_from[first], truth.policy[first], truth.reported[first])


def permute(random: Random, truth: Answers) -> Answers:
    rows = [random.permutation(row) for row in truth.logprobs.reshape(-1, LENGTH)]
    return truth.with_logprobs(np.concatenate(rows))


def add_noise(size: float) -> Lie:
    return lambda random, truth: truth.with_logprobs(truth.logprobs + random.normal(size=len(truth.tokens)) * size)


def lower_one_token(random: Random, truth: Answers) -> Answers:
    rows = truth.logprobs.reshape(-1, LENGTH).copy()
    rows[np.arange(len(rows)), random.integers(LENGTH, size=len(rows))] = -25.0
    return truth.with_logprobs(rows.reshape(-1))


def other_weights(size: float) -> Lie:
    """Sample from other weights and report those: a cache of earlier responses, or a LoRA without its adapter."""

    def lie(random: Random, truth: Answers) -> Answers:
        table = log_softmax(truth.policy + random.normal(size=truth.policy.shape) * size)
        return Answers(draw(random, table), table, truth.policy, table)

    return lie


class Cause(NamedTuple):
    """Words that a message must have, and words that would name another cause."""

    words: str
    wrong: str = ""


FILTER = "a filter (top-p, top-k, min-p)"
OTHER_TOKENS = "over other tokens than it samples from"
MORE_PROBABLE = "samples of the policy"
IN_A_STEP: dict[str, tuple[Lie, Cause]] = {
    "temperature .5": (sampled(tempered(0.5)), Cause("lower temperature", "copies|higher")),
    "temperature .8": (sampled(tempered(0.8)), Cause("lower temperature", "copies|higher")),
    "temperature 1.3": (sampled(tempered(1.3)), Cause("a higher temperature", r"filter \(top-p|copies|lower")),
    "top-p .7": (sampled(top_p(0.7)), Cause(re.escape(FILTER), "copies|higher")),
    "top-p .9": (sampled(top_p(0.9)), Cause(re.escape(FILTER), "copies|higher")),
    "top-k 4": (sampled(top_k(4)), Cause(re.escape(FILTER), "copies|higher")),
    "greedy": (sampled(tempered(1e-4)), Cause("greedy decoding: ", "copies:|higher")),
    "copies": (copy_the_first_sibling, Cause("copies: .*a cache of responses", "filter|temperature")),
    "log-probabilities over fewer tokens": (report_over_fewer_tokens, Cause(OTHER_TOKENS, "copies|lower temperature")),
    "log-probabilities over fewer tokens, flat": (flat(0.1), Cause("over a smaller vocabulary", "copies|filter")),
    "banned tokens": (sampled(without_a_quarter), Cause(f"{OTHER_TOKENS} .*banned tokens", "copies|lower temperature")),
    "log-probabilities at temperature .8": (report_at(0.8), Cause("a higher temperature than it reports", "copies")),
    "permuted numbers": (permute, Cause("of (another position|other tokens)", "copies|filter")),
    "noise of .1 nats": (add_noise(0.1), Cause("noise", "copies|filter")),
    "noise of 1 nat": (add_noise(1.0), Cause("noise", "copies|filter")),
    "one token of each response at -25": (lower_one_token, Cause("too low", "copies|filter")),
    ".1 nats lower": (lambda _, t: t.with_logprobs(t.logprobs - 0.1), Cause("shift", "copies|filter")),
    "old weights": (other_weights(0.3), Cause("other weights than were sent", "copies:|filter")),
    "LoRA missing": (other_weights(2.0), Cause("other weights .*a missing adapter", "copies:|filter")),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lie", IN_A_STEP)
def test_the_stop_of_a_step_names_the_lie(lie: str, dtype: Dtype) -> None:
    change, cause = IN_A_STEP[lie]
    step, text = words_of_stop(change, dtype)
    assert step <= 3 and re.search(cause.words, text), text
    # The settings of servers name filters, whatever the cause is.
    assert not cause.wrong or not re.search(cause.wrong, text.partition("Give the URL")[0]), text


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_honest_server_trains(dtype: Dtype) -> None:
    with pytest.raises(AssertionError, match="the lie trains"):
        words_of_stop(lambda _, truth: truth, dtype, steps=5)


@dataclass(frozen=True)
class OtherWeights(Policy):
    """A policy whose server has other weights."""

    size: float = 0.0
    """Standard deviation of the logits between both, relative to their own."""

    def server_logits(self) -> torch.Tensor:
        noise = torch.randn(TOKENS, VOCAB, generator=self._generator(7), dtype=torch.float64)
        return super().server_logits() + noise * self.size * self.sharpness


Change = Callable[[Policy, dict[str, Any], Random], None]


def reported_from(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Report log-probabilities of changed logits; tokens that they exclude keep their number."""

    def lie(policy: Policy, columns: dict[str, Any], _: Random) -> None:
        table = change(policy.server_logits() / policy.temperature).log_softmax(-1)
        chosen = table.gather(1, policy.tokens()[:, None]).squeeze(1).numpy()
        columns["logprobs"] = np.where(np.isfinite(chosen), chosen, columns["logprobs"])

    return lie


def numbers(change: Callable[[Random, Floats], Floats]) -> Change:
    return lambda _, columns, random: columns.update(logprobs=np.minimum(change(random, columns["logprobs"]), 0.0))


NEVER = float("-inf")
TO_THE_PROBE: dict[str, tuple[Policy, Change | None, int, Cause]] = {
    # policy, change of what it reports, version, words
    "log-probabilities at temperature .5": (
        Policy(2.0),
        reported_from(lambda logits: logits * 0.7 / 0.5),
        3,
        Cause("another temperature", "filtered|stale"),
    ),
    "top-k": (
        Policy(2.0),
        reported_from(lambda x: x.masked_fill(x < x.topk(8).values[:, -1:], NEVER)),
        0,
        Cause("filtered distribution: .*top-k", "stale|wrong weights"),
    ),
    "a smaller vocabulary": (
        Policy(2.0),
        reported_from(lambda x: x.masked_fill(torch.arange(VOCAB) >= 37, NEVER)),
        0,
        Cause("over a smaller vocabulary", "stale|wrong weights"),
    ),
    "permuted numbers": (
        Policy(2.0),
        numbers(lambda random, x: random.permutation(x)),
        3,
        Cause("log-probabilities in another order", "wrong weights|filter"),
    ),
    "noise of .1 nats": (
        Policy(2.0),
        numbers(lambda random, x: x + 0.1 * random.normal(size=len(x))),
        3,
        Cause("something in between .*noise", "filter"),
    ),
    "one token at -25": (
        Policy(2.0),
        numbers(lambda _, x: np.where(np.arange(len(x)) == 9, -25.0, x)),
        3,
        Cause("of some tokens: .*its weights are right", "wrong weights|filter"),
    ),
    "old weights": (OtherWeights(2.0, size=0.1), None, 3, Cause("wrong weights: .*were synced", "some tokens|order:")),
    "LoRA missing": (OtherWeights(2.0, size=0.3), None, 3, Cause("wrong weights: .*adapter of a LoRA", "some tokens")),
    "a stale cache": (OtherWeights(2.0, size=0.1), None, 3, Cause("in between .*a cache", "some tokens|filter")),
}
PASSES_IN_BF16 = {
    "noise of .1 nats",
    "one token at -25",
    "old weights",
    "a stale cache",
    "a smaller vocabulary",
}
"""Below the rounding of 64 tokens (docs/probe.md): the guard sees them in a step."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lie", TO_THE_PROBE)
def test_the_probe_names_the_lie(lie: str, dtype: Dtype) -> None:
    policy, change, version, cause = TO_THE_PROBE[lie]
    policy = replace(policy, dtype=dtype)
    random = np.random.default_rng(0)
    response, expected, readings = ask(policy, lambda columns: change and change(policy, columns, random))
    response = replace(response, info=replace(response.info, policy_version=version))
    if dtype == "bf16" and lie in PASSES_IN_BF16:
        verify_response(response, expected, readings)
        return
    with pytest.raises(ProbeError) as caught:
        verify_response(response, expected, readings)
    text = str(caught.value)
    assert re.search(cause.words, text), text
    assert not cause.wrong or not re.search(cause.wrong, text), text


def over_a_part(share: float) -> Change:
    return reported_from(lambda x: x.masked_fill(torch.arange(VOCAB) >= share * VOCAB, NEVER))


ALL_TOKENS: dict[str, tuple[Change, str]] = {
    "three quarters of the vocabulary": (over_a_part(0.75), "filtered distribution: .*smaller vocabulary"),
    "half of the vocabulary": (over_a_part(0.5), "filtered distribution: .*smaller vocabulary"),
    "top-k 25": (
        reported_from(lambda x: x.masked_fill(x < x.topk(25).values[:, -1:], NEVER)),
        r"filtered distribution: .*top-k|shifted",  # one of 36 fits a neighbor, too
    ),
    "x .7": (numbers(lambda _, x: x * 0.7), "scaled log-probabilities: .* 0.7 times"),
    "x 1.2": (numbers(lambda _, x: x * 1.2), "scaled log-probabilities: .* 1.2 times"),
    ".1 nats lower": (
        numbers(lambda _, x: x - 0.1),
        r"changed log-probabilities: all are 0\.(09|1)\d* nats too low",
    ),
}
"""One change of all tokens, which factor, offset and filter explain about equally well where the policy is flat."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sharpness", [0.02, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("lie", ALL_TOKENS)
def test_a_factor_an_offset_and_a_filter_are_told_apart(lie: str, sharpness: float, dtype: Dtype) -> None:
    change, words = ALL_TOKENS[lie]
    for seed in range(500, 503):
        policy, random = Policy(sharpness, seed=seed, dtype=dtype), np.random.default_rng(seed)
        response, expected, readings = ask(policy, lambda columns, p=policy, r=random: change(p, columns, r))  # type: ignore[misc]
        response = replace(response, info=replace(response.info, policy_version=0))
        try:
            verify_response(response, expected, readings)
        except ProbeError as error:
            assert re.search(words, str(error)), error
        else:
            # bf16's rounding hides that tokens are more probable by a third in half of the positions.
            assert (dtype == "bf16" and "vocabulary" in lie) or "top-k" in lie


def test_a_cached_answer_of_likely_tokens_is_stale_after_a_sync_and_filtered_before() -> None:
    """Earlier weights were surer of each token: what a filter would show, too."""
    random = np.random.default_rng(0)

    def surer(columns: dict[str, Any]) -> None:
        columns["logprobs"] = columns["logprobs"] * random.uniform(0.2, 0.9, TOKENS)

    for version, words in ((3, "stale response or filtered distribution: "), (0, "filtered distribution: ")):
        response, expected, readings = ask(Policy(2.0), surer)
        response = replace(response, info=replace(response.info, policy_version=version))
        with pytest.raises(ProbeError, match=rf"^http://s: {words}"):
            verify_response(response, expected, readings)
