"""Every policy loss a second time, one token at a time and in plain arithmetic: shares no line with the package.

Written from the papers' formulas (arXiv 2602.04879, equations 10 to 16 and the appendix on the unified gradient;
1707.06347, 1912.09729, 2507.18071, 2506.13585). Slow, float64, for a few hundred tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.config.loss import LossConfig
from megatron_dppo.types import LossInputs

CLIP = (0.2, 0.28)
MISMATCH = (0.5, 2.0)
KEYS_OF_SOME = {
    "divergence": None,
    "topk_eviction": False,
    "direction": "sampled",
    "ratio_cap": None,
    "ratio_floor": None,
    "dual_clip": None,
    "threshold_age": None,
    "threshold_knee": None,
}
"""Keys that not every loss has -> what the formulas read where a loss has none."""


class Keys:
    """The keys of a loss."""

    def __init__(self, config: LossConfig) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        if name in KEYS_OF_SOME:
            return getattr(self._config, name, KEYS_OF_SOME[name])
        return getattr(self._config, name)


def plain_loss(x: LossInputs, config: LossConfig) -> tuple[Tensor, float]:
    """The aggregated loss, and the share of tokens with a signal that it drops."""
    c = Keys(config)
    kept: list[bool] = []
    total = torch.zeros((), dtype=torch.float64)
    weights = token_weights(x, c)
    for t in [t for t, inside in enumerate(x.loss_mask.tolist()) if inside]:
        advantage = float(x.advantages[t])
        keep, term = TERMS.get(c.name.rpartition(":")[2], masked_term)(x, c, t, advantage)
        if c.centering:
            term = term + centered(x, c, t, advantage)
        if c.kl_coef:
            towards = x.reference_logprobs if c.kl_target == "reference" else x.rollout_logprobs
            assert towards is not None
            back = towards[t].double() - x.logprobs[t]
            term = term + c.kl_coef * (back.exp() - back - 1)  # k3
        if c.entropy_coef:
            assert x.entropy is not None
            term = term - c.entropy_coef * x.entropy[t]
        total = total + weights[t] * term
        kept += [keep] if advantage else []
    return total, kept.count(False) / len(kept)


def _cap(c: Keys) -> float:
    if isinstance(c.ratio_cap, float):
        return c.ratio_cap
    return 5.0 if c.ratio_cap is None and c.name.startswith("dppo_") else math.inf


def token_weights(x: LossInputs, c: Keys) -> list[float]:
    """1 / N, 1 / H, 1 / (S L) or 1 / (S H) for each token (docs/loss.md, "Aggregation")."""
    assert x.sequence_ids is not None
    ids = x.sequence_ids.tolist()
    lengths = [0] * (max(ids) + 1)
    for i, inside in zip(ids, x.loss_mask.tolist(), strict=True):
        lengths[i] += inside
    kind = c.aggregation or ("seq_mean_token_mean" if c.name in ("gspo", "gmpo") else "token_mean")
    by_length = {
        "token_mean": lambda length: 1 / sum(lengths),
        "token_sum_norm": lambda length: 1 / (c.horizon or 1),
        "seq_mean_token_mean": lambda length: 1 / (len(lengths) * length),
        "seq_mean_token_sum_norm": lambda length: 1 / (len(lengths) * (c.horizon or 1)),
    }[kind]
    return [by_length(lengths[i]) for i in ids]


def probabilities(x: LossInputs, t: int) -> tuple[float, float, float]:
    """pi, mu and pi' of the sampled token."""
    assert x.rollout_logprobs is not None and x.recomputed_logprobs is not None
    columns = (x.logprobs.detach(), x.rollout_logprobs, x.recomputed_logprobs)
    pi, mu, recomputed = (math.exp(float(column[t])) for column in columns)
    return pi, mu, recomputed


