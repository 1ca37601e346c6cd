"""Mismatch ledger: log-probabilities of the same tokens, scored with one cause of mismatch removed at a time.

A chain of scorings leads from the trainer's log-probabilities to those that the engine reported. Neighbors differ in
one cause, so ``log pi - log mu`` of a token is the sum of its links. The part of a cause in the mean of
``|log pi - log mu|`` is the mean of ``sign(log pi - log mu) * link``. These parts add up to the mean, even if links
cancel along the chain.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor


class Cause(StrEnum):
    """Causes of a difference, in the order of the table."""

    OTHER_TRAINER = "its trainer"
    """Difference between another stack's trainer and an exact score: its numerics, and weights that changed since."""
    STALENESS = "staleness"
    SAMPLER = "sampler"
    ROUTER_IDS = "router ids"
    ROUTER_WEIGHTS = "router weights"
    HEAD = "head precision"
    RECURRENCE = "recurrence"
    """Linear attention in chunks of tokens, as in training, against one token at a time, as in decoding."""
    ENGINE = "engine numerics"
    TRAINER = "trainer numerics"
    NOT_SEPARATED = "engine, not separated"
    """All differences of an engine that cannot score the tokens again."""
    UNEXPLAINED = "unexplained"


CLOSES_WITHIN = 0.05
"""Fraction of the mean absolute difference that may stay unexplained."""
ROUNDING = 2e-5
"""Mean difference in nats that needs no explanation: fp32 sums in another order."""


@dataclass(frozen=True)
class CauseScoring:
    """Log-probabilities of the same tokens, one cause closer to the engine than the preceding scoring."""

    cause: str
    """Cause that separates it from the preceding scoring. Several links may have the same cause."""
    logprobs: Tensor
    """Log-probabilities ``[num_tokens]``."""


@dataclass(frozen=True)
class LedgerRow:
    """Contribution of one cause, in nats per token."""

    cause: str
    part: float
    """Part of the mean |log pi - log mu|; all parts add up to it. Negative if it cancels other causes."""
    share: float
    """``part`` divided by the mean."""
    signed: float
    """Mean of its links."""
    size: float
    """Mean absolute value of its links."""
    largest: float


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """Causes of the mismatch between engine and trainer."""

    tokens: int
    total: float
    """Mean |log pi - log mu|."""
    signed: float
    """Mean of log pi - log mu."""
    largest: float
    rows: tuple[LedgerRow, ...]
    """Separated causes in the order of ``Cause``, and the rest that was not separated."""
    absent: Mapping[str, str] = field(default_factory=dict)
    """Causes without a row, and the reason."""
    notes: tuple[str, ...] = ()

    @property
    def unexplained(self) -> float | None:
        """Mean absolute unexplained difference. None if it is unknown (see ``absent``)."""
        return next((row.size for row in self.rows if row.cause == Cause.UNEXPLAINED), None)

    @property
    def closes(self) -> bool | None:
        """True if at most 5 % is unexplained, or the total is rounding. None if ``unexplained`` is unknown."""
        if self.total <= ROUNDING:
            return True
        return None if self.unexplained is None else self.unexplained <= CLOSES_WITHIN * self.total

    def to_json(self) -> dict[str, Any]:
        """Return the ledger as a JSON object."""
        return {
            "tokens": self.tokens,
            "mean_abs": self.total,
            "mean": self.signed,
            "max_abs": self.largest,
            "closes": self.closes,
            "unexplained_mean_abs": self.unexplained,
            "causes": {row.cause: {k: v for k, v in vars(row).items() if k != "cause"} for row in self.rows},
            "not_separated": dict(self.absent),
            "notes": list(self.notes),
        }


def make_ledger(
    trained: Tensor, chain: Sequence[CauseScoring], absent: Mapping[str, str] | None = None, notes: Sequence[str] = ()
) -> Ledger:
    """Compute the ledger of a chain of scorings.

    ``trained`` is the trainer's log pi ``[num_tokens]``; the last scoring of the chain is log mu.
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

    causes: list[str] = list(Cause)
    in_order = sorted(links, key=lambda cause: causes.index(cause) if cause in causes else len(causes))
    return Ledger(
        tokens=len(difference),
        total=total,
        signed=difference.mean().item(),
        largest=difference.abs().max().item(),
        rows=tuple(map(row, in_order)),
        absent=dict(absent or {}),
        notes=tuple(notes),
    )


def format_ledger(ledger: Ledger) -> str:
    """Return the ledger as a table with a verdict."""
    width = max(len("cause"), *(len(row.cause) for row in ledger.rows))
    head = f"{'cause':<{width}}  {'part':>10}  {'share':>7}  {'mean':>10}  {'mean |.|':>10}  {'max |.|':>10}"
    share = 1.0 if ledger.total else 0.0
    total = LedgerRow("total", ledger.total, share, ledger.signed, ledger.total, ledger.largest)
    *rows, last = [
        f"{row.cause:<{width}}  {row.part:>10.2e}  {row.share:>7.1%}  {row.signed:>10.2e}  {row.size:>10.2e}  "
        f"{row.largest:>10.2e}"
        for row in (*ledger.rows, total)
    ]
    rule = "-" * len(head)
    title = f"mismatch of {ledger.tokens} tokens, in nats: log pi (trainer) - log mu (engine)"
    lines = [title, "", head, rule, *rows, rule, last]
    lines += ["", *(f"{cause}: {why}" for cause, why in ledger.absent.items()), _verdict(ledger), *ledger.notes]
    return "\n".join(lines)


def _verdict(ledger: Ledger) -> str:
    if ledger.total <= ROUNDING:
        return f"closes: yes, the difference is rounding ({ledger.total:.1e} <= {ROUNDING:g} nats)"
    if ledger.unexplained is None:
        return "closes: unknown, since not all causes are separated"
    share = ledger.unexplained / ledger.total
    if ledger.closes:
        return f"closes: yes, {share:.2%} of the mean difference is unexplained ({CLOSES_WITHIN:.0%} is allowed)"
    return (
        f"closes: NO, {share:.1%} of the mean difference is unexplained ({CLOSES_WITHIN:.0%} is allowed): engine and "
        "trainer differ in weights, tokens or positions, or in a cause that is not listed here"
    )
