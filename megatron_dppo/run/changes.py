"""What may change between two starts of a run, and what then counts as another experiment.

Every key of the configuration is in one class. ``results``: the curve of the run depends on it, so a change needs
``checkpoint.accept_changes``. ``free``: it decides where, how fast or how safely the run works; a change is printed.
``fixed`` keys are compared by ``resume.run_identity``, and no flag lets them change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megatron_dppo.config.schema import Config
from megatron_dppo.errors import CheckpointError

Class = Literal["results", "free", "fixed"]

CLASSES: dict[str, Class] = {
    "run.seed": "fixed",
    "run.num_steps": "results",  # the schedule of the learning rate ends there; see _is_harmless
    "run.*": "free",
    "model.*": "results",
    "lora.alpha": "results",
    "lora.*": "fixed",  # a checkpoint holds these adapters and no other weights
    "parallel.*": "free",  # the same curve up to rounding; what Megatron cannot reshard is refused
    "data.train": "fixed",
    "data.*": "results",
    "rollout.servers.model": "results",  # what samples is coarser
    "rollout.servers.*": "free",
    "rollout.weight_sync.*": "free",
    "rollout.*": "results",
    "reward.timeout_seconds": "free",
    "reward.num_workers": "free",
    "reward.async_concurrency": "free",
    "reward.functions.*.timeout_seconds": "free",
    "reward.functions.*.num_workers": "free",
    "reward.functions.*.async_concurrency": "free",
    "reward*.options.url": "free",
    "reward*.options.api_key_env": "free",
    "reward*.options.retries": "free",
    "reward*.options.batch_size": "free",
    "reward.*": "results",
    "agent.timeout_seconds": "free",
    "agent.max_running": "free",
    "agent.host": "free",
    "agent.max_body_bytes": "free",
    "agent.*": "results",
    "loss.*": "results",
    "distillation.teacher_urls": "free",
    "distillation.teacher_api_key_env": "free",
    "distillation.teacher_timeout_seconds": "free",
    "distillation.teacher_max_in_flight": "free",
    "distillation.*": "results",
    "train.*": "results",
    "optimizer.use_precision_aware_optimizer": "free",  # its dtypes are not
    "optimizer.*offload*": "free",
    "optimizer.overlap_cpu_optimizer_d2h_h2d": "free",
    "optimizer.pin_cpu_grads": "free",
    "optimizer.*": "results",
    "warmup.*": "results",
    "eval.stop_at_accuracy": "free",  # where the curve ends, not how it goes
    "eval.*": "results",
    "checkpoint.*": "free",
    "log.*": "free",
}
"""Patterns of ``section.key``; the first that matches decides, and a key that none matches counts as ``results``."""


class Change(NamedTuple):
    """A key whose value differs from the run's own."""

    key: str
    old: Any
    new: Any
    kind: Class

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.old)} -> {_shown(self.new)}"


def class_of(key: str) -> Class:
    """The class of ``section.key``."""
    return next((kind for pattern, kind in CLASSES.items() if fnmatchcase(key, pattern)), "results")


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """``section.key`` and value of every key; a table that is empty counts as a value."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def changes_between(before: Mapping[str, Any], config: Config) -> list[Change]:
    """Every key that differs, sorted.

    Args:
        before: the configuration of the run so far, as JSON.
        config: this start's. A key that an older version did not have counts as its default.
    """
    old, new = dict(flatten(before)), dict(flatten(config.model_dump(mode="json")))
    defaults = _defaults()
    changes = []
    for key in sorted(old.keys() | new.keys()):
        was, now = old.get(key, defaults.get(key)), new.get(key, defaults.get(key))
        if was != now and not (was in _EMPTY and now in _EMPTY):
            kind = "free" if _is_harmless(key, old, new) else class_of(key)
            changes.append(Change(key, was, now, kind))
    return changes


_EMPTY: tuple[Any, ...] = (None, {}, [])


def _defaults() -> dict[str, Any]:
    values: dict[str, Any] = {}

    def collect(model: Any, prefix: str) -> None:
        for name, field in model.known_fields().items():
            if hasattr(field.annotation, "model_fields"):
                collect(field.annotation, f"{prefix}{name}.")
            elif not field.is_required():
                values[f"{prefix}{name}"] = field.get_default(call_default_factory=True)

    collect(Config, "")
    return values


def _is_harmless(key: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """The length of a run matters to what was done so far only through a learning rate that decays towards its end."""
    style = "optimizer.lr_decay_style"
    return key == "run.num_steps" and old.get(style) == new.get(style) == "constant"


def check_changes(changes: list[Change], checkpoint: Path, *, accepted: bool) -> None:
    """Refuse to continue a run with other settings.

    Raises:
        CheckpointError: with every key that changes the results and differs, old and new.
    """
    refused = [str(change) for change in changes if change.kind == "results"]
    if refused and not accepted:
        listed = "\n".join(f"  {line}" for line in refused)
        raise CheckpointError(
            f"{checkpoint} is of a run with other settings:\n{listed}\n"
            "Use the old values, or another run.output_dir; checkpoint.accept_changes = true goes on with the new ones"
        )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
