"""A Megatron trainer in this process, with the weights of a tiny model. Call ``prepare`` before anything else."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from megatron_dppo.config.layout import resolve_layout
from megatron_dppo.config.schema import Config
from megatron_dppo.hf.folder import DictWeights, model_shape, read_hf_config, stream_model
from megatron_dppo.parallel.platform import Platform
from tests.engines.tiny import make_tiny


@functools.cache
def prepare() -> Platform:
    """Before the first import of megatron."""
    from megatron_dppo.mcore.shims import apply_shims

    platform = Platform.detect(force_cpu=True)
    apply_shims(platform)
    return platform


@functools.cache
def _groups(layout: Any) -> Any:
    from megatron_dppo.mcore.setup import initialize_megatron

    return initialize_megatron(layout, prepare(), seed=1, timeout_minutes=3)


def build_trainer(folder: Path, dtype: str, temperature: float, topk: int) -> Any:
    """Build a one-process trainer that replays routes and needs a Top-K; the process group must exist."""
    platform = prepare()
    from megatron_dppo.mcore.model_parts import Placement
    from megatron_dppo.run.policy_setup import trainer_from_config

    rollout = {"prompts_per_step": 8, "samples_per_prompt": 2, "max_new_tokens": 64}
    config = Config.model_validate(
        {
            "run": {"output_dir": str(folder), "num_steps": 1},
            "model": {"path": str(folder), "dtype": dtype},
            "data": {"train": "unused"},
            "rollout": {**rollout, "temperature": temperature, "dtype": dtype},
            "loss": {"name": "dppo_topk_tv", "topk": topk},
            "train": {"router_replay": "rollout"},
            "optimizer": {"lr": 1e-6},
        }
    )
    hf_config = read_hf_config(folder)
    layout = resolve_layout(config.parallel, config.batch, 1, model_shape(hf_config))
    placement = Placement(hf_config, layout, _groups(layout), platform)
    return trainer_from_config(config, placement, load_weights(folder))


def load_weights(folder: Path) -> Any:
    """Load a folder as a weight source for the trainer's bridge."""

    return DictWeights(stream_model(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)))


def make_model(folder: Path, seed: int, sharpness: float, moved: float = 0.0) -> Path:
    """Write a tiny model and return its folder.

    Args:
        folder: Folder to create.
        seed: Seed of the weights.
        sharpness: Factor of the output layer; 15 makes a confident policy.
        moved: Amount by which each weight moves up or down.
    """
    make_tiny(folder, seed)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        model.lm_head.weight.mul_(sharpness)
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).sign() * moved)
    model.save_pretrained(folder)
    return folder
