"""Log-probabilities of a checkpoint through Megatron, against those of the exported folder through transformers."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from megatron_dppo.config.io import load_config
from megatron_dppo.config.layout import resolve_layout
from megatron_dppo.data.training_samples import pack
from megatron_dppo.hf.folder import model_shape, read_hf_config
from megatron_dppo.hf.weight_files import FolderWeights
from megatron_dppo.parallel.platform import Platform
from megatron_dppo.types import TrainingSample


def compare(rank: int, world_size: int, run: str, reference: str) -> None:
    """Load the last checkpoint of a run on its own layout and compare one sequence within 1e-5."""
    from megatron_dppo.mcore.shims import apply_shims

    platform = Platform.detect(force_cpu=True)
    apply_shims(platform)
    from megatron_dppo.mcore.checkpoint.folder import checkpoints
    from megatron_dppo.mcore.model_parts import Placement
    from megatron_dppo.mcore.setup import initialize_megatron
    from megatron_dppo.run.policy_setup import trainer_from_config

    config = load_config(Path(run) / "config.toml")
    hf_config = read_hf_config(config.model.path)
    layout = resolve_layout(config.parallel, config.batch, world_size, model_shape(hf_config))
    groups = initialize_megatron(layout, platform, seed=1, timeout_minutes=3)
    placement = Placement(hf_config, layout, groups, platform)
    trainer = trainer_from_config(config, placement, FolderWeights(config.model.path))
    data = torch.load(reference)
    batch = pack([TrainingSample(**data["sample"])])

    def error() -> float:
        """Largest one over the tokens with a loss; the head computes no others."""
        return float((trainer.logprobs([batch])[0] - data["expected"])[batch.loss_mask].abs().max())

    assert error() > 1e-3, "training changed nothing, so this test would prove nothing"
    trainer.load(checkpoints(Path(run) / "checkpoints")[-1])
    assert error() < 1e-5
    dist.barrier()
