"""Simulated inference servers for the guard: honest ones with heavy tails, and lies about the log-probabilities.

A server samples from its own probabilities mu, which differ from the policy's pi by rounding of the logits; a few
tokens go to another expert, which moves their logits by nats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_dppo.errors import TrainingStopped
from megatron_dppo.policy.server_sums import ServerSums, SumsBySource, TokenSource, sum_tokens
from megatron_dppo.run.guard import FirstUpdateGuard, GuardEvidence, GuardHistory
from megatron_dppo.run.sampling_test import SamplingTest, SelectionShares

VOCAB = 64
SIBLINGS = 4
PROBE_TOKENS = 64
Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """Difference of an honest server's logits from the trainer's."""

    dtype: str
    size: float
    """Standard deviation of each logit."""
    heavy_fraction: float = 0.0
    """Fraction of the tokens that go to another expert."""
    heavy_size: float = 3.0
    """Standard deviation of their logits."""


BF16 = Rounding(dtype="bf16", size=0.015, heavy_fraction=0.001)
FP32 = Rounding(dtype="fp32", size=1e-6)
HONEST = (
    FP32,
    Rounding(dtype="fp32", size=1e-5, heavy_fraction=1e-5, heavy_size=1.0),
    BF16,
    Rounding(dtype="bf16", size=0.003, heavy_fraction=0.01),
    Rounding(dtype="bf16", size=0.05, heavy_fraction=0.02),
    Rounding(dtype="bf16", size=0.1),
)
"""From rounding alone to more than was seen of any server (docs/probe.md)."""


class Responses(NamedTuple):
    """Responses of one server in one step, siblings side by side. Shapes [num_responses, length]."""

    log_mu: Floats
    """Log-probabilities that the server sampled with."""
    log_pi: Floats
    entropy: Floats
    """Entropy of pi."""
    is_best: NDArray[np.bool_]
    """True where the most probable token was sampled."""

    def sums(self, reported: Floats | None = None) -> ServerSums:
        """Return the sums of what the server reports; None: the truth."""
        log_mu = self.log_mu if reported is None else reported
        rows = zip(*(torch.from_numpy(each) for each in (log_mu, self.log_pi, self.entropy)), strict=True)
        return reduce(add, (sum_tokens(mu, pi, entropy=h, divergence=torch.zeros_like(h)) for mu, pi, h in rows))


def _log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max(-1, keepdims=True)
    result: Floats = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


def sample(random: np.random.Generator, responses: int, length: int, rounding: Rounding) -> Responses:
    """Return responses of an honest server: half of the distributions are nearly certain, as a language model's."""
    size = responses * length
    sharpness = np.where(random.random(size) < 0.5, random.uniform(4, 8, size), random.uniform(0.5, 3, size))
    logits = random.normal(size=(size, VOCAB)) * sharpness[:, None]
    is_heavy = random.random(size) < rounding.heavy_fraction
    noise = np.where(is_heavy, rounding.heavy_size, rounding.size)
    table_mu = _log_softmax(logits + random.normal(size=(size, VOCAB)) * noise[:, None])
    table_pi = _log_softmax(logits)
    below = np.cumsum(np.exp(table_mu), 1)
    tokens = np.minimum((random.random((size, 1)) * below[:, -1:] > below).sum(1), VOCAB - 1)
    index = np.arange(size)
    columns = (
        table_mu[index, tokens],
        table_pi[index, tokens],
        -(np.exp(table_pi) * table_pi).sum(1),
        tokens == table_mu.argmax(1),
    )
    return Responses(*(column.reshape(responses, length) for column in columns))


Lie = Callable[[np.random.Generator, Responses], Floats]


def _permute(random: np.random.Generator, honest: Responses) -> Floats:
    result = honest.log_mu.copy()
    for row, is_best in zip(result, honest.is_best, strict=True):
        row[~is_best] = random.permutation(row[~is_best])
    return result


def _noise(size: float, share: float = 1.0) -> Lie:
    def lie(random: np.random.Generator, honest: Responses) -> Floats:
        chosen = random.random((len(honest.log_mu), 1)) < share
        return np.minimum(honest.log_mu + chosen * random.normal(size=honest.log_mu.shape) * size, 0.0)

    return lie


def _one_token(value: float) -> Lie:
    def lie(random: np.random.Generator, honest: Responses) -> Floats:
        result = honest.log_mu.copy()
        result[np.arange(len(result)), random.integers(result.shape[1], size=len(result))] = value
        return result

    return lie


def _scaled(factor: float, first: int = 0, end: int | None = None, shift: float = 0.0) -> Lie:
    def lie(random: np.random.Generator, honest: Responses) -> Floats:
        result = honest.log_mu.copy()
        result[:, first:end] = result[:, first:end] * factor + shift
        return result

    return lie


def _one_prompt(factor: float) -> Lie:
    """Scale the responses of one prompt of the step."""

    def lie(random: np.random.Generator, honest: Responses) -> Floats:
        result = honest.log_mu.copy()
        result[:SIBLINGS] *= factor
        return result

    return lie


def _rounded(random: np.random.Generator, honest: Responses) -> Floats:
    return np.round(honest.log_mu, 2)


