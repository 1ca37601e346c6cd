"""Sequential test that servers sample from the distribution that they report, and that it is the policy's.

``run.evidence`` explains how evidence adds up. The costs:

- rank: Bennett's inequality, with the exact variance and the bound 1/2 of a token's shift;
- repeats: a Poisson variable is a bound for a sum of indicators;
- surprise: ``a^2 / 2`` times the sum of squares. This one is an approximation, which a test simulates;
- ratio: none. For tokens that are drawn from the reported mu, pi / mu is 1 on average, whatever pi is: the sum over the
  vocabulary of mu * pi / mu is that of pi. So the product of ``1 + a * (pi / mu - 1)`` is itself a supermartingale.
  Rounding, another expert and heavy tails of an honest server are in mu, and change nothing. Noise, zeros and
  permutations that are added after the sampling are not.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from megatron_dppo.policy.server_sums import RATIO_RATES, ServerSums
from megatron_dppo.rollout.repeats import RepeatSums
from megatron_dppo.run.evidence import ServerEvidence, normal_evidence
from megatron_dppo_engines.sampling_sums import RankSums

_RANK_RATES = (0.1, 0.3, 1.0, 3.0)
_REPEAT_RATES = (1.5, 3.5)
_SURPRISE_RATES = (0.02, 0.05, 0.1, 0.2)

_RANK_TOLERANCE = 0.002
"""Mean shift of a token's rank that is no lie: random numbers and sums of float32."""
_SURPRISE_TOLERANCE = 0.02, 0.002
"""Difference of surprise and entropy that is no lie: a share of the entropy, and nats a token."""
_RATIO_TOLERANCE = 0.002
"""Mean of pi / mu - 1 that is no lie, for the same reasons."""
_MIN_RARE = 60.0
"""Expected number of rare tokens that tells a filter from a lower temperature: at temperature .5 a twentieth comes."""
GREEDY = "greedy decoding"
"""Beginning of the cause of a server that always gives the most probable token."""


@dataclass(frozen=True, kw_only=True)
class SelectionShares:
    """Shares of the sampled responses that a step does not train on. They may depend on what was sampled."""

    groups: float = 0.0
    """Share of the groups that were dropped, canceled or carried over."""
    responses: float = 0.0
    """Share of the responses of the other groups."""
    group_size: int = 1


@dataclass
class SamplingTest(ServerEvidence):
    """Evidence against each server of a run, and what its message needs."""

    ranks: dict[str, RankSums] = field(default_factory=dict)
    """Ranks of each server since its evidence was 0 last, for the message."""
    num_products: ClassVar[int] = (
        2 * len(_RANK_RATES) + len(_REPEAT_RATES) + 2 * len(_SURPRISE_RATES) + len(RATIO_RATES)
    )

    def add_ranks(self, sums: Mapping[str, RankSums]) -> dict[str, str]:
        """Add the ranks of tokens by server, and return the causes of the servers that fail."""
        problems = {}
        for server, ranks in sums.items():
            tolerance = _RANK_TOLERANCE * ranks.tokens
            low = [_bennett(rate, -ranks.shift - tolerance, ranks.variance) for rate in _RANK_RATES]
            high = [_bennett(rate, ranks.shift - tolerance, ranks.variance) for rate in _RANK_RATES]
            was_quiet = not any(any(self._values(server, name)) for name in ("rank_low", "rank_high"))
            self.ranks[server] = ranks if was_quiet else self.ranks.get(server, RankSums()) + ranks
            is_low = self._exceeds(server, "rank_low", low)
            is_high = self._exceeds(server, "rank_high", high)
            if is_low or is_high:
                problems[server] = describe_ranks(self.ranks[server], is_low=is_low)
        return problems

    def add_repeats(self, sums: Mapping[str, RepeatSums]) -> dict[str, str]:
        """Add the repeated responses by server, and return the causes of the servers that fail."""
        problems = {}
        for server, repeats in sums.items():
            evidence = [rate * repeats.repeats - math.expm1(rate) * repeats.expected for rate in _REPEAT_RATES]
            if self._exceeds(server, "repeats", evidence):
                problems[server] = (
                    f"copies: {repeats.repeats:g} of {repeats.responses:g} responses of this step equal another one to "
                    f"the same prompt; by their own probabilities {repeats.expected:.2g} were to be expected. Likely "
                    "causes: a cache of responses in between, one seed for all samples of a prompt, greedy decoding"
                )
        return problems

    def add_surprise(self, sums: Mapping[str, ServerSums], selection: SelectionShares) -> dict[str, str]:
        """Add the tokens of an on-policy update by server, and return the causes of the servers that fail."""
        problems = {}
        for server, tokens in sums.items():
            allowance = allowed_surprise(tokens, selection)
            if math.isinf(allowance) or math.isnan(tokens.surprise):
                continue
            for name, sign in (("surprise_low", -1.0), ("surprise_high", 1.0)):
                excess = sign * tokens.surprise - allowance
                evidence = normal_evidence(_SURPRISE_RATES, excess, tokens.surprise_square)
                if self._exceeds(server, name, evidence):
                    problems[server] = describe_surprise(tokens)
        return problems

    def add_ratios(self, sums: Mapping[str, ServerSums], selection: SelectionShares) -> dict[str, str]:
        """Add the tokens of an on-policy update by server, and return the causes of the servers that fail."""
        problems = {}
        for server, tokens in sums.items():
            allowance = allowed_selection(tokens, tokens.log_diff_square, selection) + _RATIO_TOLERANCE * tokens.tokens
            if math.isinf(allowance):
                continue
            sums_by_rate = (tokens.ratio_small, tokens.ratio_medium, tokens.ratio_large)
            evidence = [value - rate * allowance for rate, value in zip(RATIO_RATES, sums_by_rate, strict=True)]
            if self._exceeds(server, "ratio", evidence):
                problems[server] = (
                    "its tokens are too probable under the policy for what it reports of them: pi / mu is 1 on average "
                    "for tokens that were drawn from mu, also with rounding, and here it is more (evidence "
                    f"{max(self.evidence[server]['ratio']):.3g} nats, limit {self.limit:.3g}). Likely causes: "
                    "log-probabilities with noise, of other tokens, or too low. Use the URL of the server itself, "
                    "without a gateway"
                )
        return problems