def divergence(x: LossInputs, c: Keys, t: int) -> float:
    """D of the token: binary or on the Top-K set, total variation or KL with mu first."""
    pi, mu, recomputed = probabilities(x, t)
    kind = {"cppo": "tv", "trm": "kl"}.get(c.name, c.name[-2:])
    if "topk" not in c.name and c.divergence != "topk":
        old = recomputed if "recompute" in c.name else mu
        pairs = [(pi, old), (1 - pi, 1 - old)]
    else:
        used = used_slots(x, c, t)
        pairs = slot_pairs(x, t, used)
        rest = [1 - sum(side) for side in zip(*pairs, strict=True)]
        pairs.append((max(rest[0], 1e-12), max(rest[1], 1e-12)))
    if kind == "tv":
        return sum(abs(p - m) for p, m in pairs) / 2
    return sum(m * math.log(m / p) for p, m in pairs if m > 0)


def used_slots(x: LossInputs, c: Keys, t: int) -> list[int]:
    """The slots of the set, after eviction."""
    assert x.topk_valid is not None
    used = [slot for slot, valid in enumerate(x.topk_valid[t].tolist()) if valid]
    if c.topk_eviction and len(used) > c.topk:
        used.remove(c.topk - 1)
    return used


def slot_pairs(x: LossInputs, t: int, used: list[int]) -> list[tuple[float, float]]:
    """pi and mu of each slot."""
    assert x.topk_logprobs is not None and x.rollout_topk_logprobs is not None
    return [(math.exp(float(x.topk_logprobs[t, s])), math.exp(float(x.rollout_topk_logprobs[t, s]))) for s in used]


def divergence_slope(x: LossInputs, c: Keys, t: int) -> float:
    """The derivative of the divergence of the buckets along e_k - pi, bucket by bucket."""
    assert x.topk_valid is not None and x.topk_other_square is not None and x.topk_other_logprob is not None
    used = used_slots(x, c, t)
    outside = c.topk in used  # the sampled token's slot; otherwise it is the one with its probability
    p_k, m_k, _ = probabilities(x, t)
    pairs = slot_pairs(x, t, used)
    sampled = used.index(c.topk) if outside else min(range(len(used)), key=lambda i: abs(pairs[i][1] - m_k))
    rest_square = float(x.topk_other_square[t])
    if c.topk_eviction and len(used) < int(x.topk_valid[t].sum()):
        rest_square += math.exp(2 * float(x.topk_logprobs[t, c.topk - 1]))  # type: ignore[index]
    excess = p_k - sum(p * p for p, _ in pairs) - rest_square
    moves = [p * ((i == sampled) - p - excess) for i, (p, _) in enumerate(pairs)]
    rest = [1 - sum(side) for side in zip(*pairs, strict=True)]
    pairs.append((max(rest[0], 1e-12), max(rest[1], 1e-12)))
    moves.append(-rest_square - excess * pairs[-1][0])
    if c.name.endswith("tv"):
        return sum(math.copysign(1, p - m) * move for (p, m), move in zip(pairs, moves, strict=True)) / 2
    return -sum(m / p * move for (p, m), move in zip(pairs, moves, strict=True) if m > 0)


