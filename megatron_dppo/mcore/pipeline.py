"""Layers of each pipeline stage, by Megatron's own functions."""

from collections.abc import Sequence

from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_dppo.config.layout import Layout
from megatron_dppo.errors import ConfigError


def stage_layers(config: TransformerConfig, pp_rank: int) -> list[range]:
    """Return the layers of a pipeline stage, from 0, one range for each of its model chunks."""
    table = config.pipeline_model_parallel_layout
    result = []
    for stage in range(config.virtual_pipeline_model_parallel_size or 1):
        if table is not None:
            # Megatron's function reads the number of virtual stages from its process groups, which may not exist yet.
            first = sum(
                table.layout[rank][chunk].count(LayerType.decoder)
                for chunk in range(stage + 1)
                for rank in range(pp_rank if chunk == stage else config.pipeline_model_parallel_size)
            )
            count = table.layout[pp_rank][stage].count(LayerType.decoder)
        else:
            vp_stage = stage if config.virtual_pipeline_model_parallel_size else None
            first = get_transformer_layer_offset(config, vp_stage, pp_rank)
            count = get_num_layers_to_build(config, vp_stage, pp_rank)
        result.append(range(first, first + count))
    return result


def check_pipeline_split(config: TransformerConfig, layout: Layout) -> None:
    """Check that the stages of a layout have every layer exactly once."""
    vpp = config.virtual_pipeline_model_parallel_size or 1
    if vpp != layout.vpp:
        raise ConfigError(
            f"model.transformer.pipeline_model_parallel_layout has {vpp} virtual stages for each of {layout.pp} "
            f"pipeline stages, expected {layout.vpp}. Fix: set parallel.virtual_pipeline_model_parallel_size = {vpp}"
        )
    try:
        stages = [stage_layers(config, rank) for rank in range(layout.pp)]
    except (AssertionError, ZeroDivisionError) as error:
        raise ConfigError(f"Megatron cannot split {config.num_layers} layers over {layout}: {error!r}") from error
    # A micro-batch passes the first chunks of all stages, then their second ones.
    order = [layer for chunk in range(vpp) for stage in stages for layer in stage[chunk]]
    if order != list(range(config.num_layers)):
        raise ConfigError(
            f"Megatron splits {config.num_layers} layers over {layout} as {_format(stages)}, which is not every layer "
            "once and in order. Fix: set model.transformer.pipeline_model_parallel_layout instead"
        )


def _format(stages: Sequence[Sequence[range]]) -> str:
    return " | ".join(" + ".join(f"{chunk.start}..{chunk.stop - 1}" for chunk in stage) for stage in stages)


def fullest_middle_stage(table: str | list[list[str]], pp: int) -> int:
    """Return the stage between the first and the last with the most layers in ``pipeline_model_parallel_layout``."""
    stages = PipelineParallelLayerLayout(table, pp).layout
    counts = [sum(chunk.count(LayerType.decoder) for chunk in stage) for stage in stages[1:-1]]
    return 1 + counts.index(max(counts))
