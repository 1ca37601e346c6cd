"""Score centering beside every other option of a loss, and where pi or mu is 0, against plain arithmetic.

The reference goes id by id: the weight of each id of the head and of the tail, and from these the gradient by the
logits. It shares no line with the package.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_dppo.config.loss import LossConfig
from tests.unit.losses.test_centering import V, every_sample, positions

K = 3
LOW, HIGH = 0.06, 0.09
LIMITS = {"divergence_threshold_low": LOW, "divergence_threshold_high": HIGH}
BINARY: dict[str, Any] = {"ratio_cap": 1.5, **LIMITS}
LOSSES: dict[str, dict[str, Any]] = {
    "dppo_binary_tv": BINARY,
    "dppo_binary_kl": BINARY,
    "dppo_topk_tv": {"ratio_cap": 2.0, **LIMITS},
    "dppo_topk_kl": {"ratio_cap": 2.0, **LIMITS},
    "grpo": {},
    "ppo_clip": {"dual_clip": 1.5},
    "cispo": {"ratio_floor": 0.8, "ratio_cap": 1.2},
    "pg_is": {},
}
THRESHOLDS: list[dict[str, Any]] = [
    {"threshold_age": 2.0},
    {"threshold_knee": 0.5, "threshold_floor": 0.4},
    {"threshold_age": 1.0, "threshold_knee": 1.0},
]
MISMATCH: list[dict[str, Any]] = [
    {"mismatch": f"mask_{level}", "mismatch_low": 0.8, "mismatch_high": 1.25}
    for level in ("token", "sequence", "geometric")
]
PREDICTED: list[dict[str, Any]] = [
    {"direction": "predictive", "tail": tail} for tail in ("proportional", "aggregated", "uniform")
]


def cases() -> list[dict[str, Any]]:
    """Every loss beside every option that it has, and beside two at once."""
    result: list[dict[str, Any]] = []
    for name, keys in LOSSES.items():
        options: list[dict[str, Any]] = [{}, *MISMATCH]
        if name.startswith("dppo_binary") or name in ("cispo", "pg_is"):
            options += [{"form": "ratio"}, *({"form": "ratio", **mask} for mask in MISMATCH)]
        if name.startswith("dppo") or name in ("grpo", "ppo_clip"):
            options += [*THRESHOLDS, *(a | b for a, b in product(THRESHOLDS[:2], MISMATCH))]
        if name.startswith("dppo_topk"):
            options += [*PREDICTED, *(a | b for a, b in product(PREDICTED, THRESHOLDS[:2]))]
        result += [{"name": name, **keys, **option} for option in options]
    return result


SCALED = [(keys, scale) for keys in cases() for scale in ((0.05, 0.3, 1.0) if "threshold_knee" in keys else (1.0,))]
"""Options, and the scale of the mismatch over the batch."""


@dataclass(frozen=True)
class Position:
    """Whole distributions of one position, and what the options read of it."""

    p: list[float]
    m: list[float]
    advantage: float
    age: float
    scale: float

    @property
    def head(self) -> list[int]:
        return sorted(range(V), key=lambda v: (-self.m[v], v))[:K]

    def log_ratio(self, v: int) -> float:
        if self.m[v] == 0 or self.p[v] == 0:
            return 0.0 if self.m[v] == 0 else -math.inf
        return min(math.log(self.p[v]) - math.log(self.m[v]), 80.0)


def kl(pairs: list[tuple[float, float]]) -> float:
    return sum(math.inf if p == 0 else m * math.log(m / p) for p, m in pairs if m > 0)


def on_set(x: Position, keys: dict[str, Any], slots: list[int], k: int | None) -> tuple[float, float]:
    """The divergence over the slots and the rest, and its slope along ``e_k - pi``; k None is an id of the tail."""
    rest = [v for v in range(V) if v not in slots]
    p_rest, m_rest = sum(x.p[v] for v in rest), max(1 - sum(x.m[v] for v in slots), 0.0)
    pairs = [(x.p[v], x.m[v]) for v in slots] + [(p_rest, m_rest)]
    tail = keys.get("tail", "proportional")
    q = sum(x.p[v] ** 2 for v in rest) if tail == "proportional" else p_rest**2
    q = q / max(len(rest), 1) if tail == "uniform" else q
    p_k = 0.0 if k is None else x.p[k]
    excess = p_k - sum(x.p[v] ** 2 for v in slots) - q
    # The change of log pi of each slot, which exists where pi is 0, and that of the mass of the rest.
    moves = [(v == k) - x.p[v] - excess for v in slots]
    rest_move = -q - excess * p_rest
    if keys["name"].endswith("tv"):
        changes = [x.p[v] * move for v, move in zip(slots, moves, strict=True)] + [rest_move]
        slope = sum(math.copysign(1, p - m) * move for (p, m), move in zip(pairs, changes, strict=True) if p != m) / 2
        return sum(abs(p - m) for p, m in pairs) / 2, slope
    slope = -sum(x.m[v] * move for v, move in zip(slots, moves, strict=True)) - m_rest / p_rest * rest_move
    return kl([*pairs[:-1], (max(p_rest, 1e-12), max(m_rest, 1e-12))]), slope


def weight(x: Position, keys: dict[str, Any], slots: list[int], k: int | None, tail: tuple[float, float]) -> float:
    """The factor of ``- A grad log pi`` if id k were sampled; None is an id of the tail, whose masses are given."""
    up = x.advantage > 0
    log_r = x.log_ratio(k) if k is not None else math.log(tail[0] / tail[1])
    p, m = (x.p[k], x.m[k]) if k is not None else (0.0, 0.0)
    r = math.exp(log_r)
    if "mismatch" in keys and keys["mismatch"] == "mask_token" and not 0.8 <= r <= 1.25:
        return 0.0
    shrink = 1 / (1 + x.age / keys["threshold_age"]) if "threshold_age" in keys else 1.0
    if "threshold_knee" in keys and log_r:
        u = abs(log_r) / x.scale
        shrink *= min(1.0, max(keys.get("threshold_floor", 0.25), keys["threshold_knee"] / u))
    floor, cap = keys.get("ratio_floor", 0.0), keys.get("ratio_cap", math.inf)
    if keys["name"].startswith("dppo"):
        if "topk" in keys["name"]:
            moved, slope = on_set(x, keys, slots, k)
        else:
            moved = abs(p - m) if keys["name"].endswith("tv") else kl([(p, m), (1 - p, 1 - m)])
        away = slope if "direction" in keys else log_r
        if x.advantage * away > 0 and moved > (HIGH if up else LOW) * shrink:
            return 0.0
    elif keys["name"] in ("grpo", "ppo_clip"):
        dual = keys.get("dual_clip", math.inf)
        if (up and r > 1 + 0.28 * shrink) or (not up and (r < 1 - 0.2 * shrink or r > dual)):
            return 0.0
    if keys.get("form") == "ratio":
        return r if floor <= r <= cap else 0.0
    return min(max(r, floor), cap)


def gradient(x: Position, keys: dict[str, Any], sampled: int) -> list[float]:
    """The gradient of the loss of one sampled id by each logit."""
    head = x.head
    own_slots = head if sampled in head else [*head, sampled]
    factors = [0.0] * V
    if x.p[sampled] > 0:
        factors[sampled] += weight(x, keys, own_slots, sampled, (0.0, 0.0))
    p_rest = max(sum(p for v, p in enumerate(x.p) if v not in head), 1e-6)
    m_rest = max(1 - sum(x.m[v] for v in head), 1e-6)
    alpha = m_rest / p_rest * weight(x, keys, head, None, (p_rest, m_rest))
    for v in head:
        mean = x.m[v] * weight(x, keys, head, v, (0.0, 0.0)) if x.m[v] > 0 else 0.0
        if x.p[v] > 0:
            factors[v] -= mean - alpha * x.p[v]
    total = sum(factors)
    return [-x.advantage * (factors[v] - total * x.p[v]) for v in range(V)]


def edges() -> tuple[Tensor, Tensor]:
    """Positions with rare, impossible and nearly certain ids: logits of pi, and probabilities of mu."""
    logits = torch.tensor(
        [
            [1.0, 0.5, 0.8, 0.1, 0.0, -1.0, -2.0],
            [1.0, 0.5, -math.inf, 0.1, 0.0, -1.0, -2.0],
            [1.0, 0.5, 0.8, -18.0, -18.5, -19.0, -21.0],
            [1.0, 0.5, 0.8, -1.0, -1.2, -1.5, -2.0],
            [0.2, 0.6, 0.8, -18.0, -18.5, -19.0, -21.0],
        ],
        dtype=torch.float64,
    )
    rare = math.exp(-200)
    mu = torch.tensor(
        [
            [0.7, 0.3, rare, rare**2, 0.0, 0.0, 0.0],
            [0.5, 0.3, 0.15, 0.02, 0.01, 0.01, 0.01],
            [0.5, 0.3, 0.2 - 1e-7, 4e-8, 3e-8, 2e-8, 1e-8],
            [0.5, 0.3, 0.2 - 1e-7, 4e-8, 3e-8, 2e-8, 1e-8],
            [0.6, 0.4, 0.0, 0.0, 0.0, 0.0, 0.0],
        ],
        dtype=torch.float64,
    )
    return logits, mu


def masked_sequences(found: list[Position], keys: dict[str, Any]) -> list[bool]:
    """True for each sample whose sequence of two samples is removed by ``mask_sequence`` or ``mask_geometric``."""
    logs = [x.log_ratio(v) for x in found for v in range(V)]
    result = []
    for first in range(0, len(logs), 2):
        both = logs[first : first + 2]
        level = sum(both) / (len(both) if keys["mismatch"] == "mask_geometric" else 1)
        result += [not math.log(0.8) <= level <= math.log(1.25)] * len(both)
    return result


@pytest.mark.parametrize("advantage", [1.5, -0.5])
@pytest.mark.parametrize(
    ("keys", "scale"), SCALED, ids=lambda x: str(x) if isinstance(x, float) else ", ".join(map(str, x.values()))
)
def test_beside_every_option_the_gradient_is_the_sample_s_own_less_the_mean(
    keys: dict[str, Any], scale: float, advantage: float
) -> None:
    """Each id of each position is sampled once, so the sampled id is in the head, outside of it, and impossible."""
    logits, mu = (torch.cat(pair) for pair in zip(positions(11, 9), edges(), strict=True))
    ages = [float(i % 4) for i in range(len(mu))]
    found = [
        Position(p, m, advantage, age, scale)
        for p, m, age in zip(logits.softmax(-1).tolist(), mu.tolist(), ages, strict=True)
    ]
    want = [gradient(x, keys, v) if x.m[v] > 0 else [0.0] * V for x in found for v in range(V)]
    if keys.get("mismatch") in ("mask_sequence", "mask_geometric"):
        is_masked = masked_sequences(found, keys)
        assert len(is_masked) > sum(is_masked) > 0
        want = [[0.0] * V if masked else row for row, masked in zip(want, is_masked, strict=True)]
    config = LossConfig(**keys, centering=True, topk=K)
    columns = {
        "ages": torch.tensor(ages).repeat_interleave(V),
        "sequence_ids": torch.arange(len(mu) * V) // 2,
        "statistics": {"mismatch_scale": scale},
    }
    got, _ = every_sample(logits, mu, advantage, config, K, **columns)
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64).view_as(got), rtol=1e-9, atol=1e-11)
