"""A Megatron model with the weights of a Hugging Face folder or a ``torch_dist`` checkpoint, on any layout."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from megatron_dppo.config.layout import Layout, pipeline_split, resolve_parallel
from megatron_dppo.config.model import LoraConfig, ModelConfig, ParallelConfig
from megatron_dppo.errors import CheckpointError
from megatron_dppo.hf.folder import model_shape, read_hf_config
from megatron_dppo.hf.weight_files import FolderWeights
from megatron_dppo.parallel.platform import Platform
from megatron_dppo.types.model_folder import HfConfig

if TYPE_CHECKING:
    from megatron_dppo.mcore.bridge import Bridge
    from megatron_dppo.mcore.lora import Lora
    from megatron_dppo.mcore.model import Chunks
    from megatron_dppo.parallel.groups import ParallelGroups


@dataclass
class Converter:
    """Model without optimizer, on this rank's part of a layout."""

    hf_folder: Path
    hf_config: HfConfig
    layout: Layout
    models: Chunks
    bridge: Bridge
    groups: ParallelGroups
    lora: Lora | None = None
    """Adapters of the checkpoint that was loaded. None: no adapters."""

    def load_hf(self) -> None:
        """Load the weights of the Hugging Face folder."""
        weights = FolderWeights(self.hf_folder, "the folder")
        self.bridge.load(weights)
        if (note := weights.note()) and dist.get_rank() == 0:
            print(note, file=sys.stderr)

    def load_megatron(self, checkpoint: Path) -> None:
        """Load a ``torch_dist`` checkpoint of any layout, converted or written in training.

        Its files are verified with its manifest. A checkpoint without one (of another program) is loaded with a note on
        stderr. A checkpoint that holds only adapters is loaded on top of the Hugging Face folder's weights.
        """
        from megatron_dppo.mcore.checkpoint.save_load import load_model
        from megatron_dppo.mcore.lora import Lora

        config = read_lora_config(checkpoint)
        if config.rank:
            self.load_hf()
            self.lora = Lora(self.models, model_shape(self.hf_config), self.groups, config, seed=0)
        note = load_model(checkpoint, self.models, groups=self.groups)
        if note and dist.get_rank() == 0:
            print(f"note: {note}", file=sys.stderr)

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Stream the full weights by Hugging Face name, adapters merged (a collective)."""
        return self.bridge.export(*([] if self.lora is None else [self.lora.merge]))


def read_lora_config(checkpoint: Path) -> LoraConfig:
    """Return the LoRA configuration of a checkpoint that training wrote; the default, without adapters, for others."""
    from megatron_dppo.mcore.checkpoint.folder import read_state

    file = checkpoint / "state.json"
    if not file.is_file():
        return LoraConfig()
    try:
        return LoraConfig.model_validate(read_state(checkpoint).get("config", {}).get("lora", {}))
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{file} has an unusable config.lora, which a run does not write") from error


@contextmanager
def open_converter(hf_folder: str, parallel: ParallelConfig, dtype: str) -> Iterator[Converter]:
    """Build the model of a Hugging Face folder on the layout of the running processes (torchrun, or one process)."""
    from megatron_dppo.mcore.shims import apply_shims

    platform = Platform.detect()
    # Before anything imports Megatron.
    apply_shims(platform)
    from megatron_dppo.mcore import model, setup
    from megatron_dppo.mcore.bridge import Bridge

    hf_config = read_hf_config(hf_folder)
    shape = model_shape(hf_config)
    split = pipeline_split(
        shape.num_layers,
        parallel.pipeline_model_parallel_size,
        parallel.virtual_pipeline_model_parallel_size or 1,
    )
    layout = resolve_parallel(parallel, int(os.environ.get("WORLD_SIZE", "1")), shape, split)
    setup.start_process_group(platform, timeout_minutes=30.0)
    try:
        groups = setup.initialize_megatron(layout, platform, seed=0, timeout_minutes=30.0)
        model_config = ModelConfig.model_validate({"path": hf_folder, "dtype": dtype, "transformer": split})
        config = model.transformer_config(hf_config, model_config, layout, platform)
        models = model.build_model(config, hf_config, dist.get_rank(groups.pp), platform.device)
        bridge = Bridge(models, shape, tied=hf_config.tie_word_embeddings, groups=groups)
        yield Converter(Path(hf_folder), hf_config, layout, models, bridge, groups)
    finally:
        setup.shutdown_megatron()
