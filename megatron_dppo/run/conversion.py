"""Conversion of Hugging Face folders to Megatron ``torch_dist`` checkpoints and back, on any layout."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.config.layout import Layout, pipeline_split, resolve_parallel
from megatron_dppo.config.model import LoraConfig, ModelConfig, ParallelConfig
from megatron_dppo.data.training_samples import RowShape, pack, to_training_sample
from megatron_dppo.errors import CheckpointError
from megatron_dppo.export.hf_folder import save_hf_folder
from megatron_dppo.export.quantization import Quantization
from megatron_dppo.hf.folder import is_mtp_weight, model_shape, read_hf_config
from megatron_dppo.hf.weight_files import FolderWeights
from megatron_dppo.parallel.platform import Platform
from megatron_dppo.types.model_folder import HfConfig

_LAYOUT_FILE = "conversion.json"
_CHECK_TOKENS = 48


@dataclass
class Converter:
    """Model without optimizer, on this rank's part of a layout."""

    hf_folder: Path
    hf_config: HfConfig
    layout: Layout
    models: list[Any]
    bridge: Any
    groups: Any
    lora: Any = None
    """Adapters of the checkpoint that was loaded. None: no adapters."""

    def load_hf(self) -> None:
        """Load the weights of the Hugging Face folder."""
        weights = FolderWeights(self.hf_folder, "the folder")
        self.bridge.load(weights)
        if (note := weights.note()) and dist.get_rank() == 0:
            print(note, file=sys.stderr)

    def save_megatron(self, target: Path) -> None:
        """Write a ``torch_dist`` checkpoint of the weights."""
        from megatron_dppo.mcore.checkpoint.save_load import save_model

        if target.exists():
            raise CheckpointError(f"{target} already exists; choose another folder or delete it")
        # No rank may create the folder before every rank has looked for it.
        dist.barrier()
        text = json.dumps({"hf_folder": str(self.hf_folder), "layout": str(self.layout)}, indent=2)
        save_model(target, self.models, {_LAYOUT_FILE: text + "\n"})

    def load_megatron(self, checkpoint: Path) -> None:
        """Load a ``torch_dist`` checkpoint of any layout, converted or written in training.

        Its files are verified with its manifest. A checkpoint without one (of another program) is loaded with a note on
        stderr. A checkpoint that holds only adapters is loaded on top of the Hugging Face folder's weights.
        """
        from megatron_dppo.mcore.checkpoint.save_load import load_model
        from megatron_dppo.mcore.lora import Lora

        config = _read_lora_config(checkpoint)
        if config.rank:
            self.load_hf()
            self.lora = Lora(self.models, model_shape(self.hf_config), self.groups, config, seed=0)
        note = load_model(checkpoint, self.models, groups=self.groups)
        if note and dist.get_rank() == 0:
            print(f"note: {note}", file=sys.stderr)

    def save_hf(self, target: Path, dtype: torch.dtype, quantization: Quantization | None = None) -> None:
        """Stream the weights to a Hugging Face folder; each rank writes some of its files."""
        save_hf_folder(target, self.hf_folder, self.export(), dtype, group=dist.group.WORLD, quantization=quantization)

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Stream the full weights by Hugging Face name, adapters merged (a collective)."""
        exported: Iterator[tuple[str, Tensor]] = self.bridge.export(*([] if self.lora is None else [self.lora.merge]))
        return exported

    def find_differences(self) -> list[str]:
        """Compare the model's weights with the Hugging Face folder: names, shapes, every bit. A collective."""
        source = FolderWeights(self.hf_folder)
        shape = model_shape(self.hf_config)
        expected = {name for name in source.names() if not is_mtp_weight(name, shape)}
        exported = set()
        differences = []
        for name, tensor in self.export():
            exported.add(name)
            if name not in expected:
                differences.append(f"{name} is not in {self.hf_folder}")
                continue
            # Exact if the model has the folder's dtype, or a wider one.
            original = source[name].to(tensor.dtype)
            if original.shape != tensor.shape:
                differences.append(f"{name} has shape {tuple(tensor.shape)}, expected {tuple(original.shape)}")
            elif not torch.equal(original, tensor.cpu()):
                largest = float((original.double() - tensor.cpu().double()).abs().max())
                differences.append(f"{name} differs by up to {largest:.1e}")
        # A tied folder may hold the output layer as well; the export has it as the embedding only.
        tied = {"lm_head.weight"} if self.hf_config.tie_word_embeddings else set()
        return differences + [f"{name} was never exported" for name in sorted(expected - exported - tied)]

    def measure_logprob_error(self) -> float:
        """Return the largest log-probability difference to transformers (fp32) on a random sequence. A collective."""
        from megatron_dppo.mcore.forward import forward_logprobs
        from megatron_dppo.mcore.head import OutputHead

        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, self.hf_config.vocab_size, (_CHECK_TOKENS + 1,), generator=generator).tolist()
        sample = to_training_sample(ids[:1], ids[1:], None, 0.0)
        head = OutputHead(self.models[-1], self.groups.tp, self.hf_config.vocab_size, 1.0)
        batch = pack([sample], RowShape(row_multiple=self.layout.row_multiple))
        logprobs = forward_logprobs(self.models, [batch], head)
        # The other stages report 0, so the maximum below is that of the last one.
        error = torch.zeros(1)
        if logprobs:  # on the last pipeline stage
            expected = _transformers_logprobs(self.hf_folder, sample.tokens, sample.labels)
            error[0] = (logprobs[0].cpu()[: sample.num_tokens] - expected).abs().max()
        if self.groups.world is not None:
            device = next(self.models[0].parameters()).device
            error = error.to(device)
            dist.all_reduce(error, dist.ReduceOp.MAX)
        return float(error)


def _read_lora_config(checkpoint: Path) -> LoraConfig:
    """Return the LoRA configuration of a checkpoint that training wrote; the default, without adapters, for others."""
    from megatron_dppo.mcore.checkpoint.folder import read_state

    file = checkpoint / "state.json"
    if not file.is_file():
        return LoraConfig()
    try:
        return LoraConfig.model_validate(read_state(checkpoint).get("config", {}).get("lora", {}))
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{file} has an unusable config.lora, which a run does not write") from error


def _transformers_logprobs(folder: Path, tokens: Tensor, labels: Tensor) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    with torch.no_grad():
        logp = model(tokens[None]).logits[0].float().log_softmax(-1)
    return logp.gather(-1, labels[:, None]).squeeze(-1)


@contextmanager
def open_converter(hf_folder: str, parallel: ParallelConfig, dtype: str) -> Iterator[Converter]:
    """Build the model of a Hugging Face folder on the layout of the running processes (torchrun, or one process).

    Raises:
        UserError: The folder is unusable, or the layout does not fit.
    """
    from megatron_dppo.mcore.shims import apply_shims

    platform = Platform.detect(int(os.environ.get("LOCAL_RANK", "0")))
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
