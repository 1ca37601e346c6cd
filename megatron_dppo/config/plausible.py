"""Plausible ranges of numbers, by the name of the key.

A value outside is a typing error or a misunderstanding, and a run with it wastes its time without an error: sampling at
temperature 1e-30, a limit of 1e30 seconds, 100,000 threads. 0 is plausible wherever a section permits it, since it
switches something off.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple


class PlausibleRange(NamedTuple):
    """Bounds of a number's absolute value, both included."""

    low: float
    high: float


_COUNT = PlausibleRange(1, 1e9)
_SECONDS = PlausibleRange(1e-3, 365 * 24 * 3600)
_MINUTES = PlausibleRange(1e-4, 365 * 24 * 60)
_TEMPERATURE = PlausibleRange(0.01, 100.0)  # vLLM raises a lower temperature to 0.01
_FRACTION = PlausibleRange(1e-9, 1.0)

_KEYS_BY_RANGE = {
    _TEMPERATURE: "temperature unrecorded_temperature",
    PlausibleRange(1e-3, 1.0): "top_p unrecorded_top_p adam_beta1 adam_beta2",
    _FRACTION: "min_p optimizer_offload_fraction max_failed_fraction max_nonfinite_fraction format hidden_dropout "
    "attention_dropout moe_router_bias_update_rate",
    PlausibleRange(1e-12, 10.0): "lr min_lr",
    PlausibleRange(1e-30, 1.0): "adam_eps",
    PlausibleRange(1e-9, 10.0): "weight_decay",
    PlausibleRange(1e-6, 1e6): "clip_grad stop_at_accuracy",
    PlausibleRange(2.0**-24, 2.0**32): "initial_loss_scale min_loss_scale",
    PlausibleRange(1, 1000): "hysteresis epochs attempts max_refills oversample",
    PlausibleRange(1e-4, 1e6): "num_epochs",
    PlausibleRange(1, 1_000_000): "mini_batches max_in_flight max_running teacher_max_in_flight max_calls",
    PlausibleRange(1, 1024): "threads_per_rank num_workers client_processes",
    PlausibleRange(1, 65_536): "async_concurrency count",
    PlausibleRange(1, 65_535): "port",
    PlausibleRange(1, 1_048_576): "bucket_megabytes",
    PlausibleRange(1024, 2.0**40): "max_body_bytes",
    PlausibleRange(1, 16_384): "rank",
    PlausibleRange(1e-3, 1e5): "alpha",
    PlausibleRange(1e-9, 100.0): "std moe_aux_loss_coeff moe_z_loss_coeff",
    PlausibleRange(1e-9, 1000.0): "router_noise",
    PlausibleRange(1e-9, 1e6): "weight",
    PlausibleRange(1e-9, 1e4): "coef kl_coef entropy_coef",
    PlausibleRange(1e-12, 0.1): "layernorm_epsilon",
    PlausibleRange(1, 2.0**63): "seed",
}
PLAUSIBLE: Mapping[str, PlausibleRange] = {
    key: limits for limits, keys in _KEYS_BY_RANGE.items() for key in keys.split()
}
"""Ranges of keys that need one of their own, by the key's last part."""

_SUFFIXES: Mapping[str, PlausibleRange] = {
    "_seconds": _SECONDS,
    "_minutes": _MINUTES,
    "_parallel_size": PlausibleRange(1, 65_536),
}
_NUMBER = PlausibleRange(1e-12, 1e12)


def plausible_range(key: str, value: float) -> PlausibleRange:
    """Return the range of a key: its own, that of its unit, or that of all counts (integers) or numbers."""
    if key in PLAUSIBLE:
        return PLAUSIBLE[key]
    for suffix, limits in _SUFFIXES.items():
        if key.endswith(suffix):
            return limits
    return _COUNT if isinstance(value, int) else _NUMBER


_FREE_TEXTS = ("system_prompt",)
_PATHS = ("output_dir", "path", "reference_path", "teacher_path", "fork_from", "folder", "train")
_LONGEST_NAME = 255
"""Bytes of a file's name on Linux."""


def check_plausible(key: str, value: object) -> None:
    """Check that a number is in the plausible range of its key, and that a text could be a name or a path."""
    if isinstance(value, str) and key not in _FREE_TEXTS:
        if key in _PATHS and not value.strip():
            raise ValueError("the path is empty; remove the key, or set a path")
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise ValueError(
                "the name has bytes that are not UTF-8; rename it, or start with PYTHONUTF8=1 in a terminal of UTF-8"
            )
        if not value.isprintable():
            raise ValueError("the text has a line break or a control character; expected a name or a path")
        if any(len(part.encode()) > _LONGEST_NAME for part in value.split("/")):
            raise ValueError(f"a part is longer than {_LONGEST_NAME} bytes; expected a name or a path")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value == 0:
        return
    low, high = plausible_range(key, value)
    if not low <= abs(value) <= high or math.isnan(value):
        raise ValueError(f"a run with this value makes no sense; expected at least {low:g} and at most {high:g}")