def masked_term(x: LossInputs, c: Keys, t: int, advantage: float) -> tuple[bool, Tensor]:
    """``-A sg(min(r, C)) M log pi``, or with ``form = "ratio"`` ``-A min(r, C) M``."""
    pi, mu, recomputed = probabilities(x, t)
    old = recomputed if "recompute" in c.name or c.name == "minirl" else mu
    if c.name in ("grpo", "minirl"):
        shrunk = threshold_factor(x, c, t)
        low, high = (c.clip_ratio_low or CLIP[0]) * shrunk, (c.clip_ratio_high or CLIP[1]) * shrunk
        outside = pi / old > 1 + high if advantage > 0 else pi / old < 1 - low
    elif c.name in ("pg_is", "cispo", "drpo", "spo", "sapo"):
        outside = False
    elif c.name == "trm":
        outside = not whole_sequence(x, c, t)
    elif c.name == "cppo":
        outside = advantage * (pi - mu) > 0 and not within_budget(x, c, t, advantage)
    elif c.name == "m2po":
        outside = t in beyond_moment(x, c)
    elif c.name == "ipo":
        limit = c.divergence_threshold_high if pi > mu else c.divergence_threshold_low
        assert limit is not None
        outside = abs(pi - mu) > limit
    else:
        limit = c.divergence_threshold_high if advantage > 0 else c.divergence_threshold_low
        assert limit is not None
        limit *= threshold_factor(x, c, t)
        outward = pi - old if c.direction == "sampled" else divergence_slope(x, c, t)
        outside = advantage * outward > 0 and divergence(x, c, t) > limit
    keep = advantage == 0 or not outside
    if c.mismatch == "mask_sequence":
        keep = keep and MISMATCH[0] <= math.exp(sum(sequence_log_ratios(x, t))) <= MISMATCH[1]
    cap = _cap(c)
    if not keep:
        return False, 0 * x.logprobs[t]
    if c.form == "ratio" and c.name not in ("drpo", "spo"):
        assert x.rollout_logprobs is not None
        return True, -advantage * (x.logprobs[t] - x.rollout_logprobs[t].double()).exp().clamp(max=cap)
    weight = pi / mu
    if c.name == "sapo":
        steepness = c.gate_temperature_high if advantage > 0 else c.gate_temperature_low
        gate = 1 / (1 + math.exp(-steepness * (weight - 1)))
        weight *= 4 * gate * (1 - gate)
    if c.name == "spo":
        weight -= weight * (weight - 1) / c.ratio_range * math.copysign(1, advantage)
    if c.name == "drpo" and advantage:
        limit = c.divergence_threshold_high if advantage > 0 else c.divergence_threshold_low
        assert limit is not None
        weight -= weight * (pi - mu) / limit * math.copysign(1, advantage)
    return True, -advantage * max(min(weight, cap), c.ratio_floor or -math.inf) * x.logprobs[t]


def beyond_moment(x: LossInputs, c: Keys) -> set[int]:
    """M2PO: remove the token with the largest square, again and again, until the mean is within the limit."""
    squares = {}
    for t in [t for t, inside in enumerate(x.loss_mask.tolist()) if inside]:
        pi, mu, _ = probabilities(x, t)
        if c.second_moment_tokens == "all" or float(x.advantages[t]) * math.log(pi / mu) > 0:
            squares[t] = math.log(pi / mu) ** 2
    every = set(squares)
    while squares and sum(squares.values()) / len(squares) > c.second_moment_limit:
        squares.pop(max(squares, key=lambda t: squares[t]))
    return every - set(squares)


def threshold_factor(x: LossInputs, c: Keys, t: int) -> float:
    """1 / (1 + age / threshold_age), times min(1, max(floor, knee / u)) with u the mismatch over that of the batch."""
    factor = 1.0
    if c.threshold_age is not None:
        assert x.ages is not None
        factor /= 1 + float(x.ages[t]) / c.threshold_age
    if c.threshold_knee is not None:
        pi, mu, _ = probabilities(x, t)
        u = abs(math.log(pi / mu)) / x.statistics["mismatch_scale"]
        if u > 0:  # where a filter left one token, both policies have probability 1
            factor *= min(1.0, max(c.threshold_floor, c.threshold_knee / u))
    return factor


def weight_of_id(c: Keys, advantage: float, p: float, m: float, on_set: float) -> float:
    """The factor of ``- A grad log pi`` if an id of these probabilities were sampled; ``on_set``: the Top-K's D."""
    sign, r = math.copysign(1.0, advantage), p / m
    limit = getattr(c, "divergence_threshold_high" if advantage > 0 else "divergence_threshold_low", None)
    away = sign * (p - m) > 0
    if c.name in ("grpo", "ppo_clip"):
        outside = r > 1 + (c.clip_ratio_high or CLIP[1]) if advantage > 0 else r < 1 - (c.clip_ratio_low or CLIP[0])
        outside = outside or (c.dual_clip is not None and advantage < 0 and r > c.dual_clip)
        return 0.0 if outside else r
    if c.name == "drpo":
        assert limit is not None
        return min(r * (1 - sign * (p - m) / limit), _cap(c))
    if c.name.startswith("dppo_binary"):
        moved = abs(p - m)
        if c.name.endswith("kl"):
            moved = m * math.log(m / p) + (1 - m) * math.log((1 - m) / (1 - p))
        return 0.0 if away and moved > limit else min(r, _cap(c))
    if c.name.startswith("dppo_topk"):
        return 0.0 if away and on_set > limit else min(r, _cap(c))
    assert c.name == "cispo", c.name
    return max(min(r, _cap(c)), c.ratio_floor or 0.0)


