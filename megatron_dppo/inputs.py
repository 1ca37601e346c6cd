"""Model folder, tokenizer and data, read and checked before any process group is built."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_dppo.config import Config
from megatron_dppo.data.chain_sum import Split
from megatron_dppo.data.chat import ChatOptions
from megatron_dppo.data.prompts import PromptDataset, load_rows
from megatron_dppo.data.supervised import SupervisedDataset
from megatron_dppo.data.tokenizer import load_tokenizer
from megatron_dppo.errors import CheckpointError, ConfigError
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
    eval_prompts: dict[str, PromptDataset]
    """Held-out sets by name; a single one without a name is called ``""``; empty = no evaluation."""
    warmup_data: SupervisedDataset | None
    data_summary: str
    """What was read, dropped and kept, for the terminal."""


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
    if config.loss.is_topk and config.loss.topk > hf_config.vocab_size:
        raise ConfigError(
            f"loss.topk = {config.loss.topk} is above the {hf_config.vocab_size} entries of the vocabulary of "
            f"{config.model.path!r}; use at most that"
        )
    if config.train.router_replay != "off" and model_shape(hf_config).num_experts is None:
        raise ConfigError(
            f"train.router_replay = {config.train.router_replay!r}, but {config.model.path!r} is a dense model, which "
            "has no routers; set it to 'off'"
        )
    if config.model.reference_path is not None:
        _check_reference(config.model.reference_path, hf_config)
    tokenizer = load_tokenizer(config.model.path)
    reader = _PromptReader(config, tokenizer, hf_config.max_position_embeddings)
    train = reader.read(config.data.train, "train", "train")
    named = {"": config.data.eval} if isinstance(config.data.eval, str) else config.data.eval or {}
    held_out = {name: reader.read(source, "eval", f"eval {name}".strip()) for name, source in named.items()}
    warmup = SupervisedDataset(config.warmup.data, tokenizer, config.run.seed) if config.warmup.num_steps else None
    return Inputs(
        hf_config=hf_config,
        tokenizer=tokenizer,
        layout=layout,
        train_prompts=train,
        eval_prompts=held_out,
        warmup_data=warmup,
        data_summary="\n".join(reader.summary),
    )


class _PromptReader:
    """Sources to prompts by the configuration; ``summary`` has one line for each."""

    def __init__(self, config: Config, tokenizer: Any, context_length: int) -> None:
        self._config, self._tokenizer, self._context_length = config, tokenizer, context_length
        self.summary: list[str] = []

    def read(self, source: str | Sequence[str], split: Split, name: str) -> PromptDataset:
        config, data = self._config, self._config.data
        loaded = load_rows(
            source, split, prompt_key=data.prompt_key, label_key=data.label_key, deduplicate=data.deduplicate
        )
        rows, most = loaded.rows, config.eval.max_prompts
        if split == "eval" and most is not None and most < len(rows):
            rows = random.Random(0).sample(rows, most)
        prompts = PromptDataset(
            rows,
            self._tokenizer,
            max_prompt_tokens=data.max_prompt_tokens,
            max_new_tokens=config.rollout.max_new_tokens,
            context_length=self._context_length,
            seed=config.run.seed if split == "train" else None,
            chat=ChatOptions(data.apply_chat_template, data.system_prompt, data.chat_template_kwargs),
            overlong=data.overlong_prompts,
        )
        parts = [f"{len(prompts)} prompts"]
        if repeated := loaded.num_read - len(loaded.rows):
            parts.append(f"{repeated} repeated rows dropped")
        if len(rows) < len(loaded.rows):
            parts.append(f"a sample of {len(loaded.rows)}")
        if prompts.num_dropped:
            parts.append(f"{prompts.num_dropped} too long dropped")
        named = source if isinstance(source, str) else ", ".join(source)
        self.summary.append(f"data     {name}: {', '.join(parts)}; from {named} ({loaded.num_read} rows)")
        return prompts


def _check_reference(path: str, hf_config: Any) -> None:
    """Refuse a reference policy that is not a complete folder of the same sizes."""
    if not has_weights(path):
        raise CheckpointError(
            f"model.reference_path = {path!r} has no *.safetensors weights; expected a complete Hugging Face folder"
        )
    found, expected = model_shape(read_hf_config(path)), model_shape(hf_config)
    if found != expected:
        raise ConfigError(
            f"model.reference_path = {path!r} is a model of other sizes ({found}) than model.path ({expected}); the "
            "reference policy is computed by the same model code and needs the same sizes"
        )
