"""Losses of the wind tunnel's third edition. ``tuned``: the best of four candidates on seeds of their own."""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_dppo_lab.grid import LossSetting, Settings

DELTAS = (0.05, 0.15, 0.3, 0.6)
"""Thresholds of the total variation that are searched, and reported one by one for Binary-TV."""
DRPO_DELTAS = (12.5, 2.5, 1.0, 0.15)
"""Thresholds of the presets ``drpo/DELTA``. 12.5 is that of its authors."""
_CAP: dict[str, Any] = {"ratio_cap": 5.0}


def thresholds(value: float) -> Settings:
    """Return both thresholds of a divergence."""
    return {"divergence_threshold_low": value, "divergence_threshold_high": value}


def _tuned(name: str, candidates: Sequence[Settings], *, label: str = "", **table: Any) -> LossSetting:
    return LossSetting(f"{label or name} tuned", {"name": name, **table}, [{"loss": each} for each in candidates])


def _each(key: str, *values: float) -> Sequence[Settings]:
    return [{key: value} for value in values]


def _pairs(low: str, high: str, *values: tuple[float, float]) -> Sequence[Settings]:
    return [{low: first, high: second} for first, second in values]


_TV = [thresholds(value) for value in DELTAS]
_KL = [thresholds(value) for value in (0.02, 0.05, 0.15, 0.5)]
_CLIPS = ((0.1, 0.14), (0.2, 0.28), (0.4, 0.56), (0.6, 1.5))
_BINARY = "dppo_binary_tv"
# DPPO has the cap of 5 that is its default.
_TUNED = (
    _tuned(_BINARY, _TV, **_CAP),
    _tuned("dppo_binary_kl", _KL, **_CAP),
    _tuned("dppo_topk_tv", _TV, **_CAP),
    _tuned("dppo_topk_kl", _KL, **_CAP),
    _tuned(_BINARY, _TV, label=f"{_BINARY} centered", centering=True, **_CAP),
    # Thresholds at the search's two largest values, which age or mismatch then make smaller. 16 updates make a step.
    _tuned(
        _BINARY,
        [{**thresholds(delta), "threshold_age": age} for delta in DELTAS[2:] for age in (16.0, 128.0)],
        label=f"{_BINARY} age",
        threshold_age=16.0,
        **_CAP,
    ),
    _tuned(
        _BINARY,
        [{**thresholds(delta), "threshold_knee": knee} for delta in DELTAS[2:] for knee in (1.0, 4.0)],
        label=f"{_BINARY} knee",
        threshold_knee=1.0,
        **_CAP,
    ),
    _tuned("drpo", [thresholds(value) for value in DRPO_DELTAS]),
    _tuned("spo", _each("ratio_range", 0.2, 1.0, 5.0, 12.5)),
    _tuned("ipo", [thresholds(value) for value in (0.1, 0.3, 0.6, 0.9)]),
    _tuned("grpo", _pairs("clip_ratio_low", "clip_ratio_high", *_CLIPS)),
    _tuned("cispo", _each("ratio_cap", 2.0, 5.0, 10.0, 20.0)),
    _tuned(
        "sapo",
        _pairs("gate_temperature_low", "gate_temperature_high", (0.26, 0.25), (0.52, 0.5), (1.05, 1.0), (2.1, 2.0)),
    ),
    _tuned("gspo", _pairs("clip_ratio_low", "clip_ratio_high", (3e-4, 4e-4), (0.01, 0.014), *_CLIPS[0:3:2])),
    _tuned("gmpo", _pairs("log_clip_low", "log_clip_high", *[(c, c) for c in (0.2, 0.4, 0.8, 1.6)])),
    _tuned("cppo", _TV),
    _tuned("trm", _pairs("sequence_max", "sequence_mean", (0.05, 0.001), (0.2, 0.01), (1.0, 0.05), (4.0, 0.2))),
    _tuned(
        "vespo",
        [
            {"weight_power_low": k + 1, "weight_power_high": k, "weight_decay_low": k, "weight_decay_high": k + 1}
            for k in (0.5, 1.0, 2.0, 3.0)
        ],
    ),
    _tuned("cispo", _each("ratio_cap", 1.0, 2.0, 5.0, 10.0), label="score_centering", centering=True),
)
# The same keys as the candidates above, so that a preset and the candidate that the search chose are one run.
_FIXED = (
    *[LossSetting(f"{_BINARY} {delta}", {"name": _BINARY, **_CAP, **thresholds(delta)}) for delta in DELTAS],
    *[LossSetting(f"drpo/{delta:g}", {"name": "drpo", **thresholds(delta)}) for delta in DRPO_DELTAS],
    LossSetting(f"{_BINARY} centered", {"name": _BINARY, "centering": True, **_CAP}),
    LossSetting("drpo/paper", {"name": "drpo/paper"}),
    LossSetting("skyrl/default", {"name": "skyrl/default"}),
)
THIRD_LOSSES: Mapping[str, LossSetting] = {loss.name: loss for loss in (*_TUNED, *_FIXED)}
