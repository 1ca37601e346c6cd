"""Which keys a resumed run may change: every key of the configuration has a class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.config.data import SourceConfig
from megatron_dppo.config.reward import RewardFunctionConfig
from megatron_dppo.config.reward_options import BUILT_IN_REWARDS
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import CheckpointError
from megatron_dppo.setup.changes import KEY_KINDS, change_kind, check_changes, find_changes
from tests.unit.configs import config

MIXED = ("run", "agent", "reward", "train", "optimizer", "distillation", "eval")
FREE = {
    "eval.stop_at_accuracy",
    *(
        "run.output_dir",
        "run.num_epochs",
        "run.overwrite",
        "run.threads_per_rank",
        "run.timeout_minutes",
        "run.wait_minutes",
        "run.hang_minutes",
    ),
    *("reward.max_failed_fraction", "reward.timeout_seconds", "reward.num_workers", "reward.async_concurrency"),
    *("train.max_skipped_updates", "train.max_first_prob_diff", "train.max_nonfinite_fraction", "train.sampling_test"),
    "distillation.teacher_urls",
    "distillation.teacher_api_key_env",
    "distillation.teacher_timeout_seconds",
    "distillation.teacher_max_in_flight",
    *("agent.timeout_seconds", "agent.max_running", "agent.host", "agent.max_body_bytes", "agent.max_failed_fraction"),
    "optimizer.use_precision_aware_optimizer",
    "optimizer.optimizer_cpu_offload",
    "optimizer.optimizer_offload_fraction",
    "optimizer.overlap_cpu_optimizer_d2h_h2d",
    "optimizer.pin_cpu_grads",
}
"""Keys that do not change results, of the sections that have both kinds."""


def keys(model: Any = Config, prefix: str = "") -> list[str]:
    found = []
    for name, field in model.model_fields.items():
        if hasattr(field.annotation, "model_fields"):
            found += keys(field.annotation, f"{prefix}{name}.")
        else:
            found.append(f"{prefix}{name}")
    return found


def keys_in_tables() -> list[str]:
    """Those of tables whose own names the user chooses, and of reward functions' options."""
    own = [f"reward.functions.mine.{name}" for name in RewardFunctionConfig.model_fields if name != "options"]
    own += [f"data.sources.mine.{name}" for name in SourceConfig.model_fields]
    options = {name for model in BUILT_IN_REWARDS.values() for name in model.model_fields}
    return own + [f"reward{table}.options.{name}" for table in ("", ".functions.mine") for name in options]


def test_every_key_has_a_class_and_every_pattern_a_key() -> None:
    from fnmatch import fnmatchcase

    first = {key: next((p for p in KEY_KINDS if fnmatchcase(key, p)), None) for key in [*keys(), *keys_in_tables()]}
    assert not [key for key, pattern in first.items() if pattern is None]
    assert not KEY_KINDS.keys() - set(first.values()), "these patterns match nothing that an earlier one does not"
    assert change_kind("new_section.key") == "results"


def test_sections_with_both_kinds_list_each_key() -> None:
    """A new key of these sections has to be put into one class here."""
    mixed = [key for key in keys() if key.split(".")[0] in MIXED]
    assert {key for key in mixed if change_kind(key) == "free"} == FREE
    for section in ("model", "data", "loss"):
        assert {change_kind(key) for key in keys() if key.startswith(f"{section}.")} <= {"results", "fixed"}
    for section in ("parallel", "checkpoint", "log", "rollout.servers", "rollout.weight_sync"):
        of_section = {key for key in keys() if key.startswith(f"{section}.")} - {"rollout.servers.model"}
        assert {change_kind(key) for key in of_section} == {"free"}
    assert change_kind("rollout.servers.model") == "results"


def other(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return f"{value}-other"


def test_every_changed_key_is_reported_and_needs_the_flag_if_it_changes_results() -> None:
    base = config(optimizer={"lr_decay_style": "linear"})
    for key in keys():
        before = base.model_dump(mode="json")
        *sections, name = key.split(".")
        table = before
        for section in sections:
            table = table[section]
        table[name] = other(table[name])
        (change,) = find_changes(before, base)
        assert change.key == key and change.kind == change_kind(key)
        if change.kind == "results":
            with pytest.raises(CheckpointError, match=f"  {key}: .* -> "):
                check_changes([change], Path("step_000001"), accepted=False)
        else:
            check_changes([change], Path("step_000001"), accepted=False)
        check_changes([change], Path("step_000001"), accepted=True)


def test_all_changed_keys_are_reported_at_once() -> None:
    before = config().model_dump(mode="json")
    now = config(loss={"name": "grpo"}, rollout={"temperature": 0.5}, model={"transformer": {"x": 1}})
    with pytest.raises(CheckpointError) as caught:
        check_changes(find_changes(before, now), Path("step_000001"), accepted=False)
    lines = [line.strip() for line in str(caught.value).splitlines()[1:-1]]
    assert lines == [
        "loss.name: 'dppo_binary_tv' -> 'grpo'",
        "model.transformer.x: None -> 1",
        "rollout.temperature: 1.0 -> 0.5",
    ]


def test_a_longer_run_is_free_only_when_no_schedule_ends_with_it() -> None:
    for style, kind in (("constant", "free"), ("linear", "results"), ("cosine", "results")):
        optimizer = {"lr": 1e-3, "lr_decay_style": style}
        before = config(optimizer=optimizer, run={"output_dir": "out", "num_steps": 10})
        now = config(optimizer=optimizer, run={"output_dir": "out", "num_steps": 20})
        assert [c.kind for c in find_changes(before.model_dump(mode="json"), now)] == [kind]


def test_a_key_that_an_older_version_did_not_have_counts_as_its_default() -> None:
    before = config().model_dump(mode="json")
    del before["checkpoint"]["accept_changes"], before["train"]["mask_truncated"]
    before["train"]["of_the_past"] = 3
    changes = find_changes(before, config(train={"mask_truncated": True}))
    assert [(c.key, c.old, c.new, c.kind) for c in changes] == [
        ("train.mask_truncated", False, True, "results"),
        ("train.of_the_past", 3, None, "results"),
    ]


def test_a_section_that_was_removed_is_no_change_and_any_other_unknown_one_is() -> None:
    saved = config().model_dump(mode="json")
    assert find_changes(saved | {"warmup": {"num_steps": 3}}, config()) == []
    (change,) = find_changes(saved | {"of_a_newer_version": {"rate": 3}}, config())
    assert (change.key, change.kind) == ("of_a_newer_version.rate", "results")
