"""Model folder, tokenizer and data, read and checked before any process group is built."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from megatron_dppo.config import Config
from megatron_dppo.data.prompts import PromptDataset, load_rows
from megatron_dppo.data.supervised import SupervisedDataset
from megatron_dppo.data.tokenizer import load_tokenizer
from megatron_dppo.errors import CheckpointError
from megatron_dppo.hf import has_weights, model_shape, read_hf_config
from megatron_dppo.layout import Layout, resolve_layout
from megatron_dppo.metrics import require_wandb


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What the configuration names, read and checked before any process group is built."""

    hf_config: Any
    tokenizer: Any
    layout: Layout
    train_prompts: PromptDataset
    eval_prompts: PromptDataset | None
    warmup_data: SupervisedDataset | None


def read_inputs(config: Config, world_size: int) -> Inputs:
    """Read model folder and data, and check that everything fits together.

    Raises:
        UserError: with what to change.
    """
    if config.log.wandb_project is not None:
        require_wandb(config.log.wandb_project)
    hf_config = read_hf_config(config.model.path)
    layout = resolve_layout(config, world_size, model_shape(hf_config))
    if not config.model.random_init and not has_weights(config.model.path):
        raise CheckpointError(
            f"model.path = {config.model.path!r} has no *.safetensors weights; expected a complete Hugging Face folder "
            "(or set model.random_init = true together with a warm-up)"
        )
    tokenizer = load_tokenizer(config.model.path)
    limits = dict(
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_new_tokens=config.rollout.max_new_tokens,
        context_length=hf_config.max_position_embeddings,
    )
    keys = (config.data.prompt_key, config.data.label_key)
    train = PromptDataset(load_rows(config.data.train, "train", *keys), tokenizer, **limits, seed=config.run.seed)
    held_out = None
    if config.data.eval is not None:
        rows = load_rows(config.data.eval, "eval", *keys)
        if config.eval.max_prompts is not None and config.eval.max_prompts < len(rows):
            rows = random.Random(0).sample(rows, config.eval.max_prompts)
        held_out = PromptDataset(rows, tokenizer, **limits)
    warmup = SupervisedDataset(config.warmup.data, tokenizer, config.run.seed) if config.warmup.num_steps else None
    return Inputs(
        hf_config=hf_config,
        tokenizer=tokenizer,
        layout=layout,
        train_prompts=train,
        eval_prompts=held_out,
        warmup_data=warmup,
    )
