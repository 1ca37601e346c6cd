"""Model and layout of a checkpoint: every family has an identity, and an uneven split of the layers belongs to it."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_dppo.config.layout import ModelShape, resolve_layout
from megatron_dppo.config.model import LoraConfig
from megatron_dppo.hf.families import FAMILIES
from megatron_dppo.setup.inputs import ModelInputs
from megatron_dppo.setup.resume import layout_identity, run_identity
from tests.distributed.families import family_config
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
    return layout_identity(
        made.model, made.parallel, ModelInputs(hf_config=None, num_parameters=1, tokenizer=None, layout=layout)
    )


def test_another_split_of_the_layers_is_another_layout() -> None:
    first = identity({"num_layers_in_first_pipeline_stage": 4})
    last = identity({"num_layers_in_last_pipeline_stage": 4})
    assert first["layout"] != last["layout"] and first["layout"].startswith("tp1 pp2 cp1 dp1")
    assert first == identity({"num_layers_in_first_pipeline_stage": 4, "recompute_granularity": "full"})
    assert {**first, "layout": ""} == {**last, "layout": ""}


def test_an_even_pipeline_is_recorded_as_before() -> None:
    even = identity({"account_for_loss_in_pipeline_split": False}, layers=8)
    assert even["layout"] == "tp1 pp2 cp1 dp1 ep1 etp1"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_of_a_checkpoint_is_plain_json_for_every_family(family: str) -> None:
    def identity(**keys: Any) -> Any:
        hf_config = family_config(family)
        vars(hf_config).update(keys)
        prompts = SimpleNamespace(fingerprint=lambda: "prompts")
        inputs: Any = SimpleNamespace(hf_config=hf_config, train_prompts=prompts)
        return run_identity(LoraConfig(), 1, inputs)["model"]

    assert identity() == json.loads(json.dumps(identity())) and identity()["family"] == family
    if identity()["linear"] is not None:
        assert identity() != identity(linear_value_head_dim=24), "the sizes of linear attention belong to it"