def _bennett(rate: float, total: float, variance: float) -> float:
    """Return the evidence of a sum of centered variables of at most 1/2, with the sum of their variances."""
    bound = 0.5
    return rate * total - variance * (math.expm1(rate * bound) - rate * bound) / bound**2


def allowed_surprise(tokens: ServerSums, selection: SelectionShares) -> float:
    """Return the |sum of surprise - entropy| that an honest server may have on average.

    - Probabilities of engine and trainer differ: their entropies differ by no more than about twice as much.
    - What is not trained on is selected by what was sampled. With a share f left out, the mean of n units is moved by
      at most ``sqrt(f / (1 - f) / n)`` standard deviations (Cauchy-Schwarz): dropped groups, masked responses.
    """
    relative, absolute = _SURPRISE_TOLERANCE
    allowance = relative * tokens.entropy + absolute * tokens.tokens + 2.0 * tokens.abs_log_diff
    return allowance + allowed_selection(tokens, tokens.surprise_square, selection)


def allowed_selection(tokens: ServerSums, squares: float, selection: SelectionShares) -> float:
    """Return by how much the selection of what is trained on may move a sum with the sum of squares ``squares``."""
    deviation = math.sqrt(squares)
    num_groups = max(tokens.responses / selection.group_size, 1.0)
    allowance = 0.0
    for share, units in ((selection.groups, num_groups), (selection.responses, tokens.responses)):
        if share >= 1:
            return math.inf
        allowance += deviation * math.sqrt(units * share / (1 - share))
    return allowance


def describe_ranks(ranks: RankSums, *, is_low: bool) -> str:
    """Return the likely cause of tokens that are not drawn from the reported probabilities."""
    numbers = (
        f"the most probable token was sampled {ranks.best / ranks.tokens:.1%} of the time, and its reported "
        f"probability is {ranks.best_expected / ranks.tokens:.1%} ({ranks.tokens:g} tokens)"
    )
    if not is_low:
        return (
            "a higher temperature than it reports, or log-probabilities over other tokens than it samples from (a "
            f"smaller vocabulary, banned tokens, a filter that only one of them has): {numbers}. {_SETTINGS}"
        )
    if ranks.best == ranks.tokens:
        return f"{GREEDY}: {numbers}. {_SETTINGS}"
    if ranks.rare_expected < _MIN_RARE:
        return f"a filter (top-p, top-k, min-p) or a lower temperature than it reports: {numbers}. {_SETTINGS}"
    rare = f"where another token had less than 10 %, it came {ranks.rare:g} times instead of {ranks.rare_expected:.3g}"
    cause = "a lower temperature than it reports, or a wide filter" if ranks.rare else "a filter (top-p, top-k, min-p)"
    return f"{cause}: {numbers}; {rare}. {_SETTINGS}"


def describe_surprise(tokens: ServerSums) -> str:
    """Return the likely cause of tokens whose log-probabilities do not fit the entropy of the policy."""
    surprise = (tokens.surprise + tokens.entropy) / tokens.tokens
    numbers = (
        f"-log mu is {surprise:.3g} on average, and the policy's entropy at the same positions is "
        f"{tokens.mean('entropy'):.3g} ({tokens.tokens:g} tokens of the last step)"
    )
    if tokens.surprise < 0:
        return (
            f"its tokens are more probable than samples of the policy: {numbers}. Likely causes: a filter (top-p, "
            f"top-k, min-p), a lower temperature, or a cache. {_SETTINGS}"
        )
    return (
        f"selection: its tokens are less probable than samples of the policy: {numbers}. Likely causes: a gateway "
        "that returns one of several responses (the shortest, the first), or a higher temperature"
    )


_SETTINGS = (
    "Give the URL of the server itself, without a gateway; start it without sampling defaults of the model (vLLM: "
    "--generation-config vllm)"
)
