"""``model.provider = "megatron-bridge"``: which models are read, and what is refused by name before a run."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

import tests.shims  # noqa: F401
from megatron_dppo.errors import CheckpointError, ConfigError, ErrorCollector
from megatron_dppo.hf.families import get_family, mark_bridged
from megatron_dppo.hf.folder import model_shape, parameter_count, routing_shape
from megatron_dppo.mcore.megatron_bridge import provider_config
from megatron_dppo.parallel.platform import Platform
from megatron_dppo.policy.packed import attention_length
from megatron_dppo.setup.bridge_checks import bridge_problems
from megatron_dppo.setup.inputs import read_model
from megatron_dppo_plan.plan import PlannedModel
from tests.unit.configs import ONE_RANK, config

PROVIDED = {"provider": "megatron-bridge"}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 40}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}


def exaone() -> Any:
    """A model without a family here."""
    return AutoConfig.for_model("exaone4", **SIZES)


def test_a_model_without_a_family_is_read_with_megatron_bridge_alone() -> None:
    with pytest.raises(CheckpointError, match=r"'exaone4' has .*'megatron-bridge'"):
        model_shape(exaone())
    hf_config = mark_bridged(exaone())
    shape = model_shape(hf_config)
    assert (shape.family, shape.num_layers, shape.num_query_groups, shape.num_experts) == ("exaone4", 3, 2, None)
    assert routing_shape(hf_config) is None
    # Three layers of q and o (32 x 32), k and v (32 x 16) and an MLP of 3 x 32 x 48, and the output layer; half of the
    # pairs of 4 heads of 8, for scores and values.
    assert attention_length(hf_config) == pytest.approx((3 * (2048 + 1024 + 4608) + 32 * 40) / (3 * 64 / 2))
    # The norms: two of each layer over 32, those of q and k over 8, and the last one.
    assert parameter_count(hf_config) == 2 * 32 * 40 + 3 * (2048 + 1024 + 4608 + 2 * 32 + 2 * 8) + 32
    with pytest.raises(CheckpointError, match=r"no rules here"):
        get_family(hf_config).rope(hf_config)
    # A family that there is stays the one that checks config.json.
    known = mark_bridged(AutoConfig.for_model("olmoe", clip_qkv=8.0))
    with pytest.raises(CheckpointError, match=r"clip_qkv = 8.0"):
        model_shape(known)


def test_experts_are_counted_by_the_names_that_models_use() -> None:
    for key in ("num_experts", "n_routed_experts", "num_local_experts"):
        hf_config = mark_bridged(exaone())
        setattr(hf_config, key, 8)
        assert model_shape(hf_config).num_experts == 8


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("lora.rank", {"lora": {"rank": 4}}),
    ("train.router_replay", {"train": {"router_replay": "rollout"}}),
    ("train.layer_noise.std", {"train": {"layer_noise": {"std": 1e-5}}}),
    ("rollout.batch_invariant", {"rollout": {"batch_invariant": True, "dtype": "fp32"}, "model": {"dtype": "fp32"}}),
    ("distillation.teacher_path", {"distillation": {"teacher_path": "teacher"}}),
    ("model.reference_path", {"model": {"reference_path": "other"}, "loss": {"kl_coef": 0.1}}),
]


@pytest.mark.parametrize(("key", "sections"), REFUSED, ids=[key for key, _ in REFUSED])
def test_what_relies_on_the_rules_of_a_family_is_refused_by_name(key: str, sections: dict[str, Any]) -> None:
    given = config(**sections | {"model": sections.get("model", {}) | PROVIDED})
    (problem,) = bridge_problems(given, "qwen3_moe")
    assert str(problem).startswith(f"{key} = ") and "megatron-bridge" in str(problem)
    assert {str(problem).split(" = ")[0] for problem in bridge_problems(given, "exaone4")} == {key, "rollout.engine"}


def test_the_start_reports_them_with_the_folder(tmp_path: Path) -> None:
    hf_config = exaone()
    hf_config.architectures = ["Exaone4ForCausalLM"]
    hf_config.save_pretrained(tmp_path)
    problems = ErrorCollector()
    given = config(model=PROVIDED | {"path": str(tmp_path), "random_init": True}, distillation={"teacher_path": "t"})
    model = read_model(given, 1, problems)
    messages = "\n".join(map(str, problems.errors))
    assert model.layout is not None and model.complete is None
    for text in ("rollout.engine = 'local'", "model.random_init = True", "tokenizer"):
        assert text in messages, messages


def test_without_gpus_or_the_package_it_says_what_is_missing() -> None:
    settings, platform = config(model=PROVIDED).model, Platform.detect(force_cpu=True)
    with pytest.raises(ConfigError, match=r"'exaone4'.*Transformer Engine"):
        provider_config(mark_bridged(exaone()), settings, ONE_RANK, platform)
    if importlib.util.find_spec("megatron.bridge") is None:
        with pytest.raises(ConfigError, match="package megatron-bridge"):
            provider_config(AutoConfig.for_model("qwen3_moe"), settings, ONE_RANK, platform)


def test_plan_names_its_families() -> None:
    with pytest.raises(ConfigError, match=r"plan rehearses.*'megatron-bridge'.*--model.provider builtin"):
        PlannedModel.from_config(config(model=PROVIDED))
