"""Sums over the tokens of each server in one update: how far its log-probabilities are from the policy's."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from megatron_dppo.parallel.groups import ParallelGroups
from megatron_dppo.parallel.objects import all_gather_objects, is_leader
from megatron_dppo.types import TrainingSample
from megatron_dppo_engines.sums import Sums, add_by_key

if TYPE_CHECKING:
    from megatron_dppo.mcore.row import RowRecord
    from megatron_dppo.policy.packed import PackedBatch


class TokenSource(NamedTuple):
    """Where tokens come from."""

    server: str
    """URL of the server. Empty for an engine in this process."""
    is_stale: bool
    """True if older weights than the policy's sampled them."""


LARGEST_DIFFERENCE = 1.0
"""Limit of |log pi - log mu| of one token in the sums, in nats. Rounding moves no token by as much; another expert may
move one by any amount."""
RATIO_RATES = (0.01, 0.1, 0.5)
_LARGEST_LOG_RATIO = 200.0
"""Limit of log pi - log mu in the sums of the ratio, far above any evidence that is needed."""
FAR_PROB_DIFF = 0.15
"""Mean |pi - mu| that no honest response has in expectation: more than twice the limit of a whole step."""
FAR_EVIDENCE = 8.0
"""Evidence, in nats, from which on a response counts as far away."""


@dataclass(frozen=True)
class LayerCounts:
    """Rows of routes (a token in a layer) by layer; a layer without a router has none."""

    rows: tuple[int, ...] = ()
    differ: tuple[int, ...] = ()
    """Rows of them in which the live router chooses other experts."""

    def __add__(self, other: LayerCounts) -> LayerCounts:
        return LayerCounts(
            tuple(map(sum, zip_longest(self.rows, other.rows, fillvalue=0))),
            tuple(map(sum, zip_longest(self.differ, other.differ, fillvalue=0))),
        )

    @property
    def largest_share(self) -> float:
        """Share of the rows that differ, in the layer with most of them."""
        return max((differ / rows for rows, differ in zip(self.rows, self.differ, strict=True) if rows), default=0.0)

    def excess(self, limit: float) -> float:
        """Return by how many rows the worst layer exceeds a share of ``limit``."""
        counts = zip(self.rows, self.differ, strict=True)
        return max((differ - limit * rows for rows, differ in counts), default=0.0)


@dataclass(frozen=True, kw_only=True)
class ServerSums(Sums):
    """Sums over the tokens of one source that have a loss.

    Here q is |pi - mu| and d is log pi - log mu, between -``LARGEST_DIFFERENCE`` and ``LARGEST_DIFFERENCE``: a single
    token must not decide a sum. H is the entropy of pi. ``prob_diff`` sums q and ``entropy`` H; a name in ``_square``
    stands for the squares.
    """

    tokens: float
    responses: float
    """Number of responses with such a token."""
    prob_diff: float
    prob_diff_square: float
    log_diff: float
    """Sum of d, with its sign."""
    abs_log_diff: float
    log_diff_square: float
    divergence: float
    """Sum of the loss's own divergence of pi from mu."""
    surprise: float
    """Sum of x = d - log pi - H. Its mean is 0 for tokens that are sampled from pi."""
    surprise_square: float
    entropy: float
    ratio_small: float = 0.0
    """Sum of log(1 + a (pi / mu - 1)) for the first of ``RATIO_RATES``, with pi / mu without a limit."""
    ratio_medium: float = 0.0
    """The same for the second rate."""
    ratio_large: float = 0.0
    """The same for the third rate."""
    far_responses: float = 0.0
    """Sum of ``far_evidence`` over the responses."""
    routes: LayerCounts = LayerCounts()
    """Rows of routes that the live routers choose differently."""

    def mean(self, name: str) -> float:
        """Return a sum divided by the number of tokens."""
        value: float = getattr(self, name)
        return value / self.tokens


SumsBySource = Mapping[TokenSource, ServerSums]
_NO_TOKENS = ServerSums(
    **{f.name: 0.0 for f in fields(ServerSums) if f.name != "routes"}  # type: ignore[arg-type]
)


def sum_by_server(
    samples: Sequence[TrainingSample],
    packed: PackedBatch,
    rows: Sequence[RowRecord],
    policy_version: int,
    differences: Sequence[Tensor] = (),
) -> dict[TokenSource, ServerSums]:
    """Return the sums of each source over the tokens that this rank trains on.

    ``rows`` are the records before the update, empty on all but the last pipeline stage; ``policy_version`` is the one
    before it. ``differences`` has ``PolicyTrainer.route_differences`` of each micro-batch, empty without routes.
    """
    result: dict[TokenSource, ServerSums] = {}
    for i, where, number in packed.positions(samples) if rows or differences else ():
        for span in samples[i].sources:
            if not bool(samples[i].loss_mask[span.start : span.end].any()):
                continue
            source = TokenSource(span.server, span.policy_version != policy_version)
            sums = _sum_span(samples[i], rows[number], slice(span.start, span.end), where.start) if rows else None
            if sums is not None:
                add_by_key(result, {source: sums})
            if differences:
                # The first token of a span is read by whoever sampled the tokens before it.
                in_row = slice(where.start + span.start + 1, where.start + span.end)
                known, differ = differences[number][in_row].sum(0).T.tolist()
                add_by_key(result, {source: replace(_NO_TOKENS, routes=LayerCounts(tuple(known), tuple(differ)))})
    return result


