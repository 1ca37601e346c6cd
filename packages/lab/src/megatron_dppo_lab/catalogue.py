"""Tasks, losses and mismatches that experiments choose from. Another loss is one more line of ``LOSSES``."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_dppo.source_names import TASK
from megatron_dppo_lab.grid import LossSetting, Mismatch, Settings, merged
from megatron_dppo_lab.shipped import shipped_folder
from megatron_dppo_lab.smollm2 import GGUF_SHA256, MIXTURE
from megatron_dppo_lab.third_losses import THIRD_LOSSES, thresholds


def _thresholds(*values: float) -> Sequence[Settings]:
    return [{"loss": thresholds(value)} for value in values]


def _caps(*values: float) -> Sequence[Settings]:
    return [{"loss": {"ratio_cap": value}} for value in values]


_TV, _KL = _thresholds(0.05, 0.15, 0.3), _thresholds(0.02, 0.05, 0.15)
_CLIPS = [
    {"loss": {"clip_ratio_low": low, "clip_ratio_high": high}} for low, high in ((0.1, 0.14), (0.2, 0.28), (0.4, 0.56))
]
_FAR = {"divergence_threshold_low": 0.5, "divergence_threshold_high": 1.0}
"""A probability never rises by more than 1: only falling tokens are masked."""


def _dppo(kind: str, cap: float | str = "off", **more: Any) -> Settings:
    return {"name": f"dppo_{kind}", "ratio_cap": cap, **more}


SECOND_LOSSES: Mapping[str, LossSetting] = {
    loss.name: loss
    for loss in (
        # Weights of DPPO are not capped unless the name says so: what a mask does is to be seen without another limit.
        LossSetting("dppo_binary_tv", _dppo("binary_tv"), _TV),
        LossSetting("dppo_binary_tv cap 2", _dppo("binary_tv", 2.0), _TV),
        LossSetting("dppo_binary_tv cap 5", _dppo("binary_tv", 5.0), _TV),
        LossSetting("dppo_binary_kl", _dppo("binary_kl"), _KL),
        LossSetting("dppo_topk_tv", _dppo("topk_tv"), _TV),
        LossSetting("dppo_topk_kl", _dppo("topk_kl"), _KL),
        LossSetting("dppo_topk_tv predictive", _dppo("topk_tv", direction="predictive"), _TV),
        LossSetting("dppo_topk_kl predictive", _dppo("topk_kl", direction="predictive"), _KL),
        LossSetting("score_centering", {"name": "score_centering"}, _caps(1.0, 2.0, 5.0)),
        LossSetting("drpo", {"name": "drpo"}, _TV),
        LossSetting("ipo", {"name": "ipo"}, _thresholds(0.1, 0.3, 0.6)),
        LossSetting("grpo", {"name": "grpo"}, _CLIPS),
        LossSetting("minirl", {"name": "minirl"}, _CLIPS),
        LossSetting("cispo", {"name": "cispo"}, _caps(2.0, 5.0, 10.0)),
        LossSetting("pg_is", {"name": "pg_is"}),
        # Not of the wind tunnel: variants that single figures ask for. A ratio is never above 1e9.
        LossSetting("grpo relaxed up", {"name": "grpo", "clip_ratio_high": 1e9}),
        LossSetting("grpo relaxed down", {"name": "grpo", "clip_ratio_low": 1 - 1e-9}),
        LossSetting("grpo relaxed both", {"name": "grpo", "clip_ratio_low": 1 - 1e-9, "clip_ratio_high": 1e9}),
        LossSetting("dppo_binary_tv far", _dppo("binary_tv", **_FAR)),
        LossSetting("dppo_binary_kl cap 5", _dppo("binary_kl", 5.0), _KL),
        LossSetting("dppo_topk_tv cap 5", _dppo("topk_tv", 5.0), _TV),
        LossSetting("dppo_topk_kl cap 5", _dppo("topk_kl", 5.0), _KL),
    )
}
"""Losses of the second edition and of single figures. The defaults of a loss stand among its candidates."""
LOSSES: Mapping[str, LossSetting] = {**SECOND_LOSSES, **THIRD_LOSSES}
NONE = Mismatch("none", "", {})
_HALF = ("bf16", "fp16")
_CONSTANT: Settings = {"optimizer": {"lr_decay_style": "constant"}}


def _perturbed(name: str, key: str, values: Sequence[Any]) -> list[Mismatch]:
    return [Mismatch(name, str(value), {"rollout": {"perturbation": {key: value}}}) for value in values]


MISMATCHES: Mapping[str, Mismatch] = {
    mismatch.label: mismatch
    for mismatch in (
        NONE,
        Mismatch("bf16", "", {"rollout": {"dtype": "bf16"}}),
        *_perturbed("weights", "weights", ["fp8", "int8", "int4"]),
        *_perturbed("router_noise", "router_noise", [0.1, 0.3, 1.0]),
        *[Mismatch("staleness", str(age), {"train": {"max_staleness": age}}) for age in (1, 2, 4, 8, 16)],
        *_perturbed("hidden_top_p", "unrecorded_top_p", [0.95, 0.9]),
        Mismatch(
            "router_noise",
            "1.0, replay",
            {"rollout": {"perturbation": {"router_noise": 1.0}}, "train": {"router_replay": "rollout"}},
        ),
        *_perturbed("hidden_temperature", "unrecorded_temperature", [0.8, 1.25]),
        Mismatch("top_p", "0.9", {"rollout": {"top_p": 0.9}}),
        # Updates on the rollouts of one step; the word tasks have 16.
        Mismatch("updates", "1, lr 3e-3", {"train": {"mini_batches": 1, "epochs": 1}, "optimizer": {"lr": 3e-3}}),
        Mismatch("updates", "64", {"train": {"mini_batches": 16, "epochs": 4}}),
        Mismatch("staleness", "4, lr 1e-3", {"train": {"max_staleness": 4}, "optimizer": {"lr": 1e-3}}),
        *[Mismatch(f"{dtype} both", "", {name: {"dtype": dtype} for name in ("model", "rollout")}) for dtype in _HALF],
        # Not mismatches: what may keep a run at its best when the learning rate does not fall.
        Mismatch("constant rate", "", _CONSTANT),
        Mismatch("constant rate", "1e-5", {"optimizer": {"lr_decay_style": "constant", "lr": 1e-5}}),
        Mismatch("constant rate", "groups with signal", {**_CONSTANT, "rollout": {"dynamic_sampling": True}}),
        Mismatch("constant rate", "entropy bonus", {**_CONSTANT, "loss": {"entropy_coef": 0.003}}),
        Mismatch("hot", "", {"train": {"max_staleness": 8, "advantage": "std"}, "optimizer": {"lr": 3e-3}}),
    )
}
"""Label -> mismatch. ``both``: trainer and engine in this dtype. ``hot``: rollouts of eight steps ago, advantages over
their deviation, and a learning rate that is far too high."""
REAL_MODEL = "smollm2"
"""Task of a pretrained language model, examples/smollm2."""
REAL_MIXTURE = "smollm2_moe"
"""The same task for that model upcycled to four experts."""
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


def _rare_task(name: str, num_steps: int, max_new_tokens: int) -> dict[str, Any]:
    length = {"run": {"num_steps": num_steps}, "eval": {"every": num_steps}}
    return _task(name, _WORDS, length, {"rollout": {"max_new_tokens": max_new_tokens}})


_REAL_TASK = merged(
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
)


TASKS: Mapping[str, Settings] = {
    "rare_words": _rare_task("rare_words", 20, 2),
    "rare_chain": _rare_task("rare_chain", 30, 5),
    "rare_words_32k": _rare_task("rare_words_32k", 20, 2),
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
    REAL_MODEL: _REAL_TASK,
    # Ten of its steps take as many CPU seconds as twenty of the dense model, and 14 GB of memory.
    REAL_MIXTURE: merged(_REAL_TASK, {"run": {"num_steps": 10}}),
}
"""Task -> settings of a run that starts from its base model."""


def task_files(task: str) -> Path | None:
    """Return the folder that relative paths of the task's settings are in; None without files."""
    return shipped_folder("examples") / REAL_MODEL if task in (REAL_MODEL, REAL_MIXTURE) else None


