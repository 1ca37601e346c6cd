"""A program: our model of Transformer Engine's layers, built by its real Python on a stubbed C extension.

    python -m tests.unit.te_names FOLDER '[{"model": "qwen3_moe", "tp": 1, ...}, ...]'

FOLDER holds the unpacked wheel. Nothing is computed: CUDA is ``meta``, the process groups are fake. Each parameter's
name, shape, dtype and marks are held against the mapping to Hugging Face. Prints a JSON object a case, with ``wrong``
empty when all is right, and at the end what Megatron asks Transformer Engine's functions that they do not take.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.unit.te_stub import CudaIsMeta, pretend_cuda, stub_transformer_engine

SIZES: dict[str, Any] = dict(
    vocab_size=1000,
    hidden_size=128,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    intermediate_size=256,
    max_position_embeddings=512,
    tie_word_embeddings=False,
)
EXPERTS: dict[str, Any] = dict(moe_intermediate_size=64, num_experts=8, num_experts_per_tok=2)


SIGMOID: dict[str, Any] = dict(
    moe_intermediate_size=64,
    n_routed_experts=8,
    n_shared_experts=1,
    num_experts_per_tok=2,
    first_k_dense_replace=1,
    n_group=1,
    topk_group=1,
    num_mtp_layers=0,
)
MARK = "tensor_model_parallel"
LATENT: dict[str, Any] = dict(kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32)
LINEAR: dict[str, Any] = dict(
    shared_expert_intermediate_size=64,
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    linear_key_head_dim=16,
    linear_value_head_dim=32,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
)


def hf_config(model: str) -> Any:
    import transformers

    if model == "qwen3_moe":
        return transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=32, norm_topk_prob=True, decoder_sparse_step=2)
    if model == "qwen3":
        return transformers.Qwen3Config(**SIZES, head_dim=32)
    if model == "llama":
        return transformers.LlamaConfig(**SIZES)
    if model == "glm4_moe":
        return transformers.Glm4MoeConfig(**SIZES, **SIGMOID, head_dim=32, attention_bias=True)
    if model in ("deepseek_v3", "moonlight"):
        sizes = SIZES | SIGMOID | LATENT | {"num_key_value_heads": SIZES["num_attention_heads"]}
        return transformers.DeepseekV3Config(**sizes, q_lora_rank=64 if model == "deepseek_v3" else None)
    if model == "olmoe":
        return transformers.OlmoeConfig(**SIZES, num_experts=8, num_experts_per_tok=2)
    if model in ("qwen3_next", "qwen3_5"):
        linear = LINEAR | EXPERTS | {"head_dim": 32}
        if model == "qwen3_next":
            return transformers.Qwen3NextConfig(**SIZES, **linear, decoder_sparse_step=1, mlp_only_layers=[1])
        return transformers.AutoConfig.for_model("qwen3_5_moe_text", **SIZES, **linear)
    if model == "gpt_oss":
        return transformers.GptOssConfig(**SIZES, head_dim=32, num_local_experts=8, num_experts_per_tok=2)
    if model == "mixtral":
        return transformers.MixtralConfig(**SIZES, num_local_experts=8)
    return transformers.Qwen2MoeConfig(**SIZES, **EXPERTS, shared_expert_intermediate_size=64, qkv_bias=True)


def build(case: dict[str, Any]) -> tuple[Any, Any, Any]:
    """(layout, HF config, chunks) of rank 0."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron_dppo.config.layout import resolve_parallel
    from megatron_dppo.config.model import ModelConfig, ParallelConfig
    from megatron_dppo.hf.folder import model_shape
    from megatron_dppo.mcore import setup
    from megatron_dppo.mcore.model import build_model, transformer_config
    from megatron_dppo.parallel.platform import Platform

    world = case["world"]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    platform, config = Platform(torch.device("cuda", 0), "nccl"), hf_config(case["model"])
    parallel = ParallelConfig(
        tensor_model_parallel_size=case.get("tp", 1),
        expert_model_parallel_size=case.get("ep", 1),
        pipeline_model_parallel_size=case.get("pp", 1),
        context_parallel_size=case.get("cp", 1),
    )
    layout = resolve_parallel(parallel, world, model_shape(config))
    setup.initialize_megatron(layout, platform, seed=1, timeout_minutes=5)
    model = ModelConfig(path="unused", dtype="bf16", transformer=case.get("transformer", {}))
    megatron = transformer_config(config, model, layout, platform)
    with CudaIsMeta():
        return layout, config, build_model(megatron, config, 0, platform.device)


