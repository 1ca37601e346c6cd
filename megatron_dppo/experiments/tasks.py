"""The settings of the embedded tasks in experiments, and of the warm-up that makes their base models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_dppo.experiments.grid import Settings, merged

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
}
"""Task -> settings of a run that starts from its base model."""

_WARMUP: Mapping[str, Settings] = {
    "rare_words": {"num_steps": 2000, "batch_size": 192, "optimizer": {"lr": 3e-3}},
    "rare_chain": {"num_steps": 2000, "batch_size": 192, "optimizer": {"lr": 3e-3}},
    "chain_sum": {"num_steps": 1600},
}


def warmup_settings(task: str, seed: int, num_steps: int | None = None) -> Settings:
    """The configuration of the run that makes a base model: a warm-up, and one tiny step of training.

    Args:
        task: a key of ``TASKS``.
        seed: of initial weights and corpus.
        num_steps: supervised steps; None = as many as the task needs.
    """
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
