"""Memory of the local engine on each rank, for ``plan`` and ``train --dry-run``."""

from __future__ import annotations

import math
from typing import NamedTuple

from megatron_dppo.config.data import DataConfig
from megatron_dppo.config.layout import Layout
from megatron_dppo.config.rollout import RolloutConfig
from megatron_dppo.engines.local.batches import BatchMemory
from megatron_dppo.parallel.platform import DTYPES
from megatron_dppo.types.model_folder import HfConfig


class LocalEngineMemory(NamedTuple):
    """Bytes of the local engine on each rank's device. Zeros with servers, or without a copy of the weights."""

    weights: int
    batch: int
    """Bytes of attention scores, activations and cache of the largest batch."""

    @classmethod
    def from_config(
        cls,
        rollout: RolloutConfig,
        data: DataConfig,
        hf_config: HfConfig,
        parameters: int,
        layout: Layout,
        longest_prompt: int | None = None,
    ) -> LocalEngineMemory:
        """Return the memory that the local engine takes beside training."""
        if rollout.engine != "local" or rollout.batch_invariant:
            return cls(0, 0)
        size = DTYPES[rollout.dtype].itemsize
        prompts = math.ceil(rollout.prompts_per_step / layout.dp)
        values = BatchMemory.from_config(hf_config).max_batch_values(
            rows=prompts * rollout.samples_per_prompt,
            prompts=prompts,
            width=longest_prompt or data.max_prompt_tokens,
            limit=rollout.max_new_tokens,
        )
        return cls(parameters * size, values * size)