BASE_DEFAULTS: Settings = {
    "run": {"output_dir": "base", "num_steps": 1600},
    "model": {"dtype": "fp32"},
    # One step is one update on so many pairs of prompt and response. The other two keys have no default, and no effect.
    "rollout": {"prompts_per_step": 96, "samples_per_prompt": 2, "max_new_tokens": 1},
    "train": {"mini_batches": 1},
    "optimizer": {
        "lr": 6e-3,
        "min_lr": 6e-4,
        "lr_warmup_steps": 20,
        "lr_decay_style": "cosine",
        "adam_beta2": 0.98,
        "weight_decay": 0.01,
    },
}
"""Configuration of ``base_model.train_base``, without ``model.path`` and ``data.train``."""


_BASES: Mapping[str, Settings] = {
    "rare_words": {"num_steps": 2000, "batch_size": 192, "optimizer": {"lr": 3e-3}},
    "rare_chain": {"num_steps": 2000, "batch_size": 192, "optimizer": {"lr": 3e-3}},
    # With batches of 64 the right word has a probability of .004 at the end, and no run learns in its 20 steps.
    "rare_words_32k": {"num_steps": 1500, "batch_size": 192, "optimizer": {"lr": 3e-3}},
    "chain_sum": {"num_steps": 1600},
}
"""Supervised training of each task's base model, where it differs from ``BASE_DEFAULTS``."""


def base_settings(source: str, seed: int = 0, num_steps: int | None = None) -> Settings:
    """Return the configuration of ``base_model.train_base`` for a source of samples, without ``model.path``.

    The source is an embedded task (``task:NAME``), or a file, which gets the defaults.
    """
    recipe = _BASES.get(source.removeprefix(TASK), {}) if source.startswith(TASK) else {}
    steps = num_steps or recipe.get("num_steps")
    batch_size = recipe.get("batch_size")
    changed: Settings = {
        "run": {"seed": seed, **({} if steps is None else {"num_steps": steps})},
        "data": {"train": source},
        "rollout": {} if batch_size is None else {"prompts_per_step": batch_size},
        "optimizer": recipe.get("optimizer", {}),
    }
    return merged(BASE_DEFAULTS, changed)


def base_identity(task: str, seed: int, num_steps: int | None = None) -> Settings:
    """Return everything that the base model of a task depends on. Its digest is part of the names of bases and rows.

    So its keys must stay: they are those of the configuration that trained the first bases. The real models need no
    training: the digests of their files identify them.
    """
    if (files := task_files(task)) is not None:
        digests = {name: hashlib.sha256((files / name).read_bytes()).hexdigest() for name in _REAL_MODEL_FILES}
        upcycled = {"upcycling": dict(MIXTURE)} if task == REAL_MIXTURE else {}
        return {"model": GGUF_SHA256, "files": digests, **upcycled}
    warmup = dict(_BASES[task]) | {"data": f"task:{task}"}
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
