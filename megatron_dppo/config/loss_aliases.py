"""Names of losses in other frameworks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_dppo.config.section import TomlTable

_VERL = {"divergence_threshold_low": 0.2, "divergence_threshold_high": 0.2, "ratio_cap": 3.0}
_TRL = {"divergence_threshold_low": 0.15, "divergence_threshold_high": 0.15, "ratio_cap": 20.0}
_PRIME_RL_KL = {"form": "ratio", "kl_coef": 0.002, "kl_estimator": "k2", "kl_target": "rollout"}
_CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}
LOSS_ALIASES: Mapping[str, Mapping[str, Any]] = {
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
"""``framework/name`` in that framework, mapped to the keys of LossConfig that give the same gradient.

They contain the defaults of the versions that docs/loss_details.md names. A key set next to the alias takes precedence.
The comparison is always with the rollout's own log-probabilities, also if the framework recomputes them.
"""


def expand_alias(values: TomlTable) -> TomlTable:
    """Return a ``[loss]`` table with the keys of its alias filled in; keys that are set take precedence."""
    name = values.get("name")
    if not isinstance(name, str) or name not in LOSS_ALIASES:
        return values
    merged = {**LOSS_ALIASES[name], **values, "name": LOSS_ALIASES[name]["name"]}
    if not merged.get("kl_coef"):
        # The user removed the alias's KL penalty, so its other kl_* keys would have no effect.
        merged = {key: value for key, value in merged.items() if key in values or not key.startswith("kl_")}
    return merged
