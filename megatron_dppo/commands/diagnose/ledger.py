"""The mismatch ledger: log-probabilities of the same tokens, scored with one cause removed after the other.

A chain of scorings leads from what the trainer computes to what the engine reported. Neighbours differ in one cause, so
that the difference of a token is the sum of its links: ``log pi - log mu = sum of links``. What the mean of
``|log pi - log mu|`` owes to a cause is the mean of its links in the direction of the token's difference,
``sign(log pi - log mu) * link``: these parts add up to the mean, whatever cancels along the chain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

STALENESS = "staleness"
SAMPLER = "sampler"
ROUTER_IDS = "router ids"
ROUTER_WEIGHTS = "router weights"
HEAD = "head precision"
ENGINE = "engine numerics"
TRAINER = "trainer numerics"
UNEXPLAINED = "unexplained"
OTHER_TRAINER = "its trainer"
"""another stack's numbers against an exact score: its numerics, and weights that have moved since"""
NOT_SEPARATED = "engine, not separated"
"""all that an engine which cannot be asked again differs in"""
CAUSES = (
    OTHER_TRAINER,
    STALENESS,
    SAMPLER,
    ROUTER_IDS,
    ROUTER_WEIGHTS,
    HEAD,
    ENGINE,
    TRAINER,
    NOT_SEPARATED,
    UNEXPLAINED,
)
"""in the order of the table"""
CLOSES_WITHIN = 0.05
"""of the mean absolute difference: what may be left unexplained"""
ROUNDING = 2e-5
"""nats; a mean difference below it is that of fp32 sums in another order, and needs no explanation"""


@dataclass(frozen=True)
class CauseScoring:
    """Log-probabilities of the same N tokens, nearer to the engine by one cause than the scoring before."""

    cause: str
    """that separates it from the one before; several links may have the same cause"""
    logprobs: Tensor
    """[N]"""


@dataclass(frozen=True)
class LedgerRow:
    """One cause; nats a token."""

    cause: str
    part: float
    """of the mean |log pi - log mu|: parts add up to it. Negative = it hides what others do"""
    share: float
    """``part`` over the whole mean"""
    signed: float
    """mean of its links"""
    size: float
    """mean of their absolute values"""
    largest: float


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """Where the difference between engine and trainer comes from."""

    tokens: int
    total: float
    """mean |log pi - log mu|"""
    signed: float
    """mean of log pi - log mu"""
    largest: float
    rows: tuple[LedgerRow, ...]
    """every cause that was removed, in the order of ``CAUSES``, and what could not be told apart"""
    absent: Mapping[str, str] = field(default_factory=dict)
    """causes without a row, and why"""
    notes: tuple[str, ...] = ()

    @property
    def left(self) -> float | None:
        """Mean absolute value of what no cause explains; None = it is not known (see ``absent``)."""
        return next((row.size for row in self.rows if row.cause == UNEXPLAINED), None)

    @property
    def closes(self) -> bool | None:
        """Whether the causes explain the total but for 5 %, or it is rounding; None = ``left`` is not known."""
        if self.total <= ROUNDING:
            return True
        return None if self.left is None else self.left <= CLOSES_WITHIN * self.total

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "tokens": self.tokens,
            "mean_abs": self.total,
            "mean": self.signed,
            "max_abs": self.largest,
            "closes": self.closes,
            "unexplained_mean_abs": self.left,
            "causes": {row.cause: {k: v for k, v in vars(row).items() if k != "cause"} for row in self.rows},
            "not_separated": dict(self.absent),
            "notes": list(self.notes),
        }


def make_ledger(
    trained: Tensor, chain: Sequence[CauseScoring], absent: Mapping[str, str] | None = None, notes: Sequence[str] = ()
) -> Ledger:
    """The ledger of a chain.

    Args:
        trained: [N] what the trainer computes, log pi.
        chain: from there on; the last one is what the engine reported, log mu.
        absent, notes: see ``Ledger``.

    Raises:
        ValueError: no tokens, scorings of another number of tokens, or one that is not finite.
    """
    before = trained.double()
    if not len(before) or not chain:
        raise ValueError(f"a ledger needs tokens and scorings, got {len(before)} tokens and {len(chain)} scorings")
    if wrong := int((~before.isfinite()).sum()):
        raise ValueError(f"{wrong} of the trainer's {len(before)} log-probabilities are not finite")
    links: dict[str, Tensor] = {}
    for i, scoring in enumerate(chain):
        after = scoring.logprobs.double()
        if after.shape != before.shape or not bool(after.isfinite().all()):
            raise ValueError(
                f"scoring {i} ({scoring.cause}) has shape {tuple(after.shape)} and {int((~after.isfinite()).sum())} "
                f"values that are not finite; expected {len(before)} finite log-probabilities"
            )
        links[scoring.cause] = links.get(scoring.cause, torch.zeros_like(before)) + (before - after)
        before = after
    difference = trained.double() - before
    total = difference.abs().mean().item()

    def row(cause: str) -> LedgerRow:
        link = links[cause]
        part = (difference.sign() * link).mean().item()
        share = part / total if total else 0.0
        return LedgerRow(cause, part, share, link.mean().item(), link.abs().mean().item(), link.abs().max().item())

    known = [cause for cause in CAUSES if cause in links]
    others = [cause for cause in links if cause not in CAUSES]
    return Ledger(
        tokens=len(difference),
        total=total,
        signed=difference.mean().item(),
        largest=difference.abs().max().item(),
        rows=tuple(row(cause) for cause in (*known, *others)),
        absent=dict(absent or {}),
        notes=tuple(notes),
    )


def as_text(ledger: Ledger) -> str:
    """The ledger as a table with its verdict."""
    width = max(len("cause"), *(len(row.cause) for row in ledger.rows))
    head = f"{'cause':<{width}}  {'part':>10}  {'share':>7}  {'mean':>10}  {'mean |.|':>10}  {'max |.|':>10}"
    lines = [f"mismatch of {ledger.tokens} tokens, in nats: log pi (trainer) - log mu (engine)", "", head]
    lines.append("-" * len(head))
    lines += [
        f"{row.cause:<{width}}  {row.part:>10.2e}  {row.share:>7.1%}  {row.signed:>10.2e}  {row.size:>10.2e}  "
        f"{row.largest:>10.2e}"
        for row in ledger.rows
    ]
    lines.append("-" * len(head))
    lines.append(
        f"{'total':<{width}}  {ledger.total:>10.2e}  {1 if ledger.total else 0:>7.1%}  {ledger.signed:>10.2e}  "
        f"{ledger.total:>10.2e}  {ledger.largest:>10.2e}"
    )
    lines += ["", *(f"{cause}: {why}" for cause, why in ledger.absent.items()), _verdict(ledger), *ledger.notes]
    return "\n".join(lines)


def _verdict(ledger: Ledger) -> str:
    if ledger.total <= ROUNDING:
        return f"closes: yes, the whole difference is rounding ({ledger.total:.1e} <= {ROUNDING:g} nats)"
    if ledger.left is None:
        return "closes: not known, since what is left cannot be told from the causes that are not separated"
    share = ledger.left / ledger.total
    if ledger.closes:
        return f"closes: yes, {share:.2%} of the mean difference is unexplained ({CLOSES_WITHIN:.0%} is allowed)"
    return (
        f"closes: NO, {share:.1%} of the mean difference is unexplained ({CLOSES_WITHIN:.0%} is allowed): engine and "
        "trainer do not have the same weights, tokens or positions, or differ in something that is not listed here"
    )
