"""Which key of ``[loss]`` does something for which loss, and which values go together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_dppo.config.loss import LossConfig


def _has_thresholds(config: LossConfig) -> bool:
    return config.is_dppo or config.name in ("drpo", "ipo", "cppo")


def _is_own(config: LossConfig) -> bool:
    return config.own_loss is not None


def _is_topk_dppo(config: LossConfig) -> bool:
    return config.is_dppo and config.name.startswith("dppo_topk_")


def _has_cap(config: LossConfig) -> bool:
    uncapped = config.centers_score and config.centering != "truncate"
    return not (config.is_surrogate or _is_own(config) or uncapped)


def _limits_mismatch(config: LossConfig) -> bool:
    return config.mismatch != "none" or (config.centers_score and config.centering == "mask")


def _clips_ratios(config: LossConfig) -> bool:
    return config.is_surrogate or config.name in ("grpo", "minirl")


APPLIES: Mapping[str, tuple[Callable[[LossConfig], bool], str]] = {
    "divergence_threshold_low": (_has_thresholds, "a dppo_* loss, drpo, ipo or cppo"),
    "divergence_threshold_high": (_has_thresholds, "a dppo_* loss, drpo, ipo or cppo"),
    "clip_ratio_low": (_clips_ratios, "grpo, minirl, gspo or ppo_*"),
    "clip_ratio_high": (_clips_ratios, "grpo, minirl, gspo or ppo_*"),
    "ratio_cap": (_has_cap, "a loss without a clipped surrogate (score_centering: with centering = 'truncate')"),
    "ratio_floor": (lambda c: c.name == "cispo", "cispo"),
    "dual_clip": (lambda c: c.name in ("ppo_clip", "ppo_decoupled"), "ppo_clip or ppo_decoupled"),
    "topk": (lambda c: c.is_topk, "a loss on the Top-K, divergence = 'topk', or a function that needs(topk=True)"),
    "options": (_is_own, "a function of your own in name"),
    "mask_options": (lambda c: c.mask is not None, "mask"),
    "form": (lambda c: not _is_own(c), "a built-in loss"),
    "topk_eviction": (_is_topk_dppo, "dppo_topk_tv or dppo_topk_kl"),
    "direction": (_is_topk_dppo, "dppo_topk_tv or dppo_topk_kl (a Binary divergence predicts what it has)"),
    "tail": (lambda c: c.direction == "predictive", "direction = 'predictive'"),
    "divergence": (lambda c: c.name in ("trm", "cppo"), "trm or cppo"),
    "sequence_max": (lambda c: c.name == "trm", "trm"),
    "sequence_mean": (lambda c: c.name == "trm", "trm"),
    "position_floor": (lambda c: c.name == "cppo", "cppo"),
    "prefix_budget": (lambda c: c.name == "cppo", "cppo"),
    "prefix_budget_max": (lambda c: c.name == "cppo", "cppo"),
    "centering": (lambda c: c.centers_score, "score_centering"),
    "kl_estimator": (lambda c: c.kl_coef > 0, "kl_coef above 0"),
    "kl_anchor": (lambda c: c.kl_coef > 0, "kl_coef above 0"),
    "mismatch_low": (_limits_mismatch, "mismatch other than 'none', or centering = 'mask'"),
    "mismatch_high": (_limits_mismatch, "mismatch other than 'none', or centering = 'mask'"),
}
"""Key -> whether it does something, and with what it would. A key that does nothing is a mistake worth an error."""


def check_values(config: LossConfig) -> None:
    """Whether values fit the loss and each other.

    Raises:
        ValueError: they do not.
    """
    for key in ("divergence_threshold_low", "divergence_threshold_high"):
        value = getattr(config, key)
        if value is not None and (config.name.endswith("_tv") or config.name in ("ipo", "cppo")) and value > 1:
            raise ValueError(f"{key} = {value}: a total variation never exceeds 1; the paper uses 0.15 to 0.2")
    for key, (low, high) in {"ratio_floor": config.ratio_limits, "mismatch_low": config.mismatch_limits}.items():
        if low > high:
            raise ValueError(f"{key} = {low} is above the upper limit {high}; no ratio fits in between")
    least, largest = config.prefix_budgets
    if least > largest:
        raise ValueError(
            f"prefix_budget = {least} is above prefix_budget_max = {largest}; the budget of a sequence is between"
        )
    if config.name == "trm" and config.sequence_max == config.sequence_mean == "off":
        raise ValueError("sequence_max = sequence_mean = 'off': trm would drop nothing; set one of them, or use pg_is")
    if config.name == "cppo" and config.divergence == "sampled":
        raise ValueError("divergence = 'sampled': cppo compares total variations; use 'binary' or 'topk'")
    if config.mismatch == "truncate" and config.name != "ppo_decoupled":
        raise ValueError(
            f"mismatch = 'truncate' has no effect on the loss {config.name!r}, whose weight pi / mu is capped by "
            "ratio_cap; use that, or a mask_* mode, or the loss ppo_decoupled"
        )
    if config.form == "reinforce" and config.is_surrogate:
        raise ValueError(f"form = 'reinforce' does not exist for {config.name!r}, a clipped surrogate; remove it")
    if config.form == "ratio" and config.name in ("drpo", "score_centering"):
        raise ValueError(
            f"form = 'ratio' does not exist for {config.name!r}, whose weight is no clipped ratio; remove it"
        )
    if config.name == "gspo" and config.resolved_aggregation != "seq_mean_token_mean":
        raise ValueError(f"aggregation = {config.aggregation!r}: gspo is defined by seq_mean_token_mean; remove it")
    if (config.horizon is None) == config.resolved_aggregation.endswith("_norm"):
        raise ValueError(
            f"horizon = {config.horizon} with aggregation = {config.resolved_aggregation!r}: the *_norm aggregations, "
            "and only they, need horizon; the longest response allowed (rollout.max_new_tokens) is usual"
        )


def reasons(config: LossConfig) -> dict[str, str]:
    """Field of LossInputs that the loss needs -> the setting because of which."""
    why = {"rollout_logprobs": "loss.name"}
    for function in (config.own_mask, config.own_loss):
        if function is not None:
            why |= dict.fromkeys(function.needs.inputs, function.setting)
    if config.decides_on_topk:
        why |= dict.fromkeys(("topk_logprobs", "rollout_topk_logprobs", "topk_valid"), "loss.name")
    if config.direction == "predictive" and config.tail != "aggregated":
        why["topk_other_square" if config.tail == "proportional" else "vocab_size"] = "loss.tail"
    if config.uses_anchor:
        why.setdefault("anchor_logprobs", "loss.name")
    if config.name in ("gspo", "trm", "cppo"):
        why["sequence_ids"] = "loss.name"
    if config.mismatch in ("mask_sequence", "mask_geometric"):
        why["sequence_ids"] = "loss.mismatch"
    if config.kl_coef and config.kl_anchor == "reference":
        why["reference_logprobs"] = "loss.kl_coef"
    if config.entropy_coef:
        why["entropy"] = "loss.entropy_coef (with its gradient)"
    if config.resolved_aggregation != "token_mean":
        why["token_weights"] = "loss.aggregation" if config.aggregation else "loss.name"
    return why