def centered(x: LossInputs, c: Keys, t: int, advantage: float) -> Tensor:
    """``A`` times the mean over mu of ``f grad log pi``: the head id by id, all other ids as if mu were rho pi."""
    assert x.topk_logprobs is not None and x.topk_valid is not None
    if c.mismatch == "mask_sequence" and not MISMATCH[0] <= math.exp(sum(sequence_log_ratios(x, t))) <= MISMATCH[1]:
        return 0 * x.logprobs[t]
    head = [slot for slot in range(c.topk) if bool(x.topk_valid[t, slot])]
    pairs = slot_pairs(x, t, head)
    p_rest, m_rest = (max(1 - sum(side), 1e-6) for side in zip(*pairs, strict=True))
    buckets = [*pairs, (p_rest, m_rest)]
    on_set = sum(abs(p - m) for p, m in buckets) / 2
    if c.name.endswith("_kl"):
        on_set = sum(m * math.log(m / p) for p, m in buckets if m > 0)
    # An id of the tail is too rare for any threshold of a probability.
    rare = 1e-12
    alpha = m_rest / p_rest * weight_of_id(c, advantage, rare * p_rest / m_rest, rare, on_set)
    total = 0 * x.logprobs[t]
    for slot, (p, m) in zip(head, pairs, strict=True):
        if p == 0:  # outside the sampling mask: log pi is -inf, and has no gradient
            continue
        mean = m * weight_of_id(c, advantage, p, m, on_set) if m > 0 else 0.0
        total = total + (mean - alpha * p) * x.topk_logprobs[t, slot]
    return advantage * total


def sequence_log_ratios(x: LossInputs, t: int) -> list[float]:
    """log pi - log mu of the tokens of t's sequence that count."""
    assert x.sequence_ids is not None and x.rollout_logprobs is not None
    in_sequence = (x.sequence_ids == x.sequence_ids[t]) & x.loss_mask
    return (x.logprobs.detach() - x.rollout_logprobs.double())[in_sequence].tolist()


def sequence_places(x: LossInputs, t: int) -> list[int]:
    """The tokens of t's sequence that count, in order."""
    assert x.sequence_ids is not None
    return ((x.sequence_ids == x.sequence_ids[t]) & x.loss_mask).nonzero()[:, 0].tolist()


def whole_sequence(x: LossInputs, c: Keys, t: int) -> bool:
    """TRM: max and mean of KL(mu || pi), or of (log r)^2 / 2 and r - 1 - log r."""
    if c.divergence is None:
        ratios = sequence_log_ratios(x, t)
        peaks, terms = [r * r / 2 for r in ratios], [math.exp(r) - 1 - r for r in ratios]
    else:
        peaks = terms = [divergence(x, c, place) for place in sequence_places(x, t)]
    largest, mean = (math.inf if limit == "off" else limit for limit in (c.sequence_max, c.sequence_mean))
    return max(peaks) <= largest and sum(terms) / len(terms) <= mean


def within_budget(x: LossInputs, c: Keys, t: int, advantage: float) -> bool:
    """Algorithm 1 of arXiv 2606.10968, with the budget of its equation 22."""
    places = sequence_places(x, t)
    result = [divergence(x, c, place) for place in places]
    position = 0.9 * (len(result) - 1)
    ordered, below = sorted(result), int(position)
    above = min(below + 1, len(result) - 1)
    percentile = ordered[below] + (position - below) * (ordered[above] - ordered[below])
    budget = min(max(percentile, c.prefix_budget), c.prefix_budget_max or 2 * c.prefix_budget)
    limit = (c.divergence_threshold_high if advantage > 0 else c.divergence_threshold_low) or 0.15
    spent = weight_sum = 0.0
    for i, (place, d) in enumerate(zip(places, result, strict=True)):
        weight = 1 - (1 - c.position_floor) * i / max(len(result) - 1, 1)
        if place == t:
            return weight * d <= min(limit, limit + budget * weight_sum - spent)
        spent += weight * d
        weight_sum += weight
    raise AssertionError("t is not among its sequence's tokens")


