"""Configuration changes between two starts of a run: which are free, and which make it another experiment.

Every key is of one kind. ``results``: the results of the run depend on the key, so a change needs
``checkpoint.accept_changes``. ``free``: the key decides where, how fast or how safely the run works; a change is
printed. ``fixed``: ``resume.run_identity`` compares the key, and no flag allows a change.

A path is the same if it leads to the same file, or to a copy of it: where the files are is no part of a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megatron_dppo.config.schema import Config
from megatron_dppo.errors import CheckpointError
from megatron_dppo.run.contents import flatten, same_value

ChangeKind = Literal["results", "free", "fixed"]

KEY_KINDS: dict[str, ChangeKind] = {
    "run.seed": "fixed",
    "run.num_steps": "results",  # the schedule of the learning rate ends there; see _is_harmless
    "run.*": "free",
    "model.*": "results",
    "lora.alpha": "results",
    "lora.*": "fixed",  # a checkpoint has the adapters as its only weights
    "parallel.*": "free",  # the same curve up to rounding; what Megatron cannot reshard is refused
    "data.train": "fixed",  # by its prompts and labels
    "data.*": "results",
    "rollout.servers.model": "results",  # a quantized copy samples from another distribution
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
    "optimizer.use_precision_aware_optimizer": "free",  # its dtypes are results
    "optimizer.*offload*": "free",
    "optimizer.overlap_cpu_optimizer_d2h_h2d": "free",
    "optimizer.pin_cpu_grads": "free",
    "optimizer.*": "results",
    "warmup.*": "results",
    "eval.stop_at_accuracy": "free",  # ends the run earlier, with the same results until then
    "eval.*": "results",
    "checkpoint.*": "free",
    "log.*": "free",
}
"""Patterns of ``section.key``. The first match decides; a key without a match counts as ``results``."""


class Change(NamedTuple):
    """A key whose value differs from the run so far."""

    key: str
    old: Any
    new: Any
    kind: ChangeKind

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.old)} -> {_shown(self.new)}"


def change_kind(key: str) -> ChangeKind:
    """Return the kind of ``section.key``."""
    return next((kind for pattern, kind in KEY_KINDS.items() if fnmatchcase(key, pattern)), "results")


def find_changes(
    before: Mapping[str, Any], config: Config, folder: Path = Path(), digests: Mapping[str, str] | None = None
) -> list[Change]:
    """Return every key that differs, sorted.

    Args:
        before: Configuration of the run so far, as JSON. A key that its version did not have counts as its default.
        config: Configuration of this start.
        folder: Working directory of the run so far, which its relative paths start at.
        digests: Contents of its files (``content_digests``).
    """
    old = dict(flatten(before))
    new = dict(flatten(config.model_dump(mode="json")))
    defaults = default_values()
    changes = []
    for key in sorted(old.keys() | new.keys()):
        old_value = old.get(key, defaults.get(key))
        new_value = new.get(key, defaults.get(key))
        # None, an empty table and an empty list all mean "not set".
        is_unset = old_value in _EMPTY and new_value in _EMPTY
        digest = (digests or {}).get(key)
        if not is_unset and not same_value(old_value, new_value, folder, digest):
            kind = "free" if _is_harmless(key, old, new) else change_kind(key)
            changes.append(Change(key, old_value, new_value, kind))
    return changes


_EMPTY: tuple[Any, ...] = (None, {}, [])


def default_values() -> dict[str, Any]:
    """Return the default of every key that has one, by ``section.key``."""
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
    """Return True for another number of steps under a constant learning rate, which does not depend on it."""
    style = "optimizer.lr_decay_style"
    return key == "run.num_steps" and old.get(style) == new.get(style) == "constant"


def check_changes(changes: list[Change], checkpoint: Path, *, accepted: bool) -> None:
    """Refuse to continue a run with other settings.

    Raises:
        CheckpointError: A key that changes the results differs. The message lists all of them, old and new.
    """
    refused = [str(change) for change in changes if change.kind == "results"]
    if refused and not accepted:
        listed = "\n".join(f"  {line}" for line in refused)
        raise CheckpointError(
            f"{checkpoint} is from a run with other settings:\n{listed}\n"
            "Fix: use the old values, or another run.output_dir. checkpoint.accept_changes = true resumes with the new "
            "values"
        )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
