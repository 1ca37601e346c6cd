"""Names of losses in other frameworks."""

from collections.abc import Mapping
from typing import Any

from megatron_dppo.config.section import TomlTable

_VERL = {"divergence_threshold_low": 0.2, "divergence_threshold_high": 0.2, "ratio_cap": 3.0}
_TRL = {"divergence_threshold_low": 0.15, "divergence_threshold_high": 0.15, "ratio_cap": 20.0}
_PRIME_RL_KL = {"form": "ratio", "kl_coef": 0.002, "kl_estimator": "k2", "kl_target": "rollout"}
_CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}
_PAPER = {"form": "ratio", "ratio_cap": "off", "aggregation": "seq_mean_token_sum_norm", "horizon": 8192}


def _drpo(delta: float) -> dict[str, Any]:
    return {"name": "drpo", "divergence_threshold_low": delta, "divergence_threshold_high": delta}


_CENTERED_WEIGHTS: Mapping[str, Mapping[str, Any]] = {
    "truncate": {"ratio_cap": 2.0},
    "none": {"ratio_cap": 1.0, "ratio_floor": 1.0},
    "mask": {"ratio_cap": "off", "mismatch": "mask_token"},
}
"""Values of ``centering`` when score centering was a loss of its own, with the keys of the weight: min(r, C), 1, or r
inside the mismatch limits."""
LOSS_ALIASES: Mapping[str, Mapping[str, Any]] = {
    "score_centering": {"name": "cispo", "ratio_cap": 2.0, "centering": True},
    "verl/dppo_tv": {"name": "dppo_binary_tv", **_VERL},
    "verl/dppo_kl": {"name": "dppo_binary_kl", **_VERL},
    "verl/vanilla": {"name": "ppo_clip", **_CLIP, "dual_clip": 3.0},
    "verl/gspo": {"name": "gspo", **_CLIP},
    "verl/cispo": {"name": "cispo", "ratio_floor": 0.8, "ratio_cap": 1.2},
    "stable_rl/dppo_binary_tv": {"name": "dppo_binary_tv", **_VERL},
    "stable_rl/dppo_binary_kl": {"name": "dppo_binary_kl", **_VERL},
    "stable_rl/dppo_topk_tv": {"name": "dppo_topk_tv", "topk_eviction": True, **_VERL},
    "stable_rl/dppo_topk_kl": {"name": "dppo_topk_kl", "topk_eviction": True, **_VERL},
    "stable_rl/dppo_binary_tv_recompute": {"name": "dppo_recompute_binary_tv", **_VERL},
    "stable_rl/dppo_binary_kl_recompute": {"name": "dppo_recompute_binary_kl", **_VERL},
    "stable_rl/ppo": {"name": "grpo", **_CLIP, "ratio_cap": 3.0},
    "stable_rl/ppo_recompute": {"name": "minirl", **_CLIP, "ratio_cap": 3.0},
    "stable_rl/pg_no_mask": {"name": "pg_is", "ratio_cap": 3.0},
    "trl/binary_tv": {"name": "dppo_binary_tv", **_TRL},
    "trl/binary_kl": {"name": "dppo_binary_kl", **_TRL},
    "trl/topk_tv": {"name": "dppo_topk_tv", "topk_eviction": True, **_TRL},
    "trl/topk_kl": {"name": "dppo_topk_kl", "topk_eviction": True, **_TRL},
    "drpo/paper": {**_drpo(12.5), **_PAPER},
    "drpo/12.5": _drpo(12.5),
    "drpo/2.5": _drpo(2.5),
    "drpo/1": _drpo(1.0),
    "drpo/0.15": _drpo(0.15),
    "spo/paper": {"name": "spo", "ratio_range": 12.5, **_PAPER},
    "skyrl/default": {
        "name": "dppo_binary_tv",
        "divergence_threshold_low": 0.2,
        "divergence_threshold_high": 0.2,
        "ratio_cap": "off",
        "form": "ratio",
        "centering": True,
    },
    "prime_rl/2026-04": {
        "name": "dppo_binary_tv",
        "divergence_threshold_low": 0.2,
        "divergence_threshold_high": 0.2,
        "ratio_cap": "off",
        **_PRIME_RL_KL,
    },
    "prime_rl/2026-08-11": {
        "name": "dppo_binary_tv",
        "divergence_threshold_low": 0.1,
        "divergence_threshold_high": 0.1,
        "ratio_cap": "off",
        **_PRIME_RL_KL,
    },
    "prime_rl/2026-08-27": {
        "name": "ipo",
        "divergence_threshold_low": 0.1,
        "divergence_threshold_high": 0.1,
        **_PRIME_RL_KL,
    },
    "prime_rl/2026-09-18": {
        "name": "ipo",
        "divergence_threshold_low": 0.3,
        "divergence_threshold_high": 0.3,
        "form": "ratio",
    },
}
"""``framework/name`` in that framework, mapped to the keys of LossConfig that give the same gradient; and a loss of an
earlier version of ours.

They contain the defaults of the versions that docs/loss_details.md names. A key set next to the alias takes precedence.
The comparison is always with the rollout's own log-probabilities, also if the framework recomputes them.
"""

ALIAS_VERSIONS: Mapping[str, str] = {
    "verl": "1dda039, 22 August 2026",
    "stable_rl": "c6af1d1, 2 March 2026",
    "trl": "23eedc6, 20 July 2026, the last before its DPPO was removed",
    "skyrl": "0.5, 17 November 2026",
    "prime_rl": "the date in the name",
    "drpo": "`paper`: its authors' code (UniRL) at 1a7b501, 13 June 2026; the others are values of delta",
    "spo": "DRPO's paper, as UniRL 1a7b501 of 13 June 2026 states it",
}
"""Framework (what stands before the slash of an alias) -> version and date that its aliases describe."""


def expand_alias(values: TomlTable) -> TomlTable:
    """Return a ``[loss]`` table with the keys of its alias filled in; keys that are set take precedence."""
    name = values.get("name")
    values = _with_centering_as_a_term(values)
    if not isinstance(name, str) or name not in LOSS_ALIASES:
        return values
    merged = {**LOSS_ALIASES[name], **values, "name": LOSS_ALIASES[name]["name"]}
    if not merged.get("kl_coef"):
        # The user removed the alias's KL penalty, so its other kl_* keys would have no effect.
        merged = {key: value for key, value in merged.items() if key in values or not key.startswith("kl_")}
    return merged


def _with_centering_as_a_term(values: TomlTable) -> TomlTable:
    """Return the table with ``centering`` as a bool. It was the name of a weight when score centering was a loss.

    Recorded configurations of that time have its default, "truncate", beside every loss.
    """
    weight = values.get("centering")
    if not isinstance(weight, str) or weight not in _CENTERED_WEIGHTS:
        return values
    if values.get("name") == "score_centering":
        return {**_CENTERED_WEIGHTS[weight], **values, "centering": True}
    if weight == "truncate":
        return {key: value for key, value in values.items() if key != "centering"}
    return values
