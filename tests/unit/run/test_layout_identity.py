"""Layout of a checkpoint: an uneven split of the layers belongs to it."""

from __future__ import annotations

from typing import Any

from megatron_dppo.config.layout import ModelShape, resolve_layout
from megatron_dppo.run.inputs import ModelInputs
from megatron_dppo.run.resume import layout_identity
from tests.unit.configs import config

SHAPE = ModelShape(
    family="qwen3",
    num_layers=7,
    num_attention_heads=4,
    num_query_groups=2,
    num_experts=None,
    hidden_size=64,
    vocab_size=128,
)


def identity(split: dict[str, Any], layers: int = 7) -> dict[str, Any]:
    made = config(parallel={"pipeline_model_parallel_size": 2}, model={"transformer": split})
    shape = SHAPE if layers == 7 else ModelShape(**{**vars(SHAPE), "num_layers": layers})
    layout = resolve_layout(made.parallel, made.batch, 2, shape, made.model.transformer)
    return layout_identity(made, ModelInputs(hf_config=None, num_parameters=1, tokenizer=None, layout=layout))


def test_another_split_of_the_layers_is_another_layout() -> None:
    first = identity({"num_layers_in_first_pipeline_stage": 4})
    last = identity({"num_layers_in_last_pipeline_stage": 4})
    assert first["layout"] != last["layout"] and first["layout"].startswith("tp1 pp2 cp1 dp1")
    assert first == identity({"num_layers_in_first_pipeline_stage": 4, "recompute_granularity": "full"})
    assert {**first, "layout": ""} == {**last, "layout": ""}


def test_an_even_pipeline_is_recorded_as_before() -> None:
    even = identity({"account_for_loss_in_pipeline_split": False}, layers=8)
    assert even["layout"] == "tp1 pp2 cp1 dp1 ep1 etp1"
