"""The current weights as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megatron_dppo.config.model import ModelConfig
from megatron_dppo.config.schema import Config
from megatron_dppo.export.adapter_folder import save_adapter
from megatron_dppo.export.hf_folder import save_hf_folder
from megatron_dppo.files import require_space
from megatron_dppo.parallel.objects import run_on_leader
from megatron_dppo.parallel.platform import DTYPES
from megatron_dppo.setup.inputs import Inputs

if TYPE_CHECKING:
    from megatron_dppo.policy.trainer import PolicyTrainer


def export_hf(trainer: PolicyTrainer, inputs: Inputs, model: ModelConfig, target: Path, dtype: torch.dtype) -> None:
    """Write the current weights, adapters merged, as a Hugging Face folder (a collective)."""
    num_bytes = inputs.num_parameters * dtype.itemsize
    run_on_leader(lambda: require_space(target, num_bytes, "the export"), trainer.groups.world)
    save_hf_folder(target, model.path, trainer.export_weights(), dtype, group=trainer.groups.world)


def export_results(trainer: PolicyTrainer, inputs: Inputs, config: Config) -> None:
    """Write the model if ``checkpoint.export_hf`` is set, and the adapters of LoRA. A collective."""
    folder = Path(config.run.output_dir)
    if config.checkpoint.export_hf:
        export_hf(trainer, inputs, config.model, folder / "hf", DTYPES[config.model.dtype])
    if config.lora.rank:
        base = str(Path(config.model.path).absolute())
        save_adapter(folder / "hf-adapter", trainer.export_adapters(), config.lora, base, group=trainer.groups.world)
