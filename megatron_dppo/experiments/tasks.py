"""The settings of the embedded tasks in experiments, and of the warm-up that makes their base models."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_dppo.experiments.grid import Settings, merged
from megatron_dppo.experiments.smollm2 import GGUF_SHA256
from megatron_dppo.files.shipped import shipped_folder

REAL_MODEL = "smollm2"
"""Task of a pretrained language model, examples/smollm2."""
_REAL_MODEL_FILES = ("train.jsonl", "eval.jsonl", "reward.py")
_COMMON: Settings = {
    "run": {"threads_per_rank": 1},
    "model": {"dtype": "fp32"},
    "rollout": {"dtype": "fp32"},
    "checkpoint": {"export_hf": False, "resume": "never"},
    "log": {"tensorboard": False, "progress": False, "curves": False},
}
_WORDS: Settings = {
    "rollout": {"prompts_per_step": 32, "samples_per_prompt": 16},
    "reward": {"function": "words"},
    # Several updates a rollout: what a trust region is for.
    "train": {"mini_batches": 8, "epochs": 2},
    "optimizer": {"lr": 3e-4},
}


def _task(name: str, *tables: Settings) -> dict[str, Any]:
    source = f"task:{name}"
    return merged(_COMMON, {"data": {"train": source, "eval": source}}, *tables)


TASKS: Mapping[str, Settings] = {
    "rare_words": _task(
        "rare_words", _WORDS, {"run": {"num_steps": 20}, "rollout": {"max_new_tokens": 2}, "eval": {"every": 20}}
    ),
    "rare_chain": _task(
        "rare_chain", _WORDS, {"run": {"num_steps": 30}, "rollout": {"max_new_tokens": 5}, "eval": {"every": 30}}
    ),
    "chain_sum": _task(
        "chain_sum",
        {
            "run": {"num_steps": 30},
            "rollout": {"prompts_per_step": 16, "samples_per_prompt": 16, "max_new_tokens": 40},
            "train": {"mini_batches": 8, "advantage": "std"},
            "optimizer": {"lr": 1e-3},
            "eval": {"every": 30, "max_prompts": 128},
        },
    ),
    REAL_MODEL: merged(
        _COMMON,
        {
            "run": {"num_steps": 20},
            "model": {"dtype": "bf16"},
            "data": {"train": "train.jsonl", "eval": "eval.jsonl"},
            "reward": {"function": "reward.py:score"},
            "rollout": {"dtype": "bf16", "prompts_per_step": 8, "samples_per_prompt": 8, "max_new_tokens": 20},
            "train": {"mini_batches": 4, "advantage": "std"},
            "optimizer": {"lr": 3e-5, "lr_warmup_steps": 2, "lr_decay_style": "linear"},
            "eval": {"every": 5},
        },
    ),
}
"""Task -> settings of a run that starts from its base model."""


def task_files(task: str) -> Path | None:
    """Return the folder that relative paths of the task's settings are in; None without files."""
    return shipped_folder("examples") / REAL_MODEL if task == REAL_MODEL else None


_WARMUP: Mapping[str, Settings] = {
    "rare_words": {"num_steps": 2000, "batch_size": 192, "optimizer": {"lr": 3e-3}},
    "rare_chain": {"num_steps": 2000, "batch_size": 192, "optimizer": {"lr": 3e-3}},
    "chain_sum": {"num_steps": 1600},
}


def warmup_settings(task: str, seed: int, num_steps: int | None = None) -> Settings:
    """The configuration of the run that makes a base model: a warm-up, and one tiny step of training.

    The real model needs none: its settings name the files that it and its task are made of.

    Args:
        task: a key of ``TASKS``.
        seed: of initial weights and corpus.
        num_steps: supervised steps; None = as many as the task needs.
    """
    if (files := task_files(task)) is not None:
        digests = {name: hashlib.sha256((files / name).read_bytes()).hexdigest() for name in _REAL_MODEL_FILES}
        return {"model": GGUF_SHA256, "files": digests}
    warmup = dict(_WARMUP[task]) | {"data": f"task:{task}"}
    if num_steps is not None:
        warmup["num_steps"] = num_steps
    tiny: Settings = {
        "run": {"num_steps": 1, "seed": seed},
        "model": {"random_init": True},
        "rollout": {"prompts_per_step": 2, "samples_per_prompt": 2},
        "train": {"mini_batches": 1, "epochs": 1},
        "eval": {"every": 1, "max_prompts": 1},
        "warmup": warmup,
    }
    return merged(TASKS[task], tiny)
