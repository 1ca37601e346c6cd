"""Random cases of vocabulary-parallel logits with a set of ids, and one unsharded float64 reference for each."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

SHARDS = 4
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
STYLES = ("plain", "ties", "holes", "one left", "peaked", "offset")


@dataclass(frozen=True)
class Case:
    """Sizes and options of a case; everything else follows from the seed."""

    vocab_size: int
    shard: int
    """entries of each of the four smallest shards; the last ones may be padding, partly or wholly"""
    rows: int
    slots: int
    k: int
    seed: int
    dtype: torch.dtype = torch.float32
    temperature: float = 0.6
    style: str = "plain"


@dataclass(frozen=True)
class Problem:
    """Equal on all ranks; padding holds large numbers that would spoil the softmax, unused slots hold anything."""

    case: Case
    logits: Tensor
    labels: Tensor
    ids: Tensor
    valid: Tensor
    rollout: Tensor
    """[T, V] float64 log mu of the whole vocabulary"""
    weights: Tensor
    """[2, T] of the log-probabilities and of the entropy in the scalar that is differentiated"""


@st.composite
def cases(draw: st.DrawFn) -> Case:
    vocab_size = draw(st.integers(2, 30))
    least = -(-vocab_size // SHARDS)
    return Case(
        vocab_size=vocab_size,
        shard=draw(st.integers(least, least + 2 + vocab_size // 2)),
        rows=draw(st.integers(1, 4)),
        slots=draw(st.integers(0, vocab_size + 2)),
        k=draw(st.integers(1, vocab_size)),
        dtype=draw(st.sampled_from(DTYPES)),
        temperature=draw(st.sampled_from((1.0, 0.6, 1.7))),
        style=draw(st.sampled_from(STYLES)),
        seed=draw(st.integers(0, 2**20)),
    )


def drawn_cases(count: int) -> list[Case]:
    """Every style in every dtype, the same in every run, and two corner cases.

    Drawn before any collective: a rank that shrank its own case would hang the others.
    """
    drawn: list[Case] = []

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases())
    def remember(case: Case) -> None:
        drawn.append(case)

    remember()
    kinds = list(itertools.product(STYLES, DTYPES))
    corners = [replace(drawn[-1], rows=0), Case(vocab_size=1, shard=1, rows=2, slots=1, k=1, seed=0)]
    return corners + [
        replace(case, style=style, dtype=dtype)
        for case, (style, dtype) in zip(drawn, itertools.cycle(kinds), strict=False)
    ]


def make_problem(case: Case) -> Problem:
    generator = torch.Generator().manual_seed(case.seed)
    rows, vocab_size, dtype = case.rows, case.vocab_size, torch.float64

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    logits = 3 * normal(rows, SHARDS * case.shard)
    keep = torch.randint(0, vocab_size, (rows, 1), generator=generator)
    if case.style == "ties":
        logits = logits.round().clamp(-1, 2)
    elif case.style == "holes":
        hole = torch.rand(logits.shape, generator=generator) < 0.5
        hole[:, : case.shard] |= torch.rand(rows, 1, generator=generator) < 0.5
        logits = logits.masked_fill(hole.scatter(1, keep, False), -math.inf)
    elif case.style == "one left":
        logits = torch.full_like(logits, -math.inf).scatter(1, keep, 1.5)
    elif case.style == "peaked":
        logits.scatter_add_(1, keep, torch.full((rows, 1), 25.0, dtype=dtype))
    elif case.style == "offset":
        logits += 1000 * normal(rows, 1)
    logits[:, vocab_size:] = 2000.0
    order = torch.rand(rows, vocab_size, generator=generator).argsort(1)
    valid = torch.rand(rows, case.slots, generator=generator) < 0.8
    valid[:, vocab_size:] = False
    ids = torch.nn.functional.pad(order, (0, case.slots), value=-1)[:, : case.slots]
    unused = torch.tensor([-7, 0, vocab_size - 1, vocab_size, 10**12])
    anything = unused[torch.randint(0, len(unused), ids.shape, generator=generator)]
    return Problem(
        case=case,
        logits=logits.to(case.dtype),
        labels=torch.randint(0, vocab_size, (rows,), generator=generator),
        ids=torch.where(valid, ids, anything),
        valid=valid,
        rollout=(2 * normal(rows, vocab_size)).log_softmax(-1),
        weights=normal(2, rows),
    )


@dataclass(frozen=True)
class Reference:
    """Float64, from torch's own softmax and autograd of the whole vocabulary."""

    logp: Tensor
    """[T, V]"""
    logprobs: Tensor
    entropy: Tensor
    id_logprobs: Tensor
    other_logprob: Tensor
    grad: Tensor
    topk_ids: Tensor


def reference(problem: Problem) -> Reference:
    case, logits = problem.case, problem.logits.double()
    vocab_size, empty = case.vocab_size, logits[:, : case.vocab_size] == -math.inf
    # A finite stand-in with probability exactly 0: autograd of p log p is NaN at -inf.
    leaf = logits.clamp(min=-1e5).requires_grad_()
    logp = (leaf[:, :vocab_size] / case.temperature).log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(1)
    own = logp.gather(1, problem.labels[:, None]).squeeze(1)
    (problem.weights[0] @ own + problem.weights[1] @ entropy).backward()
    assert leaf.grad is not None
    logp = logp.detach().masked_fill(empty, -math.inf)
    chosen = torch.where(problem.valid, problem.ids, vocab_size)
    in_set = torch.zeros(case.rows, vocab_size + 1, dtype=torch.bool).scatter(1, chosen, True)[:, :vocab_size]
    padded = torch.nn.functional.pad(logp, (0, 1), value=-math.inf)
    rows = logits[:, :vocab_size].tolist()
    best = [sorted(range(vocab_size), key=lambda i: (-row[i], i))[: case.k] for row in rows]
    return Reference(
        logp=logp,
        logprobs=logp.gather(1, problem.labels[:, None]).squeeze(1),
        entropy=entropy.detach(),
        id_logprobs=padded.gather(1, chosen),
        other_logprob=logp.masked_fill(in_set, -math.inf).logsumexp(1),
        grad=leaf.grad,
        topk_ids=torch.tensor(best, dtype=torch.int64).view(case.rows, case.k),
    )


def assert_near(got: Tensor, want: Tensor, tolerance: float, where: str) -> None:
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance, msg=lambda text: f"{where}: {text}")


def shard_of(logits: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    size, rank = (1, 0) if group is None else (group.size(), group.rank())
    width = logits.shape[1] // size
    return logits[:, rank * width : (rank + 1) * width].clone()


def exact_divergences(logp: Tensor, rollout: Tensor) -> tuple[Tensor, Tensor]:
    """TV and KL(mu || pi) over the whole vocabulary ``[T]``."""
    return (logp.exp() - rollout.exp()).abs().sum(1) / 2, (rollout.exp() * (rollout - logp)).sum(1)