def surrogate(ratio: Tensor, c: Keys, advantage: float) -> tuple[bool, Tensor]:
    """PPO's pessimistic bound, and the dual clip below it."""
    low, high = c.clip_ratio_low or CLIP[0], c.clip_ratio_high or CLIP[1]
    r = float(ratio.detach())
    keep = not ((advantage > 0 and r > 1 + high) or (advantage < 0 and r < 1 - low))
    term = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high))
    if c.dual_clip is not None and advantage < 0 and r > c.dual_clip:
        return False, torch.full_like(term, -advantage * c.dual_clip)
    return keep, term


def ppo_clip(x: LossInputs, c: Keys, t: int, advantage: float) -> tuple[bool, Tensor]:
    """Ratio pi / mu."""
    assert x.rollout_logprobs is not None
    return surrogate((x.logprobs[t] - x.rollout_logprobs[t].double()).exp(), c, advantage)


def ppo_decoupled(x: LossInputs, c: Keys, t: int, advantage: float) -> tuple[bool, Tensor]:
    """Ratio pi / pi', times pi' / mu limited to [0, 2]."""
    assert x.recomputed_logprobs is not None
    _, mu, recomputed = probabilities(x, t)
    keep, term = surrogate((x.logprobs[t] - x.recomputed_logprobs[t].double()).exp(), c, advantage)
    return keep, min(recomputed / mu, MISMATCH[1]) * term


def gspo(x: LossInputs, c: Keys, t: int, advantage: float) -> tuple[bool, Tensor]:
    """Geometric mean of the ratios of the sequence, with the gradient of this token."""
    ratios = sequence_log_ratios(x, t)
    own = x.logprobs[t] - x.logprobs[t].detach()
    return surrogate((own + sum(ratios) / len(ratios)).exp(), c, advantage)


def gmpo(x: LossInputs, c: Keys, t: int, advantage: float) -> tuple[bool, Tensor]:
    """exp of the mean of the clipped log ratios of the sequence, with the gradient of this token."""
    low, high = -c.log_clip_low, c.log_clip_high
    clipped = [min(r, high) if advantage > 0 else max(r, low) for r in sequence_log_ratios(x, t)]
    mean = math.exp(sum(clipped) / len(clipped))
    assert x.rollout_logprobs is not None
    log_ratio = float(x.logprobs[t].detach() - x.rollout_logprobs[t].double())
    if advantage and (log_ratio > high if advantage > 0 else log_ratio < low):
        return False, torch.full_like(x.logprobs[t], -advantage * mean)
    return True, -advantage * mean * (1 + x.logprobs[t] - x.logprobs[t].detach())


def vespo(x: LossInputs, c: Keys, t: int, advantage: float) -> tuple[bool, Tensor]:
    """The product of the ratios of the sequence, in a Gamma weight."""
    s = math.exp(sum(sequence_log_ratios(x, t)))
    power, decay = c.weight_power_low, c.weight_decay_low
    if advantage > 0:
        power, decay = c.weight_power_high, c.weight_decay_high
    return True, -advantage * s**power * math.exp(decay * (1 - s)) * x.logprobs[t]


def self_normalized(x: LossInputs, c: Keys, t: int, advantage: float) -> tuple[bool, Tensor]:
    """r over the mean of all r, unless log r is beyond 1.5 root mean squares of all."""
    inside = [s for s, inside in enumerate(x.loss_mask.tolist()) if inside]
    ratios = {s: pi / mu for s in inside for pi, mu, _ in [probabilities(x, s)]}
    spread = math.sqrt(sum(math.log(r) ** 2 for r in ratios.values()) / len(ratios))
    if abs(math.log(ratios[t])) > 1.5 * spread:
        return False, 0 * x.logprobs[t]
    return True, -advantage * ratios[t] * len(ratios) / sum(ratios.values()) * x.logprobs[t]


TERMS: Mapping[str, Callable[[LossInputs, Keys, int, float], tuple[bool, Tensor]]] = {
    "ppo_clip": ppo_clip,
    "ppo_decoupled": ppo_decoupled,
    "gspo": gspo,
    "gmpo": gmpo,
    "vespo": vespo,
    "SelfNormalized": self_normalized,
}
