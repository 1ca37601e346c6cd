"""The losses and mismatches that experiments choose from. Another loss is one more line of ``LOSSES``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_dppo.experiments.grid import Loss, Mismatch, Settings


def _thresholds(*values: float) -> Sequence[Settings]:
    return [{"loss": {"divergence_threshold_low": v, "divergence_threshold_high": v}} for v in values]


def _clips(*pairs: tuple[float, float]) -> Sequence[Settings]:
    return [{"loss": {"clip_ratio_low": low, "clip_ratio_high": high}} for low, high in pairs]


_TV, _KL = _thresholds(0.05, 0.15, 0.3), _thresholds(0.02, 0.05, 0.15)
_CLIPS = _clips((0.1, 0.14), (0.2, 0.28), (0.4, 0.56))
_FAR = {"divergence_threshold_low": 0.5, "divergence_threshold_high": 1.0}
"""A probability never rises by more than 1: only falling tokens are masked."""


def _dppo(kind: str, cap: float | str = "off", **more: Any) -> Settings:
    return {"name": f"dppo_{kind}", "ratio_cap": cap, **more}


LOSSES: Mapping[str, Loss] = {
    loss.name: loss
    for loss in (
        # Weights of DPPO are not capped unless the name says so: what a mask does is to be seen without another limit.
        Loss("dppo_binary_tv", _dppo("binary_tv"), _TV),
        Loss("dppo_binary_tv cap 2", _dppo("binary_tv", 2.0), _TV),
        Loss("dppo_binary_tv cap 5", _dppo("binary_tv", 5.0), _TV),
        Loss("dppo_binary_kl", _dppo("binary_kl"), _KL),
        Loss("dppo_topk_tv", _dppo("topk_tv"), _TV),
        Loss("dppo_topk_kl", _dppo("topk_kl"), _KL),
        Loss("dppo_topk_tv predictive", _dppo("topk_tv", direction="predictive"), _TV),
        Loss("dppo_topk_kl predictive", _dppo("topk_kl", direction="predictive"), _KL),
        Loss("score_centering", {"name": "score_centering"}, [{"loss": {"ratio_cap": cap}} for cap in (1.0, 2.0, 5.0)]),
        Loss("drpo", {"name": "drpo"}, _TV),
        Loss("ipo", {"name": "ipo"}, _thresholds(0.1, 0.3, 0.6)),
        Loss("grpo", {"name": "grpo"}, _CLIPS),
        Loss("minirl", {"name": "minirl"}, _CLIPS),
        Loss("cispo", {"name": "cispo"}, [{"loss": {"ratio_cap": cap}} for cap in (2.0, 5.0, 10.0)]),
        Loss("pg_is", {"name": "pg_is"}),
        # Not of the wind tunnel: variants that single figures ask for. A ratio is never above 1e9.
        Loss("grpo relaxed up", {"name": "grpo", "clip_ratio_high": 1e9}),
        Loss("grpo relaxed down", {"name": "grpo", "clip_ratio_low": 1 - 1e-9}),
        Loss("grpo relaxed both", {"name": "grpo", "clip_ratio_low": 1 - 1e-9, "clip_ratio_high": 1e9}),
        Loss("dppo_binary_tv far", _dppo("binary_tv", **_FAR)),
        Loss("dppo_binary_kl cap 5", _dppo("binary_kl", 5.0), _KL),
        Loss("dppo_topk_tv cap 5", _dppo("topk_tv", 5.0), _TV),
        Loss("dppo_topk_kl cap 5", _dppo("topk_kl", 5.0), _KL),
    )
}
"""Name -> loss with its candidates for the search; its defaults stand among them."""

NONE = Mismatch("none", "", {})
_HALF = ("bf16", "fp16")
_CONSTANT: Settings = {"optimizer": {"lr_decay_style": "constant"}}


def _perturbed(name: str, key: str, values: Sequence[Any]) -> list[Mismatch]:
    return [Mismatch(name, str(value), {"rollout": {"perturbation": {key: value}}}) for value in values]


MISMATCHES: Mapping[str, Mismatch] = {
    mismatch.label: mismatch
    for mismatch in (
        NONE,
        Mismatch("bf16", "", {"rollout": {"dtype": "bf16"}}),
        *_perturbed("weights", "weights", ["fp8", "int8", "int4"]),
        *_perturbed("router_noise", "router_noise", [0.1, 0.3, 1.0]),
        *[Mismatch("staleness", str(age), {"train": {"max_staleness": age}}) for age in (1, 2, 4, 8)],
        *_perturbed("hidden_top_p", "unrecorded_top_p", [0.95, 0.9]),
        Mismatch("staleness", "4, lr 1e-3", {"train": {"max_staleness": 4}, "optimizer": {"lr": 1e-3}}),
        *[Mismatch(f"{dtype} both", "", {name: {"dtype": dtype} for name in ("model", "rollout")}) for dtype in _HALF],
        # Not mismatches: what may keep a run at its best when the learning rate does not fall.
        Mismatch("constant rate", "", _CONSTANT),
        Mismatch("constant rate", "1e-5", {"optimizer": {"lr_decay_style": "constant", "lr": 1e-5}}),
        Mismatch("constant rate", "groups with signal", {**_CONSTANT, "rollout": {"dynamic_sampling": True}}),
        Mismatch("constant rate", "entropy bonus", {**_CONSTANT, "loss": {"entropy_coef": 0.003}}),
        Mismatch("hot", "", {"train": {"max_staleness": 8, "advantage": "std"}, "optimizer": {"lr": 3e-3}}),
    )
}
"""Label -> mismatch. ``both``: trainer and engine in this dtype. ``hot``: rollouts of eight steps ago, advantages over
their deviation, and a learning rate that is far too high."""
