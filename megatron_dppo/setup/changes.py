"""Configuration changes between two starts of a run: which are free, and which make it another experiment.

Every key is of one kind. ``results``: the results of the run depend on the key, so a change needs
``checkpoint.accept_changes``. ``free``: the key decides where, how fast or how safely the run works; a change is
printed. ``fixed``: ``resume.run_identity`` compares the key, and no flag allows a change. A change is ``repaired`` if
its key has a user function whose failures stopped the run (``setup/failed_functions.py``); it is printed.

A path is the same if it leads to the same file, or to a copy of it: where the files are is no part of a run. What the
files hold is: a file with other content is a change of the key that names it.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megatron_dppo.config.foreign_keys import REMOVED_KEYS
from megatron_dppo.config.paths import split_function
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import CheckpointError
from megatron_dppo.setup.contents import Contents, flatten, same_value

ChangeKind = Literal["results", "free", "fixed", "repaired"]

KEY_KINDS: dict[str, ChangeKind] = {
    "run.seed": "fixed",
    "run.num_steps": "results",  # the schedule of the learning rate ends there; see _is_harmless
    "run.*": "free",
    "model.*": "results",
    "lora.alpha": "results",
    "lora.*": "fixed",  # a checkpoint has the adapters as its only weights
    "parallel.*": "free",  # the same curve up to rounding; what Megatron cannot reshard is refused
    "data.train": "fixed",  # by its prompts and labels
    "data.sources.*.weight": "fixed",  # by the shares
    "data.sources.*.timeout_seconds": "free",
    "data.*": "results",
    "rollout.servers.model": "results",  # a quantized copy samples from another distribution
    "rollout.servers.*": "free",
    "rollout.weight_sync.*": "free",
    "rollout.*": "results",
    "reward.max_failed_fraction": "free",
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
    "agent.max_failed_fraction": "free",
    "agent.*": "results",
    "loss.*": "results",
    "distillation.teacher_urls": "free",
    "distillation.teacher_api_key_env": "free",
    "distillation.teacher_timeout_seconds": "free",
    "distillation.teacher_max_in_flight": "free",
    "distillation.*": "results",
    "train.max_skipped_updates": "free",
    "train.max_first_prob_diff": "free",
    "train.max_nonfinite_fraction": "free",
    "train.sampling_test": "free",
    "train.*": "results",
    "optimizer.use_precision_aware_optimizer": "free",  # its dtypes are results
    "optimizer.*offload*": "free",
    "optimizer.overlap_cpu_optimizer_d2h_h2d": "free",
    "optimizer.pin_cpu_grads": "free",
    "optimizer.*": "results",
    "eval.stop_at_accuracy": "free",  # ends the run earlier, with the same results until then
    "eval.*": "results",
    "checkpoint.*": "free",
    "log.*": "free",
}
"""Patterns of ``section.key``. The first match decides; a key without a match counts as ``results``."""

ServedModels = Mapping[str, Mapping[str, Sequence[str]]]
"""Description of the models behind URLs, by ``section.key`` and field. Several servers may have several values."""
SERVED_WEIGHTS = "weights"
"""Beginning of the field of a served model with the digest of its weights. Its end says what else that depends on."""


class Change(NamedTuple):
    """A key whose value differs from the run so far."""

    key: str
    old: object
    new: object
    kind: ChangeKind
    file: str = ""
    """File whose content differs; ``old`` and ``new`` are then the starts of its SHA-256. Empty if a value differs."""
    subject: str = ""
    """Part of a served model that differs. Empty for other changes."""

    def __str__(self) -> str:
        if self.subject:
            return f"{self.key}: {self.subject}: {self.old} -> {self.new}"
        if self.file:
            return f"{self.key}: the content of {self.file} differs: {self.old} -> {self.new}"
        return f"{self.key}: {_shown(self.old)} -> {_shown(self.new)}"


def change_kind(key: str) -> ChangeKind:
    """Return the kind of ``section.key``."""
    return next((kind for pattern, kind in KEY_KINDS.items() if fnmatchcase(key, pattern)), "results")


def find_changes(
    before: Mapping[str, object],
    config: Config,
    folder: Path = Path(),
    old_contents: Contents | None = None,
    contents: Contents | None = None,
) -> list[Change]:
    """Return every key that differs, sorted. A key that the version of the run so far did not have has its default.

    Relative paths of the run so far start at ``folder``. Contents are None if they are unknown. Sections of
    ``REMOVED_KEYS`` are left out.
    """
    old = dict(flatten({section: keys for section, keys in before.items() if section not in REMOVED_KEYS}))
    new = dict(flatten(config.model_dump(mode="json")))
    defaults = default_values()
    changes = []
    for key in sorted(old.keys() | new.keys()):
        old_value = old.get(key, defaults.get(key))
        new_value = new.get(key, defaults.get(key))
        # None, an empty table and an empty list all mean "not set".
        is_unset = old_value in _EMPTY and new_value in _EMPTY
        files = [(each or {}).get(key) for each in (old_contents, contents)]
        if not is_unset and not same_value(old_value, new_value, folder, *files):
            kind = "free" if _is_harmless(key, old, new) else change_kind(key)
            changes.append(Change(key, old_value, new_value, kind))
    return changes


_EMPTY: tuple[object, ...] = (None, {}, [])


def find_content_changes(before: Contents, now: Contents, config: Config, *, with_fixed: bool = False) -> list[Change]:
    """Return every file whose content differs, sorted; at most ``_MAX_FILES`` of a key, and one entry for the others.

    A key is compared if both starts read files for it. Those of ``fixed`` keys only ``with_fixed``: at a resume their
    prompts are compared instead.
    """
    changes = []
    values = dict(flatten(config.model_dump(mode="json")))
    # A checkpoint holds the weights of the policy; those of the model matter as a reference, or below adapters.
    is_replaced = not config.lora.rank and (not config.needs_reference or config.model.reference_path is not None)
    for key in sorted(before.keys() & now.keys()):
        if with_fixed or change_kind(key) != "fixed":
            differing = list(_differing_files(key, before[key], now[key], values.get(key), is_replaced))
            more = len(differing) - _MAX_FILES
            changes += differing[:_MAX_FILES] if more > 1 else differing
            if more > 1:
                kind: ChangeKind = "results" if any(each.kind == "results" for each in differing) else "free"
                changes.append(Change(key, "", "", kind, f"{more} more files"))
    return changes


_MAX_FILES = 4


def _differing_files(
    key: str, before: Mapping[str, str], now: Mapping[str, str], value: object, is_replaced: bool
) -> Iterator[Change]:
    path = split_function(str(value))[0]
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) == now.get(name):
            continue
        old, new = (_short_digest(files.get(name)) for files in (before, now))
        kind = change_kind(key)
        if key == "model.path" and name.endswith(".safetensors") and is_replaced:
            kind = "free"
        yield Change(key, old, new, kind, name or path)


def _short_digest(digest: str | None) -> str:
    return "no such file" if digest is None else digest[:12]


def find_served_changes(before: ServedModels, now: ServedModels) -> list[Change]:
    """Return every field of a served model that differs, sorted.

    Compared: fields that both starts know, weights with one kind of digest. An unreachable server is no change.
    """
    changes = []
    for key in sorted(before.keys() & now.keys()):
        fields = sorted(before[key].keys() & now[key].keys())
        digests = [field for field in fields if field.startswith(SERVED_WEIGHTS)]
        for field in digests or fields:
            old, new = before[key][field], now[key][field]
            if not set(new) <= set(old):
                subject = f"the served model's {field}"
                changes.append(Change(key, _join(field, old), _join(field, new), "results", subject=subject))
    return changes


def _join(field: str, values: Iterable[str]) -> str:
    return ", ".join(value[:12] if field.startswith(SERVED_WEIGHTS) else value for value in values)


def default_values() -> dict[str, object]:
    """Return the default of every key that has one, by ``section.key``."""
    values: dict[str, object] = {}

    def collect(model: Any, prefix: str) -> None:
        for name, field in model.known_fields().items():
            if hasattr(field.annotation, "model_fields"):
                collect(field.annotation, f"{prefix}{name}.")
            elif not field.is_required():
                values[f"{prefix}{name}"] = field.get_default(call_default_factory=True)

    collect(Config, "")
    return values


def _is_harmless(key: str, old: Mapping[str, object], new: Mapping[str, object]) -> bool:
    """Return True for another number of steps under a constant learning rate, which does not depend on it."""
    style = "optimizer.lr_decay_style"
    return key == "run.num_steps" and old.get(style) == new.get(style) == "constant"


def check_changes(changes: list[Change], checkpoint: Path, *, accepted: bool | Collection[str]) -> None:
    """Refuse to continue a run with other settings or files."""
    if accepted is True:
        return
    keys_accepted = accepted or ()
    refused = [change for change in changes if change.kind == "results" and change.key not in keys_accepted]
    if refused:
        listed = "\n".join(f"  {change}" for change in refused)
        keys = ",".join(dict.fromkeys(change.key for change in refused))
        what = "settings or files" if any(change.file for change in refused) else "settings"
        raise CheckpointError(
            f"{checkpoint} is from a run with other {what}:\n{listed}\n"
            "Fix: restore the old ones, or use another run.output_dir. To resume with the new ones: --allow-changed "
            f"{keys}"
        )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