LIES: dict[str, Lie] = {
    "numbers of all tokens but the best ones permuted": _permute,
    "noise of .1 nats": _noise(0.1),
    "noise of .3 nats": _noise(0.3),
    "noise of 1 nat in one response of ten": _noise(1.0, 0.1),
    "one token of each response at -12": _one_token(-12.0),
    "one token of each response at -25": _one_token(-25.0),
    "one token of each response at -200": _one_token(-200.0),
    "one token of each response at -1e30": _one_token(-1e30),
    "responses of one prompt at 0.0": _one_prompt(0.0),
    "responses of one prompt x .5": _one_prompt(0.5),
    "first token x .2": _scaled(0.2, end=1),
    "x .7 from token 8 on": _scaled(0.7, first=8),
    "x .8": _scaled(0.8),
    "x .9": _scaled(0.9),
    ".1 nats lower": _scaled(1.0, shift=-0.1),
    "rounded to 2 digits": _rounded,
}


def probe(random: np.random.Generator, rounding: Rounding, count: int) -> list[float]:
    """Return what the probes of honest servers measure."""
    return [sample(random, 1, PROBE_TOKENS, rounding).sums().mean("prob_diff") for _ in range(count)]


class SimulatedRun:
    """The guard of a run over simulated servers, of which the first may lie; the probe is always told the truth."""

    def __init__(self, rounding: Rounding, probes: Sequence[float]) -> None:
        num_servers = len(probes)
        self._rounding = rounding
        self._urls = [f"http://{i}" for i in range(num_servers)]
        self.history = GuardHistory(
            probed=dict(zip(self._urls, probes, strict=True)), evidence=GuardEvidence(num_servers)
        )
        self._sampling = SamplingTest(num_servers)

    def largest_evidence(self) -> str:
        """Return the largest evidence against the first server, with its name and its limit."""
        parts = [
            (max(values), name, each.limit)
            for each in (self.history.evidence, self._sampling)
            for name, values in each.evidence.get(self._urls[0], {}).items()
        ]
        value, name, limit = max(parts)
        return f"{value:.2g} of {limit:.3g} nats ({name})"

    def step(self, sums: list[ServerSums]) -> list[str]:
        """Return the servers that a step of these sums stops or leaves out."""
        sources: SumsBySource = {TokenSource(url, False): each for url, each in zip(self._urls, sums, strict=True)}
        limits = {"fp32": 1e-3, "bf16": 0.06}
        guard = FirstUpdateGuard(
            max_prob_diff=limits[self._rounding.dtype],
            is_on_policy=True,
            follows_run=True,
            max_nonfinite_fraction=0.01,
            nonfinite_fraction=0.0,
            engine="sglang",
            dtype=self._rounding.dtype,
            history=self.history,
            sampling=self._sampling,
            selection=SelectionShares(),
        )
        total = sum(each.tokens for each in sums)
        try:
            return list(guard({"abs_prob_diff": sum(each.prob_diff for each in sums) / total}, sources))
        except TrainingStopped as stop:
            return [url for url in self._urls if f"{url}: " in str(stop)] or ["step"]


class LieOutcome(NamedTuple):
    """Result of the guard for a server that lies."""

    step: int | None
    """Step in which the guard names the server. None: in none of them."""
    prob_diff: float
    """Mean |pi - mu| of the server's last step."""
    evidence: str
    """Largest evidence against the server."""


def run_lie(
    lie: Lie,
    rounding: Rounding,
    num_servers: int,
    *,
    seed: int,
    steps: int = 20,
    responses: int = 200,
    length: int = 32,
) -> LieOutcome:
    """Run the guard until it names the first server, whose answers are changed.

    Args:
        lie: Change of what it reports.
        rounding: Of all servers.
        num_servers: They share the responses.
        seed: Seed of the run.
        steps: Number of steps.
        responses: Responses of a step, of all servers together.
        length: Tokens of each.
    """
    random = np.random.default_rng(seed)
    run = SimulatedRun(rounding, probe(random, rounding, num_servers))
    for number in range(1, steps + 1):
        honest = [sample(random, responses // num_servers, length, rounding) for _ in range(num_servers)]
        reported = lie(random, honest[0])
        sums = honest[0].sums(reported)
        # The contract of each response.
        if reported.min() < -104:
            return LieOutcome(number, sums.mean("prob_diff"), "the contract")
        named = run.step([sums, *(each.sums() for each in honest[1:])])
        assert named in ([], ["http://0"]), named
        if named or number == steps:
            return LieOutcome(number if named else None, sums.mean("prob_diff"), run.largest_evidence())
    raise ValueError("a run needs a step")


def count_false_alarms(
    random: np.random.Generator, rounding: Rounding, num_servers: int, pool: list[ServerSums], *, runs: int, steps: int
) -> int:
    """Return how many honest runs the guard stops, or leaves a server out of.

    Args:
        random: Source of the runs.
        rounding: Of all servers.
        num_servers: Number of servers.
        pool: Sums of one server in one step, drawn with replacement.
        runs: Number of runs.
        steps: Steps of each.
    """
    alarms = 0
    probes = np.array(probe(random, rounding, 200))
    for _ in range(runs):
        run = SimulatedRun(rounding, random.choice(probes, num_servers).tolist())
        alarms += any(run.step([pool[i] for i in random.integers(len(pool), size=num_servers)]) for _ in range(steps))
    return alarms


def honest_pool(random: np.random.Generator, rounding: Rounding, size: int) -> list[ServerSums]:
    """Return the sums of honest server steps of 32 to 512 tokens."""
    shapes = [(4, 8), (8, 16), (8, 32), (16, 32)]
    return [sample(random, *shapes[i % len(shapes)], rounding).sums() for i in range(size)]
