"""Configurations for tests, as nested dictionaries like those of a TOML file."""

from __future__ import annotations

from typing import Any

from megatron_dppo.config.io import validate
from megatron_dppo.config.schema import Config


def minimal() -> dict[str, Any]:
    """Only what has no default."""
    return {
        "run": {"output_dir": "out", "num_steps": 10},
        "model": {"path": "model"},
        "data": {"train": "task:chain_sum"},
        "rollout": {"prompts_per_step": 16, "samples_per_prompt": 8, "max_new_tokens": 32},
        "optimizer": {"lr": 1e-3},
    }


def config(**sections: dict[str, Any]) -> Config:
    """The minimal configuration with some keys of some sections changed."""
    values = minimal()
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    return validate(values, "test")