def gather_sums(local: SumsBySource, groups: ParallelGroups) -> dict[TokenSource, ServerSums]:
    """Add the sums of all ranks; a collective. The result is bit-identical on every rank.

    Tensor- and context-parallel ranks have the same records, so the first of them contributes. Each pipeline stage has
    the routes of its layers, and the last one the tokens.
    """
    contributes = all(is_leader(group) for group in (groups.tp, groups.cp))
    total: dict[TokenSource, ServerSums] = {}
    for part in all_gather_objects(dict(local) if contributes else {}, groups.world):
        add_by_key(total, part)
    return dict(sorted(total.items()))


def without_servers(sample: TrainingSample, servers: Container[str]) -> TrainingSample:
    """Return the sample outside the loss if one of ``servers`` sampled a part of it, else the sample itself."""
    if not any(source.server in servers for source in sample.sources):
        return sample
    return sample.without_loss()


def _sum_span(sample: TrainingSample, row: RowRecord, span: slice, start: int) -> ServerSums | None:
    """Return the sums of one span of a sample that begins at ``start`` in its packed row. None if it has no token."""
    mask = sample.loss_mask[span]
    if sample.rollout_logprobs is None or not bool(mask.any()):
        return None
    in_row = slice(start + span.start, start + span.stop)

    def select(column: Tensor) -> Tensor:
        # float64, because many small differences are added up.
        return column[mask].double()

    return sum_tokens(
        select(sample.rollout_logprobs[span]),
        select(row.logprobs[in_row]),
        entropy=select(row.entropy[in_row]),
        divergence=select(row.divergence[in_row]),
    )


def sum_tokens(log_mu: Tensor, log_pi: Tensor, *, entropy: Tensor, divergence: Tensor) -> ServerSums:
    """Return the sums of one response, each argument float64 ``[num_tokens]``."""
    log_ratio = log_pi - log_mu
    difference = log_ratio.clamp(-LARGEST_DIFFERENCE, LARGEST_DIFFERENCE)
    prob_diff = (log_pi.exp() - log_mu.exp()).abs()
    # 0 on average if the tokens are samples of mu and mu is pi.
    surprise = difference - log_pi - entropy
    ratios = [_log_wealth(log_ratio, rate) for rate in RATIO_RATES]
    return ServerSums(
        tokens=float(len(log_mu)),
        responses=1.0,
        prob_diff=float(prob_diff.sum()),
        prob_diff_square=float(prob_diff.square().sum()),
        log_diff=float(difference.sum()),
        abs_log_diff=float(difference.abs().sum()),
        log_diff_square=float(difference.square().sum()),
        divergence=float(divergence.sum()),
        surprise=float(surprise.sum()),
        surprise_square=float(surprise.square().sum()),
        entropy=float(entropy.sum()),
        ratio_small=ratios[0],
        ratio_medium=ratios[1],
        ratio_large=ratios[2],
        far_responses=far_evidence(float(prob_diff.sum()), len(log_mu)),
    )


def _log_wealth(log_ratio: Tensor, rate: float) -> float:
    """Return the sum of log(1 + rate * (exp(log_ratio) - 1))."""
    scaled = log_ratio.clamp(max=_LARGEST_LOG_RATIO) + math.log(rate)
    return float(torch.logaddexp(scaled, torch.full_like(scaled, math.log1p(-rate))).sum())


def far_evidence(prob_diff: float, tokens: float) -> float:
    """Return the evidence beyond ``FAR_EVIDENCE`` that a response is no sample of a policy near to this one.

    For tokens whose |pi - mu| is at most ``FAR_PROB_DIFF`` in expectation, a mean of m has a probability of at most
    ``exp(-tokens * KL(m, FAR_PROB_DIFF))``, with the KL of two coins (Chernoff's bound of variables from 0 to 1).
    """
    mean = min(prob_diff / tokens, 1.0)
    if not mean > FAR_PROB_DIFF:
        return 0.0
    kl = mean * math.log(mean / FAR_PROB_DIFF)
    if mean < 1:
        kl += (1 - mean) * math.log((1 - mean) / (1 - FAR_PROB_DIFF))
    return max(tokens * kl - FAR_EVIDENCE, 0.0)
