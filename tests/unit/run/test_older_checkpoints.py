"""Checkpoints of older versions, whose configuration has other names for some keys."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_dppo.mcore.checkpoint.folder import read_state
from megatron_dppo.run.changes import find_changes
from tests.unit.configs import config


def test_the_configuration_of_an_older_checkpoint_has_the_current_names(tmp_path: Path) -> None:
    now = config(train={"max_nonfinite_fraction": 0.25})
    saved = now.model_dump(mode="json")
    renamed = {
        "loss": ("kl_anchor", "kl_target", {}),
        "train": ("max_dropped_fraction", "max_nonfinite_fraction", {}),
        "eval": ("beside_training", "overlap_training", {}),
        "distillation": ("teacher_weights", "teacher_offload", {"model": "whole"}),
    }
    for section, (old, new, values) in renamed.items():
        value = saved[section].pop(new)
        saved[section][old] = values.get(value, value)
    servers = saved["rollout"]["servers"]
    servers["answer_processes"] = servers.pop("client_processes")
    servers["patience_seconds"] = servers.pop("unavailable_timeout_seconds")
    (tmp_path / "state.json").write_text(json.dumps({"config": saved, "step": 3}))
    assert find_changes(read_state(tmp_path)["config"], now) == []
