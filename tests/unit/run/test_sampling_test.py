"""The sequential test against simulated servers: honest ones pass for whole runs, each kind of lie is found."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from megatron_dppo.policy.server_sums import ServerSums
from megatron_dppo.rollout.repeats import RepeatSums
from megatron_dppo.run.evidence import RUN_STEPS
from megatron_dppo.run.sampling_test import SamplingTest, SelectionShares
from megatron_dppo_engines.sampling_sums import RankSums

VOCAB = 64
Floats = NDArray[np.float64]
Sampler = Callable[[np.random.Generator, Floats], NDArray[np.int64]]


def distributions(random: np.random.Generator, count: int) -> Floats:
    """Next-token distributions as of a language model, [count, VOCAB], the most probable token first.

    Half of them are nearly certain, the others have an entropy of 0.3 to 3 nats.
    """
    sharpness = np.where(random.random(count) < 0.5, random.uniform(4, 8, count), random.uniform(0.5, 3, count))
    logits = np.sort(random.normal(size=(count, VOCAB)), axis=1)[:, ::-1] * sharpness[:, None]
    exponentials = np.exp(logits - logits.max(1, keepdims=True))
    return exponentials / exponentials.sum(1, keepdims=True)


def draw(random: np.random.Generator, p: Floats) -> NDArray[np.int64]:
    below = np.cumsum(p, 1)
    drawn: NDArray[np.int64] = (random.random((len(p), 1)) * below[:, -1:] > below).sum(1)
    return np.minimum(drawn, VOCAB - 1)


def tempered(temperature: float) -> Sampler:
    def sample(random: np.random.Generator, p: Floats) -> NDArray[np.int64]:
        other = p ** (1 / temperature)
        return draw(random, other / other.sum(1, keepdims=True))

    return sample


def top_p(mass: float) -> Sampler:
    def sample(random: np.random.Generator, p: Floats) -> NDArray[np.int64]:
        kept = np.where(np.cumsum(p, 1) - p < mass, p, 0.0)
        return draw(random, kept / kept.sum(1, keepdims=True))

    return sample


def min_p(share: float) -> Sampler:
    def sample(random: np.random.Generator, p: Floats) -> NDArray[np.int64]:
        kept = np.where(p >= share * p[:, :1], p, 0.0)
        return draw(random, kept / kept.sum(1, keepdims=True))

    return sample


def greedy(random: np.random.Generator, p: Floats) -> NDArray[np.int64]:
    return np.zeros(len(p), np.int64)


def smaller_vocabulary(random: np.random.Generator, p: Floats) -> NDArray[np.int64]:
    """Tokens of a flatter distribution than the reported one, which leaves out what is rare."""
    other = 0.7 * p + 0.3 / VOCAB
    return draw(random, other)


LIES: dict[str, tuple[Sampler, str]] = {
    "greedy": (greedy, "greedy decoding"),
    "top_p .9": (top_p(0.9), "filter"),
    "top_p .7": (top_p(0.7), "filter"),
    "min_p .3": (min_p(0.3), "filter"),
    "temperature .8": (tempered(0.8), "a lower temperature"),
    "temperature .5": (tempered(0.5), "lower temperature"),
    "a smaller vocabulary": (smaller_vocabulary, "other tokens than it samples from"),
    "temperature 1.3": (tempered(1.3), "a higher temperature"),
}


def ranks_of(p: Floats, tokens: NDArray[np.int64]) -> RankSums:
    """The sums with the witness alone, from their definitions."""
    best = p[:, 0]
    middles = np.stack([best / 2, 1 - (1 - best) / 2], 1) - 0.5
    is_best = tokens == 0
    return RankSums(
        tokens=float(len(p)),
        shift=float(np.where(is_best, middles[:, 0], middles[:, 1]).sum()),
        variance=float((best * middles[:, 0] ** 2 + (1 - best) * middles[:, 1] ** 2).sum()),
        best=float(is_best.sum()),
        best_expected=float(best.sum()),
        rare=float((~is_best & (best >= 0.9)).sum()),
        rare_expected=float((1 - best[best >= 0.9]).sum()),
    )


def surprise_of(p: Floats, tokens: NDArray[np.int64], noise: float = 0.0, responses: int = 8) -> ServerSums:
    entropy = -(p * np.log(np.maximum(p, 1e-300))).sum(1)
    surprise = -np.log(p[np.arange(len(p)), tokens]) - entropy
    return ServerSums(
        tokens=float(len(p)),
        responses=float(responses),
        prob_diff=0.0,
        prob_diff_square=0.0,
        log_diff=0.0,
        abs_log_diff=noise * len(p),
        log_diff_square=noise**2 * len(p),
        divergence=0.0,
        surprise=float(surprise.sum()),
        surprise_square=float(np.square(surprise).sum()),
        entropy=float(entropy.sum()),
    )


@pytest.mark.parametrize("lie", LIES)
def test_each_way_to_sample_otherwise_is_found_by_ranks_and_named(lie: str) -> None:
    sample, words = LIES[lie]
    random = np.random.default_rng(1)
    test = SamplingTest(num_servers=4)
    for step in range(40):
        p = distributions(random, 500)
        found = test.add_ranks({"http://a": ranks_of(p, sample(random, p)), "http://b": ranks_of(p, draw(random, p))})
        assert "http://b" not in found
        if found:
            assert words in found["http://a"], found
            assert step < 25
            return
    pytest.fail(f"{lie} was not found in 20,000 tokens")


@pytest.mark.parametrize("lie", ["greedy", "top_p .7", "temperature .5", "temperature 1.3"])
def test_the_entropy_finds_them_too(lie: str) -> None:
    random = np.random.default_rng(2)
    test = SamplingTest(num_servers=1)
    for _ in range(40):
        p = distributions(random, 500)
        found = test.add_surprise({"": surprise_of(p, LIES[lie][0](random, p))}, SelectionShares())
        if found:
            expected = "less probable" if lie == "temperature 1.3" else "more probable"
            assert expected in found[""]
            return
    pytest.fail(f"{lie} was not found in 20,000 tokens")


def test_the_shortest_of_three_is_found_as_a_selection() -> None:
    """Each token ends the response with probability 0.1: the shortest of three ends much too often."""
    random = np.random.default_rng(3)
    test = SamplingTest(num_servers=1)
    entropy = -(0.1 * math.log(0.1) + 0.9 * math.log(0.9))
    for _ in range(40):
        lengths = random.geometric(0.1, size=(64, 3)).min(1)
        surprise = np.concatenate([[-math.log(0.9)] * (n - 1) + [-math.log(0.1)] for n in lengths]) - entropy
        sums = ServerSums(
            tokens=float(len(surprise)),
            responses=64.0,
            prob_diff=0.0,
            prob_diff_square=0.0,
            log_diff=0.0,
            abs_log_diff=0.0,
            log_diff_square=0.0,
            divergence=0.0,
            surprise=float(surprise.sum()),
            surprise_square=float(np.square(surprise).sum()),
            entropy=entropy * len(surprise),
        )
        if found := test.add_surprise({"": sums}, SelectionShares()):
            assert "selection" in found[""]
            return
    pytest.fail("not found")


def test_copies_are_found_and_a_confident_policy_repeats_itself_honestly() -> None:
    test = SamplingTest(num_servers=1)
    for _ in range(1000):
        # Eight samples of a response with probability .9, on average 6.3 repeats.
        assert test.add_repeats({"": RepeatSums(responses=8.0, repeats=6.3, expected=6.3)}) == {}
    found = test.add_repeats({"": RepeatSums(responses=64.0, repeats=56.0, expected=1e-9)})
    assert "copies: 56 of 64 responses" in found[""]


@pytest.mark.parametrize("servers", [10, pytest.param(200, marks=pytest.mark.long)])
def test_honest_servers_pass_whole_runs(servers: int) -> None:
    """500 steps of each server. The limit allows 1 % in 10,000 steps: 0.1 alarms in the 100,000 steps of 200 servers.

    Noise between engine and trainer, small steps and large ones.
    """
    random = np.random.default_rng(4)
    alarms = 0
    for server in range(servers):
        test = SamplingTest(num_servers=1)
        tokens = int(random.choice([20, 100]))
        p = distributions(random, tokens * 500)
        drawn = draw(random, p)
        for step in range(500):
            part = slice(step * tokens, (step + 1) * tokens)
            noise = 0.02 * (server % 2)
            alarms += bool(test.add_ranks({"": ranks_of(p[part], drawn[part])}))
            alarms += bool(test.add_surprise({"": surprise_of(p[part], drawn[part], noise)}, SelectionShares()))
    assert alarms == 0


def test_what_the_step_leaves_out_is_no_lie() -> None:
    """Dynamic sampling: of 16 groups the half with the least probable responses is trained on."""
    random = np.random.default_rng(5)
    test = SamplingTest(num_servers=1)
    for _ in range(200):
        p = distributions(random, 16 * 50).reshape(16, 50, VOCAB)
        tokens = np.stack([draw(random, each) for each in p])
        surprise = -np.log(np.take_along_axis(p, tokens[:, :, None], 2)).sum((1, 2))
        kept = np.argsort(surprise)[8:]
        sums = surprise_of(p[kept].reshape(-1, VOCAB), tokens[kept].reshape(-1), responses=8)
        assert test.add_surprise({"": sums}, SelectionShares(groups=0.5, group_size=1)) == {}


def test_the_state_survives_a_checkpoint() -> None:
    random = np.random.default_rng(6)
    test, restored = SamplingTest(num_servers=1), SamplingTest(num_servers=1)
    p = distributions(random, 500)
    test.add_ranks({"": ranks_of(p, tempered(0.9)(random, p))})
    restored.restore(test.state())
    p = distributions(random, 500)
    sums = {"": ranks_of(p, greedy(random, p))}
    test.add_ranks(sums)
    restored.add_ranks(sums)
    assert test.evidence == restored.evidence and max(test.evidence[""]["rank_low"]) > 0


def test_the_limit_is_that_of_the_false_alarms() -> None:
    # One server: 21 products; Ville's inequality for restarted ones gives steps / limit for each.
    assert math.exp(SamplingTest(num_servers=1).limit) == pytest.approx(RUN_STEPS * 21 / 0.01)
