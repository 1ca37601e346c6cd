"""The current weights as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron_dppo.config.schema import Config
from megatron_dppo.errors import DiskError
from megatron_dppo.files.disk import disk_errors, require_space
from megatron_dppo.hf import drain, save_hf_folder
from megatron_dppo.parallel.objects import agreed
from megatron_dppo.run.inputs import Inputs

if TYPE_CHECKING:
    from megatron_dppo.policy.trainer import PolicyTrainer


def export_hf(trainer: PolicyTrainer, inputs: Inputs, config: Config, target: Path, dtype: torch.dtype) -> None:
    """Write the current weights as a Hugging Face folder; a collective, rank 0 writes.

    Raises:
        DiskError: on all ranks, when it cannot be written.
    """
    agreed(lambda: require_space(target, inputs.num_parameters * dtype.itemsize, "the export"), trainer.groups.world)
    weights, failed = trainer.export_weights(), None
    if dist.get_rank() == 0:
        try:
            with disk_errors(target, "the weights"):
                save_hf_folder(target, config.model.path, weights, dtype)
        except DiskError as error:
            failed = error
    drain(weights)  # also what is left of them on rank 0: the other ranks gather to the end

    def check() -> None:
        if failed is not None:
            raise failed

    agreed(check, trainer.groups.world)
