"""Results of one run of the benchmark, and the deterministic gates on them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from head_peers.registry import OURS_A, OURS_B, Method
from head_peers.task import Size

from head_bench.reference import Errors
from head_bench.timing import PAGES, Ratio

BF16_LOGPROBS, FP32_LOGPROBS = 1e-5, 1e-5
BF16_GRADIENT, FP32_GRADIENT = 2.5e-3, 2e-6  # in fp32 every peer is at 1.6e-6 on some processors
LARGE_TRAFFIC = 12.0
"""Bytes per logit: a chunk of fp32 logits written, read twice, and its gradient written, all outside caches."""
PEAK = 1.0
"""Bytes per logit: a twelfth of the three fp32 tensors that Stable-RL and verl hold at once."""
STABLE_RL = "Stable-RL"


@dataclass
class Row:
    """One method. Counts are of one forward and backward pass; None = not measured."""

    method: Method
    gemms: float
    """Products, in units of one N x V x H product."""
    traffic: float
    """Bytes read and written per logit."""
    large_traffic: float
    """Part of the traffic on tensors above 16 MiB."""
    peak: int
    """Peak bytes at ``sizes["counts"]``."""
    errors: dict[str, Errors] = field(default_factory=dict)
    """Errors by dtype."""
    full_peak: int | None = None
    """Peak bytes at ``sizes["peak"]``."""
    times: dict[str, Ratio] = field(default_factory=dict)
    """Times by ``timing.PAGES``."""
    parallel: dict[str, Any] | None = None
    """Result of ``tensor_parallel.measure``."""
    parallel_times: dict[str, Ratio] = field(default_factory=dict)
    """Times over two ranks by ``timing.PAGES``."""

    def as_dict(self) -> dict[str, Any]:
        """Return the row for JSON."""
        about = {k: v for k, v in asdict(self.method).items() if not callable(v)}
        plain = {k: v for k, v in vars(self).items() if k not in ("method", "errors", "times", "parallel_times")}
        nested = {"errors": self.errors, "times": self.times, "parallel_times": self.parallel_times}
        return about | plain | {k: {name: value.as_dict() for name, value in v.items()} for k, v in nested.items()}


@dataclass
class Results:
    """Everything that is printed and written."""

    rows: list[Row]
    sizes: dict[str, Size]
    zero_share: float
    zero_gemms: dict[str, float]
    """Products of our methods with that share of zero advantages, by name."""
    zero_times: dict[str, Ratio] = field(default_factory=dict)
    """Time of ours B at that share over ours B at none, by ``timing.PAGES``."""
    limits: dict[str, Ratio] = field(default_factory=dict)
    """Time of three plain products of all tokens over ours B, by ``timing.PAGES``."""

    def row(self, name: str) -> Row:
        """Return the row of a method."""
        return next(row for row in self.rows if row.method.name == name)


@dataclass(frozen=True)
class Check:
    """One figure against its bound."""

    what: str
    value: float
    bound: float

    @property
    def holds(self) -> bool:
        """Return True if the value is within the bound; False for NaN."""
        return self.value <= self.bound

    def __str__(self) -> str:
        verdict = "holds" if self.holds else "FAILS"
        return f"{verdict}  {self.what}: {self.value:.3g}, bound {self.bound:.3g}"


def gates(results: Results) -> list[Check]:
    """Return the deterministic bounds on our head; a run of the benchmark fails on these alone."""
    checks: list[Check] = []
    for name, gemms in ((OURS_B.name, 3.0), (OURS_A.name, 4.0)):
        row = results.row(name)
        checks.append(Check(f"{name}: products", round(row.gemms, 2), gemms))
        share = 2 * results.zero_share if name == OURS_B.name else 3 * results.zero_share
        if not results.sizes["counts"].entropy_gradient:  # a bonus pulls at these rows too
            checks.append(Check(f"{name}: products with zero rows", round(results.zero_gemms[name], 2), gemms - share))
        for dtype, errors in row.errors.items():
            narrow = dtype == "bfloat16"
            at_most = BF16_LOGPROBS if narrow else FP32_LOGPROBS
            checks.append(Check(f"{name}: {dtype} log-probabilities", errors.logprobs, at_most))
            checks.append(Check(f"{name}: {dtype} at the ids", errors.id_logprobs or 0.0, at_most))
            slope = BF16_GRADIENT if narrow else FP32_GRADIENT
            checks.append(Check(f"{name}: {dtype} dH", errors.grad_hidden, slope))
            checks.append(Check(f"{name}: {dtype} dW", errors.grad_weight, slope))
        checks += _collective_gates(results, row)
        checks.append(Check(f"{name}: bytes a logit on tensors above 16 MiB", row.large_traffic, LARGE_TRAFFIC))
        peak, size = row.full_peak, results.sizes["peak"]
        assert peak is not None
        checks.append(Check(f"{name}: peak, bytes a logit at {size}", peak / (size.tokens * size.vocab), PEAK))
    return checks


def _collective_gates(results: Results, row: Row) -> list[Check]:
    name, size = row.method.name, results.sizes["parallel"]
    assert row.parallel is not None
    forward = row.parallel["collectives"]
    calls = row.parallel["loss_calls"]
    payload = sum(payload_bytes for _, payload_bytes in forward) / size.tokens
    errors = row.parallel["errors"]
    return [
        Check(f"{name}: forward collectives" + (" a chunk" if calls > 1 else ""), len(forward) / calls, 1),
        Check(f"{name}: backward collectives", len(row.parallel["backward_collectives"]), 0),
        Check(f"{name}: bytes a token and rank", payload, 4 * (4 + size.topk)),
        Check(f"{name}: log-probabilities over 2 ranks", errors["logprobs"], BF16_LOGPROBS),
        Check(f"{name}: dH over 2 ranks", errors["grad_hidden"], 2 * BF16_GRADIENT),
        Check(f"{name}: dW over 2 ranks", errors["grad_weight"], BF16_GRADIENT),
    ]


def goals(results: Results) -> list[Check]:
    """Return the target ratios of issue 4. They are soft, because times are never exact."""
    checks = []
    for pages in PAGES:
        for name, bound in (STABLE_RL, 0.55), ("verl unfused", 0.45), ("NeMo-RL logits", 0.20):
            row = next((row for row in results.rows if row.method.name == name), None)
            for kind, times in ("", row.times if row else {}), (", TP = 2", row.parallel_times if row else {}):
                if pages in times:
                    what = f"time of ours B / {name}'s{kind}, {pages} pages"
                    checks.append(Check(what, 1 / times[pages].median, bound))
        if pages in results.zero_times and not results.sizes["time"].entropy_gradient:
            what = f"time with {results.zero_share:.0%} zero advantages / none, {pages} pages"
            checks.append(Check(what, results.zero_times[pages].median, 0.8))
    for row in results.rows:
        if row.method.equal_task and not row.method.ours and row.full_peak is not None:
            for ours in (OURS_B.name, OURS_A.name):
                our_peak = results.row(ours).full_peak or 0
                checks.append(Check(f"peak of {ours} / {row.method.name}'s", our_peak / row.full_peak, 1 / 12))
    return checks


def select_methods(names: list[str] | None, all_methods: tuple[Method, ...]) -> list[Method]:
    """Return the named methods, and always ours and Stable-RL, which the gates need.

    Raises:
        SystemExit: If a name is unknown.
    """
    known = {m.name for m in all_methods}
    unknown = set(names or ()) - known
    if unknown:
        raise SystemExit(f"unknown methods {sorted(unknown)}; known: {sorted(known)}")
    needed = {OURS_A.name, OURS_B.name, STABLE_RL}
    return [m for m in all_methods if names is None or m.name in needed | set(names)]
