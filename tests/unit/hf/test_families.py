"""Families of models: what is refused, the weights of real sizes, biases of routers in their own dtype."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    _yarn_get_concentration_factor,
    _yarn_get_mscale,
)
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_apply_mscale

from megatron_dppo.config.model import LoraTarget
from megatron_dppo.engines.local.engine import LocalEngine
from megatron_dppo.errors import CheckpointError, ConfigError
from megatron_dppo.export.hf_folder import save_hf_folder
from megatron_dppo.hf.families import FAMILIES, Family, adapter_modules, check_adapter_targets, get_family
from megatron_dppo.hf.families.family import Published
from megatron_dppo.hf.folder import (
    build_hf_model,
    copy_into_model,
    is_mtp_weight,
    model_shape,
    read_hf_config,
    routing_shape,
    stored_dtype,
    stream_folder,
    stream_model,
    weight_shapes,
)
from megatron_dppo.hf.weight_files import FolderWeights
from megatron_dppo.mcore import mapping
from megatron_dppo.policy.packed import attention_length
from megatron_dppo.setup.inputs import check_model, family_problems
from megatron_dppo.types import Prompt, SamplingParams
from megatron_dppo.weights.ipc import cast_for_sending
from megatron_dppo_engines.route_checks import check_routes
from megatron_dppo_plan.arithmetic import KvCachePlan, plan_kv_cache
from megatron_dppo_plan.machine import get_machine
from megatron_dppo_plan.models import count_parameters
from megatron_dppo_plan.step_time import served_model
from tests.distributed.families import TINY, family_config, in_float64
from tests.distributed.parity import hf_reference, samples
from tests.silent_tokenizer import SilentTokenizer
from tests.unit.configs import config as run_config

TOKENIZER = SilentTokenizer()
MODELS_PAGE = (Path(__file__).parents[3] / "docs/results/models.md").read_text(encoding="utf-8")
PUBLISHED = [(family, model) for family in FAMILIES.values() for model in family.published]


@pytest.mark.parametrize(("family", "model"), PUBLISHED, ids=[model.name for _, model in PUBLISHED])
def test_weights_of_real_sizes_map_completely_and_are_as_many_as_the_card_says(
    family: Family, model: Published
) -> None:
    hf_config = AutoConfig.for_model(family.model_type, **model.keys)
    shape, weights = model_shape(hf_config), weight_shapes(hf_config)
    mapped: list[str] = []
    last_expert = (shape.num_experts or 1) - 1
    for rule, layer, expert in mapping.parameters(shape, tied=False):
        own, names = rule.names(layer, expert)
        # The way back of those between differs by the digits alone; the largest models have 90,000.
        if expert in (0, 1, last_expert):
            assert mapping.find_rule(own, shape, tied=False) == (rule, layer, expert)
        mapped += names
    assert sorted(mapped) == sorted(weights)
    parameters, expert_parameters = count_parameters(hf_config)
    assert parameters / 1e9 == pytest.approx(model.billions, rel=0.003)
    if model.stated is not None:
        check_stated_sizes(model, hf_config, parameters, expert_parameters)


def check_stated_sizes(model: Published, hf_config: Any, parameters: int, expert_parameters: int) -> None:
    """Compare the weights, and those that a token uses, as ``plan`` counts them with what the authors state."""
    assert model.stated is not None
    total, active = model.stated
    assert parameters / 1e9 == pytest.approx(total, rel=0.03)
    cache = KvCachePlan(
        bytes_per_token=0,
        bytes_per_sequence=0,
        gpus_per_server=1,
        cache_bytes=None,
        tokens_in_flight=None,
        longest=1,
        weight_bytes=parameters,  # one byte a weight
    )
    counted = served_model(hf_config, parameters, expert_parameters, cache).active_bytes / 1e9
    embedding = hf_config.vocab_size * hf_config.hidden_size / 1e9
    # Authors count the input embedding and the output layer, one of them, or neither.
    choices = [counted + embedding, counted, counted - embedding]
    last_digit = 10.0 ** -len(f"{active:g}".partition(".")[2])
    assert min(abs(choice - active) for choice in choices) < 0.6 * last_digit
    cells = [f"{value:.2f}" for value in (parameters / 1e9, *choices)]
    assert f"| {model.name} | {total:g} | {active:g} | {' | '.join(cells)} |" in MODELS_PAGE


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"attention_bias": True}, "attention_bias = True.*supported: False"),
    ("llama", {"mlp_bias": True}, "mlp_bias = True"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act = 'gelu'.*supported: 'silu'"),
    ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config = 'fp8'.*convert"),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "'default' or 'llama3'"),
    (
        "llama",
        {"rope_parameters": FAMILIES["llama"].tiny["rope_parameters"] | {"high_freq_factor": 8.0}},
        r"rope_parameters.high_freq_factor = 8.0.*4.0 \(fixed",
    ),
    (
        "llama",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        "partial_rotary_factor = 0.5",
    ),
    (
        "llama",
        {"rope_parameters": FAMILIES["llama"].tiny["rope_parameters"] | {"partial_rotary_factor": 0.5}},
        "partial_rotary_factor = 0.5.*supported: 1.0",
    ),
    (
        "glm4_moe",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.5}},
        "partial_rotary_factor = 1.5.*up to 1.0",
    ),
    ("llama", {"sliding_window": 4096}, "sliding_window = 4096.*supported: None"),
    ("mistral", {"sliding_window": 0}, "sliding_window = 0.*a number of tokens"),
    ("mistral", {"layer_types": ["sliding_attention"] * 4}, "layer_types = .*supported: None"),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 64}, "use_sliding_window = True"),
    ("glm4_moe", {"norm_topk_prob": False}, "norm_topk_prob = False.*supported: True"),
    ("glm4_moe", {"num_experts_per_tok": 1}, "num_experts_per_tok = 1"),
    ("glm4_moe", {"n_group": 4, "topk_group": 2}, "topk_group = 2.*num_experts_per_tok / 2"),
    ("glm4_moe", {"n_group": 3}, "n_group = 3.*a divisor of the 8 experts"),
    ("moonlight", {"n_group": None}, "n_group = None.*a divisor"),
    ("moonlight", {"topk_group": None}, "topk_group = None.*at most the 1 groups"),
    ("glm4_moe", {"topk_group": 2}, "topk_group = 2.*at most the 1 groups"),
    ("olmoe", {"num_experts": 1}, "num_experts_per_tok = 2.*at most 1 experts"),
    ("deepseek_v3", {"head_dim": 16}, "head_dim = 16.*supported: 8"),
    ("deepseek_v3", {"rope_interleave": False}, "rope_interleave = False"),
    ("deepseek_v3", {"attention_bias": True}, "attention_bias = True"),
    ("deepseek_v3", {"topk_method": "greedy"}, "topk_method = 'greedy'"),
    ("glm4_moe", {"routed_scaling_factor": 0.0}, "routed_scaling_factor = 0.0.*a positive number"),
    ("llama", {"head_dim": 15}, "head_dim = 15.*an even number"),
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv = 8.0.*supported: None"),
    ("olmoe", {"head_dim": 32}, "head_dim = 32.*hidden_size / num_attention_heads"),
    ("mixtral", {"sliding_window": -1}, "sliding_window = -1.*a number of tokens"),
    ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1"),
    ("minimax_m2", {"shared_intermediate_size": 8}, "shared_intermediate_size = 8"),
    ("minimax_m2", {"qk_norm_type": "per_head"}, "qk_norm_type = 'per_head'"),
    ("minimax_m2", {"num_experts_per_tok": 1}, "num_experts_per_tok = 1"),
    ("gpt_oss", {"attention_bias": False}, "attention_bias = False.*supported: True"),
    ("gpt_oss", {"swiglu_alpha": 1.0}, "swiglu_alpha = 1.0.*supported: 1.702"),
    ("gpt_oss", {"swiglu_limit": 0.0}, "swiglu_limit = 0.0.*a positive number"),
    ("gpt_oss", {"experts_per_token": 4}, "experts_per_token = 4.*supported: 2"),
    ("gpt_oss", {"sliding_window": None}, "sliding_window = None.*a number of tokens"),
    ("gpt_oss", {"layer_types": ["sliding_attention"]}, "layer_types = .*each of the 4 layers"),
    ("gpt_oss", {"layer_types": ["chunked_attention"] * 4}, "layer_types = .*'full_attention' or 'sliding_attention'"),
    ("gpt_oss", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config = 'fp8'.*convert"),
    (
        "gpt_oss",
        {"rope_parameters": FAMILIES["gpt_oss"].tiny["rope_parameters"] | {"mscale": 1.0}},
        "rope_parameters.mscale = 1.0",
    ),
    ("glm4_moe_lite", {"first_k_dense_replace": 3}, "first_k_dense_replace = 3.*supported: 1"),
    ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense"] * 2}, "mlp_layer_types = .*dense layers before"),
    ("qwen3_next", {"attention_bias": True}, "attention_bias = True"),
    ("qwen3_next", {"layer_types": ["linear_attention"] * 4}, "layer_types = .*at least one layer of 'full_attention'"),
    (
        "qwen3_next",
        {"layer_types": ["linear_attention", "full_attention", "sliding_attention", "full_attention"]},
        r"layer_types = \['sliding_attention'\].*'full_attention' or 'linear_attention'",
    ),
    ("qwen3_next", {"linear_num_value_heads": 3}, "linear_num_value_heads = 3.*multiple of the 4 key heads"),
    ("qwen3_next", {"linear_key_head_dim": 0}, "linear_key_head_dim = 0"),
    ("qwen3_5_moe_text", {"attn_output_gate": False}, "attn_output_gate = False.*supported: True"),
    ("qwen3_5_moe_text", {"use_sliding_window": True}, "use_sliding_window = True"),
    ("qwen3_5_moe_text", {"norm_topk_prob": False}, "norm_topk_prob = False.*supported: True"),
    ("qwen3_5_moe_text", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
    ("qwen3_5_moe_text", {"mlp_only_layers": [1]}, r"mlp_only_layers = \[1\]"),
    ("qwen3_5_moe_text", {"output_gate_type": "sigmoid"}, "output_gate_type = 'sigmoid'.*'silu' or 'swish'"),
    ("qwen3_5_moe_text", {"qkv_bias": True}, "qkv_bias = True"),
    ("qwen3_5_moe_text", {"layer_scale": True}, "layer_scale = True"),
    ("qwen3_next", {"dual_chunk_attention_config": {}}, "dual_chunk_attention_config = {}"),
    ("qwen3_next", {"full_attention_interval": 2}, "full_attention_interval = 2.*that of layer_types"),
    ("qwen3_5_moe_text", {"full_attention_interval": 0}, "full_attention_interval = 0"),
    ("qwen3_5_moe_text", {"layer_types": ["full_attention"]}, "layer_types = .*each of the 4 layers"),
    (
        "deepseek_v3",
        {"rope_parameters": FAMILIES["deepseek_v3"].tiny["rope_parameters"] | {"attention_factor": 0.5}},
        "rope_parameters.attention_factor = 0.5",
    ),
]


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize("factor", [1.0, 4.0, 40.0])
@pytest.mark.parametrize("mscale_all_dim", [None, 0, 0.7, 1.0])
@pytest.mark.parametrize("mscale", [None, 0, 0.7, 1.0])
def test_yarn_scales_as_transformers_does_or_is_refused(
    mscale: float | None, mscale_all_dim: float | None, factor: float
) -> None:
    hf_config = family_config("deepseek_v3")
    values = YARN | {"factor": factor, "mscale": mscale, "mscale_all_dim": mscale_all_dim}
    # Servers take the default 1 for a missing mscale, and use it without mscale_all_dim.
    agree = bool(mscale) == bool(mscale_all_dim) or (mscale == 1.0 and not mscale_all_dim)
    hf_config.rope_parameters = {key: value for key, value in values.items() if value is not None}
    if not agree:
        with pytest.raises(CheckpointError, match=r"rope_parameters.mscale = .*together with mscale_all_dim"):
            get_family(hf_config).rope(hf_config)
        return
    fields = get_family(hf_config).fields(hf_config, model_shape(hf_config))
    rotary = _yarn_get_concentration_factor(factor, fields["mscale"], fields["mscale_all_dim"])
    assert rotary == pytest.approx(ROPE_INIT_FUNCTIONS["yarn"](hf_config, torch.device("cpu"))[1], rel=1e-12)
    softmax = _yarn_get_mscale(factor, fields["mscale_all_dim"]) ** 2
    assert softmax == pytest.approx(yarn_apply_mscale(hf_config.rope_parameters, 1.0), rel=1e-12)


@pytest.mark.parametrize("value", [None, "4", -1, math.inf, math.nan, [2.0], 0])
@pytest.mark.parametrize("key", ["factor", "original_max_position_embeddings", "rope_theta"])
def test_a_rotary_parameter_that_is_no_positive_number_is_refused(key: str, value: Any) -> None:
    hf_config = family_config("deepseek_v3")
    hf_config.rope_parameters = YARN | {key: value}
    if key == "rope_theta":
        hf_config.rope_theta = value
    with pytest.raises(CheckpointError, match=rf"rope_parameters.{key} = .*a positive number"):
        get_family(hf_config).rope(hf_config)


@pytest.mark.parametrize(("family", "change", "message"), REFUSED)
def test_what_a_family_has_not_is_refused_by_name(family: str, change: dict[str, Any], message: str) -> None:
    hf_config = family_config(family)
    for key, value in change.items():
        setattr(hf_config, key, value)
    with pytest.raises(CheckpointError, match=message):
        shape = model_shape(hf_config)
        get_family(hf_config).fields(hf_config, shape)
        get_family(hf_config).rope(hf_config)


def test_an_unknown_architecture_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(CheckpointError, match=f"'gpt2' has no mapping.*{'.*'.join(FAMILIES)}"):
        model_shape(AutoConfig.for_model("gpt2"))


def test_layers_for_further_tokens_are_left_out_and_no_others() -> None:
    hf_config = family_config("glm4_moe")
    hf_config.num_nextn_predict_layers = 1
    shape = model_shape(hf_config)
    layers = shape.num_layers
    assert is_mtp_weight(f"model.layers.{layers}.eh_proj.weight", shape)
    for name in (f"model.layers.{layers + 1}.eh_proj.weight", f"model.layers.{layers - 1}.odd", "model.norm.weight"):
        assert not is_mtp_weight(name, shape)
    hf_config.num_nextn_predict_layers = 0
    assert not is_mtp_weight(f"model.layers.{layers}.eh_proj.weight", model_shape(hf_config))


def test_a_written_folder_of_every_family_is_what_transformers_loads(tmp_path: Path) -> None:
    tokens = samples()[3].tokens[None]
    for family in TINY:
        source = hf_reference(False, family=family)
        source.save_pretrained(tmp_path / "in")
        save_hf_folder(tmp_path / "out", tmp_path / "in", stream_model(source), torch.float32)
        assert FolderWeights(tmp_path / "out").names() == FolderWeights(tmp_path / "in").names(), family
        loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
        assert not any(report.values()), (family, report)
        for parameter in loaded.parameters():
            # Kernels may round by the address of a weight, and those of a mapped file are not aligned.
            parameter.data = parameter.data.clone()
        for name, module in loaded.named_modules():
            if name.endswith(("q_a_layernorm", "kv_a_layernorm")):  # 1e-6 in transformers (docs/models.md)
                module.variance_epsilon = source.config.rms_norm_eps
        assert torch.equal(loaded(tokens).logits, source(tokens).logits), family
        copied = build_hf_model(read_hf_config(tmp_path / "out"), torch.float32)
        copy_into_model(copied, stream_folder(tmp_path / "out", copied.config))
        assert torch.equal(copied(tokens).logits, source(tokens).logits), family


def test_kimi_k2_is_deepseek_v3_and_its_code_is_not_run(tmp_path: Path) -> None:
    model = hf_reference(False, family="kimi_k2")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    auto_map = {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}
    # As published: keys of transformers 4 for the rotary embedding.
    rope = dict(config.pop("rope_parameters"))
    published = {"model_type": "kimi_k2", "auto_map": auto_map, "rope_theta": rope.pop("rope_theta")}
    published["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
    (tmp_path / "config.json").write_text(json.dumps(config | published))
    (tmp_path / "configuration_deepseek.py").write_text("raise SystemExit('remote code ran')")
    read = read_hf_config(tmp_path)
    assert model_shape(read) == model_shape(model.config)
    assert read.rope_parameters == {**model.config.rope_parameters, "type": "yarn"} and not hasattr(read, "auto_map")
    copied = build_hf_model(read, torch.float32)
    copy_into_model(copied, stream_folder(tmp_path, read))
    tokens = samples()[3].tokens[None]
    assert torch.equal(copied(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3", "minimax_m2", "qwen3_next"])
def test_biases_of_routers_and_decays_stay_fp32_in_the_engine_the_folder_and_the_sync(
    family: str, tmp_path: Path
) -> None:
    source = hf_reference(False, family=family)
    in_fp32 = ("e_score_correction_bias", "A_log")
    biases = {name: value for name, value in stream_model(source) if name.endswith(in_fp32)}
    assert len(biases) in (3, 4) and all(not torch.equal(b, b.bfloat16().float()) for b in biases.values())
    model = build_hf_model(source.config, torch.bfloat16)
    copy_into_model(model, stream_model(source))
    sent = dict(cast_for_sending(stream_model(source), torch.bfloat16, tied=False))
    folder = tmp_path / "in"
    source.save_pretrained(folder)
    save_hf_folder(tmp_path / "out", folder, stream_model(source), torch.bfloat16)
    written = FolderWeights(tmp_path / "out")
    for name, bias in biases.items():
        for result in (dict(stream_model(model))[name], sent[name], written[name]):
            assert result.dtype == torch.float32 and torch.equal(result, bias), name
    others = [name for name in sent if name not in biases]
    assert {sent[name].dtype for name in others} == {written[name].dtype for name in others} == {torch.bfloat16}
    assert stored_dtype("lm_head.weight", torch.float16) == torch.float16
    with pytest.raises(CheckpointError, match=r"Missing weights.*(e_score|A_log)"):
        copy_into_model(model, ((n, w) for n, w in stream_model(source) if n not in biases))
    second = build_hf_model(read_hf_config(tmp_path / "out"), torch.bfloat16)
    copy_into_model(second, written.stream(tied=False))
    tokens = samples()[3].tokens[None]
    assert torch.equal(second(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize(
    "family",
    [
        *("llama", "glm4_moe", "deepseek_v3", "moonlight", "olmoe", "mixtral", "glm4_moe_lite"),
        *("qwen3_next", "qwen3_5_moe_text", "gpt_oss"),
    ],
)
def test_the_local_engine_samples_what_float64_scores_and_says_its_routes(family: str) -> None:
    model = hf_reference(False, family=family)
    engine = LocalEngine(model.config, TOKENIZER, dtype=torch.float32, device=torch.device("cpu"))
    engine.update_weights(stream_model(model), 0)
    shape = routing_shape(model.config, weights=True)
    routed = shape is not None
    prompts = [Prompt(prompt_id="", text="", token_ids=(5 + i, 9, 30 + i)[: 1 + i % 3], label="") for i in range(6)]
    if shape is not None:  # longer than the 64 tokens of a chunk of linear attention
        prompts.append(Prompt(prompt_id="", text="", token_ids=tuple(range(7, 77)), label=""))
    params = SamplingParams(max_new_tokens=9, seed=2, routed_experts=routed, router_weights=routed)
    answers, exact = engine.generate(prompts, params), in_float64(model)
    engine.close()
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = torch.tensor([*prompt.token_ids, *answer.token_ids.tolist()])
        with torch.no_grad():
            logprobs = exact(tokens[None, :-1]).logits[0].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        assert answer.logprobs is not None
        assert (answer.logprobs - logprobs[-len(answer.logprobs) :]).abs().max() < 1e-5
        if shape is not None:
            assert answer.routed_experts is not None
            check_routes(answer.routed_experts, shape, tokens=len(tokens) - 1, request="own")
            # Without normalization the sum is at most the scale.
            wrong = replace(shape, weights_scale=9.0 if shape.weights_add_to_one else 1e-3)
            with pytest.raises(ValueError, match="add up to"):
                check_routes(answer.routed_experts, wrong, tokens=len(tokens) - 1, request="")


def test_latent_attention_caches_latents_and_costs_what_its_matrices_do() -> None:
    hf_config = AutoConfig.for_model("deepseek_v3")
    config = run_config(rollout={"engine": "sglang", "dtype": "bf16", "sglang": {"tp-size": 8}})
    planned = plan_kv_cache(config, hf_config, 0, get_machine("h200"))
    assert planned.bytes_per_token == 61 * (512 + 64) * 2
    assert (
        planned.cache_bytes is not None and planned.tokens_in_flight == planned.cache_bytes // planned.bytes_per_token
    )  # on each GPU
    # Every weight but the embedding, the norms and the experts that are not chosen is one multiplication.
    shapes = {n: s for n, s in weight_shapes(hf_config).items() if len(s) == 2 and "embed_tokens" not in n}
    total = sum(math.prod(s) * (8 / 256 if ".experts." in n else 1) for n, s in shapes.items())
    of_pair = 61 * 128 * (128 + 64 + 128)
    assert attention_length(hf_config) == pytest.approx(total / (of_pair / 2), rel=1e-9)


@pytest.mark.parametrize(
    ("family", "section", "message"),
    [
        ("deepseek_v3", {"rollout": {"batch_invariant": True}}, "batch_invariant = True.*'deepseek_v3'.*kernel"),
        ("gpt_oss", {"rollout": {"batch_invariant": True}}, "batch_invariant = True.*'gpt_oss'.*windows nor sinks"),
        (
            "mistral_window",
            {"rollout": {"batch_invariant": True}},
            "batch_invariant = True.*'mistral'.*windows nor sinks",
        ),
        (
            "mistral_window",
            {"rollout": {"engine": "sglang"}},
            "engine = 'sglang'.*'mistral'.*without their sliding window",
        ),
        ("gpt_oss", {"rollout": {"engine": "vllm"}}, "engine = 'vllm'.*'gpt_oss'.*old experts and sinks"),
        ("gpt_oss", {"lora": {"rank": 4}}, "lora.target_modules = .*'gpt_oss'.*experts.*Use q_proj"),
        ("glm4_moe", {"rollout": {"perturbation": {"router_noise": 0.5}}}, "router_noise = 0.5.*'glm4_moe'.*softmax"),
    ],
)
def test_what_goes_with_no_model_of_a_family_is_refused(family: str, section: Any, message: str) -> None:
    shape = model_shape(family_config(family))
    config = run_config(**section)
    plain = run_config()
    (result,) = family_problems(config.rollout, config.lora, shape)
    assert re.search(message, str(result))
    assert not list(family_problems(plain.rollout, plain.lora, shape))
    assert not list(family_problems(config.rollout, config.lora, model_shape(family_config("llama"))))


@pytest.mark.parametrize("family", TINY)
def test_adapter_targets_are_the_linear_layers_of_attention_and_mlps(family: str) -> None:
    """All matrices of transformers' modules but embeddings, output, routers and gates."""
    hf_config = family_config(family)
    shapes = {name: shape for name, shape in weight_shapes(hf_config).items() if len(shape) == 2}
    modules = {name.split(".")[-2] for name in shapes}
    modules -= {"embed_tokens", "lm_head", "gate", "router", "shared_expert_gate"}
    shape = model_shape(hf_config)
    assert modules == set(adapter_modules(shape))
    check_adapter_targets(sorted(modules), shape)
    missing = sorted(set(get_args(LoraTarget)) - modules)
    with pytest.raises(ConfigError, match=f"{shape.family} model has {missing[0]}"):
        check_adapter_targets([*sorted(modules), missing[0]], shape)


def test_targets_that_a_model_lacks_are_refused_before_a_run(tmp_path: Path) -> None:
    model = hf_reference(False, family="mixtral")
    model.save_pretrained(tmp_path)
    shape, path = model_shape(model.config), {"model": {"path": str(tmp_path)}}
    named = {"rank": 4, "target_modules": ["q_proj", "w1", "w2", "w3"]}
    check_model(run_config(lora=named, **path), model.config, shape)
    with pytest.raises(ConfigError, match=r"has gate_proj, up_proj, down_proj\. Fix: .*o_proj, w1, w2, w3"):
        check_model(run_config(lora={"rank": 4}, **path), model.config, shape)