def wrong_parameters(layout: Any, config: Any, chunks: Any) -> Iterator[str]:
    """Return the differences from the shard that the mapping makes of the Hugging Face model."""
    from transformers import AutoModelForCausalLM

    from megatron_dppo.hf.folder import model_shape, stream_model
    from megatron_dppo.mcore import mapping
    from megatron_dppo.mcore.bridge import global_names
    from megatron_dppo.mcore.model import padded_vocab_size

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        full = {name: torch.empty(tensor.shape) for name, tensor in stream_model(model)}
    shape = model_shape(config)
    for name, parameter in global_names(chunks, 0).items():
        try:
            rule, layer, expert = mapping.find_rule(name, shape, config.tie_word_embeddings)
        except KeyError:
            yield f"{name}: no rule maps it"
            continue
        whole = rule.join([full.pop(n) for n in rule.names(layer, expert)[1]], shape)
        if rule.padded:
            whole = mapping.pad_vocabulary(whole, padded_vocab_size(shape.vocab_size, layout.tp))
        expected = mapping.shard(rule, whole, 0, layout.etp if rule.is_expert else layout.tp, shape).shape
        if parameter.shape != expected:
            yield f"{name}: {tuple(parameter.shape)}, expected {tuple(expected)}"
        # The router's weight is the one that Megatron makes on the CPU, and keeps in fp32 if asked to.
        # Transformer Engine makes sinks in fp32, which become bf16 with the model.
        is_fp32 = name.endswith(("router.expert_bias", ".A_log", ".softmax_offset"))
        dtype = torch.float32 if is_fp32 else torch.bfloat16
        if parameter.dtype != dtype or parameter.device.type != "meta":
            yield f"{name}: {parameter.dtype} on {parameter.device}"
        if rule.is_expert and getattr(parameter, "allreduce", True) != (layout.ep == 1):
            yield f"{name}: allreduce = {getattr(parameter, 'allreduce', None)} with ep = {layout.ep}"
        # The gradient norm counts a parameter without this mark on the first tensor-parallel rank alone.
        is_split, is_marked = rule.is_expert or expected != whole.shape, getattr(parameter, MARK, False)
        if layout.tp > 1 and is_marked != is_split:
            yield f"{name}: {MARK} = {is_marked}, expected {is_split}"
    if layout.pp == layout.ep == 1:
        yield from (f"{name}: of Hugging Face, nowhere in the model" for name in full)


def fusions(chunks: Any) -> dict[str, bool]:
    """Return the configuration's settings, and whether the layers were built so."""
    from megatron_dppo.mcore.fusions import FUSIONS

    model = chunks[0]
    fused = {name: bool(getattr(model.config, name)) for name in FUSIONS}
    attention = model.decoder.layers[0].self_attention
    names = ("linear_qkv", "linear_kv_up_proj", "in_proj")
    linear = next(getattr(attention, name) for name in names if hasattr(attention, name))
    return fused | {
        "attention.fuse_wgrad_accumulation": linear.fuse_wgrad_accumulation,
        "output_layer": getattr(getattr(model, "output_layer", None), "gradient_accumulation_fusion", False),
    }


def calls_that_do_not_fit() -> Iterator[str]:
    """Megatron's wrappers hand these on by position or by name."""
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer.moe import moe_utils

    calls: dict[Any, tuple[int, set[str]]] = {
        rope_utils.fused_apply_rotary_pos_emb_thd: (3, {"cp_size", "cp_rank"}),
        moe_utils.fused_permute_with_probs: (3, {"num_out_tokens"}),
        moe_utils.fused_unpermute: (2, {"merging_probs", "restore_shape"}),
        moe_utils.fused_sort_chunks_by_index_with_probs: (4, set()),
    }
    for function, (positions, names) in calls.items():
        if function is None:
            yield "Megatron finds one of the fused functions missing"
            continue
        try:
            inspect.signature(function).bind(*range(positions), **dict.fromkeys(names))
        except TypeError as error:
            yield f"{function.__name__}: {error}"


def main() -> None:
    folder, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    pretend_cuda()
    stub_transformer_engine(folder)
    from megatron_dppo.mcore.shims import apply_shims
    from megatron_dppo.parallel.platform import Platform
    from megatron_dppo_megatron_cpu.shims import megatron_version

    apply_shims(Platform(torch.device("cuda", 0), "nccl"))
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    # Random states are CUDA's.
    random._get_cuda_rng_state = lambda *a, **k: torch.zeros(16, dtype=torch.uint8)
    random._set_cuda_rng_state = lambda *a, **k: None
    random.CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
    new_group = dist.new_group
    dist.new_group = lambda *a, **k: new_group(*a, **k | {"backend": "fake", "pg_options": None})  # type: ignore[assignment]
    dist.all_gather_object = lambda out, value, group=None: out.__setitem__(slice(None), [value] * len(out))
    for case in cases:
        layout, config, chunks = build(case)
        kinds = sorted({type(module).__name__ for chunk in chunks for module in chunk.modules()})
        result = dict(
            megatron=".".join(map(str, megatron_version())),
            parameters=sum(1 for chunk in chunks for _ in chunk.parameters()),
            kinds=kinds,
            fusions=fusions(chunks),
            wrong=list(wrong_parameters(layout, config, chunks)),
        )
        print(json.dumps(result), flush=True)
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    print(json.dumps({"calls": list(calls_that_do_not_fit())}))


if __name__ == "__main__":
    main()
