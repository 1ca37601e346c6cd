"""Layers of pipeline stages: Megatron's counts by hand, splits that it gets wrong, and the splits that we suggest."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_dppo.config.layout import pipeline_split
from megatron_dppo.config.model import ModelConfig
from megatron_dppo.errors import ConfigError
from megatron_dppo.mcore.pipeline import check_pipeline_split, fullest_middle_stage, stage_layers
from megatron_dppo.mcore.shims import apply_shims
from megatron_dppo.parallel.platform import Platform
from tests.distributed.parity import hf_config
from tests.unit.configs import ONE_RANK

FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
TABLE = "pipeline_model_parallel_layout"


@pytest.fixture(autouse=True, scope="module")
def on_cpu() -> None:
    apply_shims(Platform.detect(force_cpu=True))


def layout_of(pp: int, vpp: int) -> Any:
    return SimpleNamespace(pp=pp, vpp=vpp)


def megatron_config(layers: int, pp: int, vpp: int, split: dict[str, Any]) -> Any:
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=layers,
        hidden_size=8,
        num_attention_heads=2,
        pipeline_dtype=torch.float32,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        overlap_p2p_comm=vpp > 1,
        batch_p2p_comm=vpp == 1,
        **split,
    )


@pytest.mark.parametrize(
    ("layers", "pp", "vpp", "split", "counts"),
    [
        # Qwen3-235B-A22B, DeepSeek-V3 and Moonlight-16B.
        (94, 4, 1, {LAST: 22}, [[24], [24], [24], [22]]),
        (94, 8, 1, {FIRST: 11, LAST: 11}, [[11], *[[12]] * 6, [11]]),
        (94, 4, 2, {LAST: 22}, [[12, 12], [12, 12], [12, 12], [11, 11]]),
        (61, 4, 1, {FIRST: 13}, [[13], [16], [16], [16]]),
        (27, 2, 1, {FIRST: 14}, [[14], [13]]),
        (61, 2, 1, {LOSS: True}, [[31], [30]]),
        (94, 4, 1, {EMBEDDING: True, LOSS: True}, [[23], [24], [24], [23]]),
        (94, 4, 3, {EMBEDDING: True, LOSS: True}, [[7, 8, 8], [8, 8, 8], [8, 8, 8], [8, 8, 7]]),
        (7, 2, 2, {TABLE: "Et|tt|ttt|tL"}, [[1, 3], [2, 1]]),
        (6, 3, 1, {TABLE: [["embedding"], ["decoder"] * 4, ["decoder", "decoder", "loss"]]}, [[0], [4], [2]]),
    ],
)
def test_stages_have_the_layers_that_the_split_names(
    layers: int, pp: int, vpp: int, split: dict[str, Any], counts: list[list[int]]
) -> None:
    made = megatron_config(layers, pp, vpp, split)
    check_pipeline_split(made, layout_of(pp, vpp))
    stages = [stage_layers(made, rank) for rank in range(pp)]
    assert [[len(chunk) for chunk in stage] for stage in stages] == counts
    # Chunk by chunk over all stages, the order in which a micro-batch passes them.
    starts = [stages[rank][chunk].start for chunk in range(vpp) for rank in range(pp)]
    flat = [counts[rank][chunk] for chunk in range(vpp) for rank in range(pp)]
    assert starts == [sum(flat[:i]) for i in range(len(flat))]


@pytest.mark.parametrize(
    ("layers", "pp", "split"),
    [(3, 1, {FIRST: 1, LAST: 1}), (3, 3, {FIRST: 2, LAST: 2})],
)
def test_splits_that_megatron_accepts_and_builds_wrongly_are_refused(
    layers: int, pp: int, split: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=r"every layer once|cannot split"):
        check_pipeline_split(megatron_config(layers, pp, 1, split), layout_of(pp, 1))


def test_a_table_of_more_virtual_stages_than_the_layout_is_refused() -> None:
    made = megatron_config(7, 2, 2, {TABLE: "Et|tt|ttt|tL"})
    with pytest.raises(ConfigError, match=r"parallel\.virtual_pipeline_model_parallel_size = 2"):
        check_pipeline_split(made, layout_of(2, 1))


@pytest.mark.parametrize("layers", [4, 27, 32, 61, 94])
def test_suggested_splits_work_and_are_even(layers: int) -> None:
    for pp in (1, 2, 3, 4, 6, 8, 16):
        for vpp in (1, 2, 3) if pp > 1 else (1,):
            if layers < pp * vpp:
                continue
            split = pipeline_split(layers, pp, vpp)
            made = megatron_config(layers, pp, vpp, split)
            check_pipeline_split(made, layout_of(pp, vpp))
            largest = max(len(chunk) for rank in range(pp) for chunk in stage_layers(made, rank))
            assert largest == -(-layers // (pp * vpp)), (layers, pp, split)


def test_the_fullest_middle_stage_of_a_table() -> None:
    assert fullest_middle_stage("Ett|tt|tttt|tt|ttL", 5) == 2
    assert fullest_middle_stage("E|tt|t|t|ttt|tt|t|L", 4) == 1


def test_transformer_config_checks_the_split() -> None:
    from megatron_dppo.mcore.model import transformer_config

    platform = Platform.detect(force_cpu=True)
    layout = replace(ONE_RANK, world_size=2, pp=2)
    model = ModelConfig.model_validate({"path": "m", "dtype": "fp32", "transformer": {TABLE: "Et|t|t|tL"}})
    with pytest.raises(ConfigError, match="has 2 virtual stages"):
        transformer_config(hf_config(False), model, layout, platform)
