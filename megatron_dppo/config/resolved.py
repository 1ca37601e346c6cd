"""What stands where the configuration leaves a default to a rule (``None = ...`` in its descriptions)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron_dppo.config.layout import Layout
from megatron_dppo.config.loss import LossConfig
from megatron_dppo.config.loss_keys import APPLIES
from megatron_dppo.config.schema import Config

_LOSS: Mapping[str, Callable[[LossConfig], Any]] = {
    "divergence_threshold_low": lambda loss: loss.thresholds[0],
    "divergence_threshold_high": lambda loss: loss.thresholds[1],
    "clip_ratio_low": lambda loss: loss.clip_ratios[0],
    "clip_ratio_high": lambda loss: loss.clip_ratios[1],
    "ratio_cap": lambda loss: loss.ratio_limits[1],
    "prefix_budget_max": lambda loss: loss.prefix_budgets[1],
    "divergence": lambda loss: loss.resolved_divergence,
    "mismatch_low": lambda loss: loss.mismatch_limits[0],
    "mismatch_high": lambda loss: loss.mismatch_limits[1],
    "form": lambda loss: loss.resolved_form,
    "aggregation": lambda loss: loss.resolved_aggregation,
}
_RUN: Mapping[str, Callable[[Config, Layout], Any]] = {
    "parallel.expert_tensor_parallel_size": lambda config, layout: layout.etp,
    "parallel.sequence_parallel": lambda config, layout: layout.sequence_parallel,
    "parallel.overlap_p2p_comm": lambda config, layout: layout.overlap_p2p_comm,
    "eval.max_new_tokens": lambda config, layout: config.eval_max_new_tokens,
    "eval.beside_training": lambda config, layout: config.evaluates_beside_training,
    "run.hang_minutes": lambda config, layout: 0.9 * config.run.timeout_minutes,
}


def resolved_defaults(config: Config, layout: Layout) -> dict[str, Any]:
    """Key -> the value in force, of each key that is not set and that has an effect in this run.

    Example: ``{"loss.divergence_threshold_low": 0.15, "parallel.sequence_parallel": False}`` and more for
    DPPO-Binary-TV on one process.
    """
    found = {}
    for key, value in _LOSS.items():
        applies = APPLIES[key][0](config.loss) if key in APPLIES else True
        if applies and getattr(config.loss, key) is None:
            found[f"loss.{key}"] = value(config.loss)
    for path, rule in _RUN.items():
        section, _, key = path.partition(".")
        if getattr(getattr(config, section), key) is None:
            found[path] = rule(config, layout)
    return found
