"""Which checkpoint a run continues from, and whether it can: decided before any model is built."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from megatron_dppo.config import Config
from megatron_dppo.errors import CheckpointError
from megatron_dppo.hf import model_shape
from megatron_dppo.inputs import Inputs


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint that this run can continue from."""

    checkpoint: Path
    same_layout: bool
    """True = bit for bit; False = the same curve up to rounding."""


def run_identity(config: Config, inputs: Inputs) -> dict[str, Any]:
    """What a checkpoint must agree with, on any layout."""
    hf_config = inputs.hf_config
    identity = {
        "model": {**vars(model_shape(hf_config)), "tied": bool(hf_config.tie_word_embeddings)},
        "seed": config.run.seed,
        "data": config.data.train,
        "prompts": inputs.train_prompts.fingerprint(),
    }
    return cast(dict[str, Any], json.loads(json.dumps(identity)))  # as it reads back: JSON has no tuples


def layout_identity(config: Config, inputs: Inputs) -> dict[str, Any]:
    """The layout a checkpoint was written on."""
    return {
        "layout": str(inputs.layout),
        "world_size": inputs.layout.world_size,
        "has_expert_parallelism": inputs.layout.ep > 1,
        "virtual_pipeline_size": inputs.layout.vpp,
        "use_distributed_optimizer": config.parallel.use_distributed_optimizer,
    }


def find_resume_point(config: Config, inputs: Inputs) -> ResumePoint | None:
    """The newest complete checkpoint of the run, or None.

    Raises:
        CheckpointError: it is of another model, seed or data, or of a layout that Megatron cannot reshard from.
    """
    from megatron_dppo.mcore.checkpoint import checkpoints, read_state

    found = checkpoints(Path(config.run.output_dir) / "checkpoints") if config.checkpoint.resume == "auto" else []
    if not found:
        return None
    state = read_state(found[-1])
    for key, mine in run_identity(config, inputs).items():
        if state["identity"][key] != mine:
            raise CheckpointError(
                f"{found[-1]} was written with {key} = {state['identity'][key]}, this run has {mine}; it is another "
                "run. Use the same value, or another run.output_dir"
            )
    here, there = layout_identity(config, inputs), state["layout"]
    same = here["layout"] == there["layout"] and here["world_size"] == there["world_size"]
    for key, reason in _CANNOT_RESHARD.items():
        if here[key] != there[key]:
            raise CheckpointError(
                f"{found[-1]} was written on {there['layout']} with {key} = {there[key]}, this run ({here['layout']}) "
                f"has {here[key]}: {reason}. Use the old value, or start again from the exported Hugging Face folder"
            )
    return ResumePoint(found[-1], same)


_CANNOT_RESHARD = {
    "has_expert_parallelism": "Megatron keeps the optimizer state of experts apart only with expert parallelism above "
    "1, and cannot convert between the two",
    "virtual_pipeline_size": "resharding of an interleaved pipeline is not supported",
    "use_distributed_optimizer": "the two optimizers have different checkpoint formats",
}
