"""Construction of a model without memory, to find what Megatron refuses before any process group exists."""

import torch
import torch.distributed as dist
from megatron.core.transformer import TransformerConfig
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_dppo.config.layout import Layout
from megatron_dppo.errors import ConfigError
from megatron_dppo.mcore.model import build_model
from megatron_dppo.mcore.setup import build_megatron_groups, seed_random_states, shutdown_megatron
from megatron_dppo.types.model_folder import HfConfig


def check_build(hf_config: HfConfig, config: TransformerConfig, layout: Layout) -> None:
    """Build the model of the first rank and of the last pipeline stage on the meta device, with fake process groups."""
    if dist.is_initialized():
        return
    ranks_per_stage = layout.world_size // layout.pp
    for pp_rank in sorted({0, layout.pp - 1}):
        try:
            _build(hf_config, config, layout, pp_rank, pp_rank * ranks_per_stage)
        except (ValueError, AssertionError, TypeError, NotImplementedError, RuntimeError, ImportError) as error:
            raise ConfigError(
                f"Megatron cannot build this model with layout {layout}: {type(error).__name__}: {error}. Fix: change "
                "model.transformer or [parallel]"
            ) from error
        finally:
            shutdown_megatron()


def _build(hf_config: HfConfig, config: TransformerConfig, layout: Layout, pp_rank: int, rank: int) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    build_megatron_groups(layout)
    seed_random_states(0)
    meta = torch.device("meta")
    with meta:
        build_model(config, hf_config, pp_rank, meta)
