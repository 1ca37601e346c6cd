"""A program: one family through Megatron's ``HybridModel``, beside the same through ``GPTModel``, on a CPU.

    PYTHONPATH=FOLDER python -m tests.unit.hybrid_model

FOLDER holds the unpacked wheel of a Megatron Core that has ``HybridModel`` (0.19). Prints one JSON object a
family, on which docs/versions.md stands.
"""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from megatron_dppo.mcore.shims import apply_shims
from megatron_dppo.parallel.platform import Platform
from megatron_dppo_megatron_cpu.shims import megatron_version

PLATFORM = Platform.detect(0, force_cpu=True)
apply_shims(PLATFORM)

from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: E402
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules  # noqa: E402

from megatron_dppo.config.layout import resolve_parallel  # noqa: E402
from megatron_dppo.config.model import ModelConfig, ParallelConfig  # noqa: E402
from megatron_dppo.hf.families import get_family  # noqa: E402
from megatron_dppo.hf.folder import model_shape  # noqa: E402
from megatron_dppo.mcore import model as models  # noqa: E402
from megatron_dppo.mcore import setup  # noqa: E402
from tests.distributed.families import family_config  # noqa: E402
from tests.unit.interpret_delta_kernels import packed_row  # noqa: E402


def layer_pattern(shape: Any) -> str:
    """Two entries of Megatron's pattern for each layer: attention, then MLP."""
    entries = ("G" if i in shape.linear_layers else "*" for i in range(shape.num_layers))
    return "".join(entry + ("-" if i in shape.dense_layers else "E") for i, entry in enumerate(entries))


def stack_spec(config: Any, shape: Any) -> ModuleSpec:
    """Our layers of ``mcore/spec.py``, each cut into its two halves."""
    from megatron.core.models.hybrid import hybrid_block

    from megatron_dppo.mcore.spec import block_spec
    from megatron_dppo_megatron_cpu.layers import RMSNorm

    # The stack makes its last norm by name, whatever its spec says.
    hybrid_block.TENorm = RMSNorm
    layers = [spec.submodules for spec in block_spec(config, shape).layer_specs]

    def half(index: int, *names: str) -> ModuleSpec:
        parts = {name: getattr(layers[index], name) for name in names}
        return ModuleSpec(module=TransformerLayer, submodules=TransformerLayerSubmodules(**parts))

    attention, mlp = ("input_layernorm", "self_attention", "self_attn_bda"), ("pre_mlp_layernorm", "mlp", "mlp_bda")
    linear, dense = shape.linear_layers, shape.dense_layers
    full = next(i for i in range(shape.num_layers) if i not in linear)
    return ModuleSpec(
        module=hybrid_block.HybridStack,
        submodules=hybrid_block.HybridStackSubmodules(
            attention_layer=half(full, *attention),
            **({"gdn_layer": half(linear[0], *attention)} if linear else {}),
            **({"mlp_layer": half(dense[0], *mlp)} if dense else {}),
            moe_layer=half(next(i for i in range(shape.num_layers) if i not in dense), *mlp),
        ),
    )


def hybrid_name(name: str) -> str:
    """The name in ``HybridModel`` of a parameter of ``GPTModel``."""
    name = name.replace("decoder.final_layernorm.", "decoder.final_norm.")

    def index(match: re.Match[str]) -> str:
        is_mlp = match[2].startswith(("mlp", "pre_mlp"))
        return f"layers.{2 * int(match[1]) + is_mlp}.{match[2]}"

    return re.sub(r"layers\.(\d+)\.(.*)", index, name)


def compare(family: str) -> dict[str, Any]:
    """Names, outputs and checkpoint keys of a family in both models, with the same weights."""
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    hf_config = family_config(family)
    shape = model_shape(hf_config)
    layout = resolve_parallel(ParallelConfig(), 1, shape)
    config = models.transformer_config(hf_config, ModelConfig(path="unused", dtype="fp32"), layout, PLATFORM)
    (gpt,) = models.build_model(config, hf_config, 0, PLATFORM.device)
    hybrid = HybridModel(
        replace(config, num_layers=2 * shape.num_layers, moe_layer_freq=1, linear_attention_freq=None),
        stack_spec(config, shape),
        vocab_size=models.padded_vocab_size(hf_config.vocab_size, 1),
        max_sequence_length=hf_config.max_position_embeddings,
        hybrid_layer_pattern=layer_pattern(shape),
        **get_family(hf_config).rope(hf_config).arguments(),
    )
    hybrid.load_state_dict({hybrid_name(name): tensor for name, tensor in gpt.state_dict().items()}, strict=False)
    names = [{name for name, _ in model.named_parameters()} for model in (gpt, hybrid)]
    gradients = []
    outputs = [hidden_states(model) for model in (gpt, hybrid)]
    for model, output in zip((gpt, hybrid), outputs, strict=True):
        (output * torch.arange(output.numel()).view_as(output).sin()).sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    keys = [{part.key for part in model.sharded_state_dict().values()} for model in (gpt, hybrid)]
    return dict(
        pattern=layer_pattern(shape),
        names_follow={hybrid_name(name) for name in names[0]} == names[1],
        same_outputs=torch.equal(*outputs),
        same_gradients=all(torch.equal(g, gradients[1][hybrid_name(n)]) for n, g in gradients[0].items()),
        shared_keys=sorted(keys[0] & keys[1]),
        takes_hidden_states="output_processor" in inspect.signature(HybridModel.forward).parameters,
        gpt_takes_hidden_states="output_processor" in inspect.signature(type(gpt).forward).parameters,
    )


def hidden_states(model: Any) -> Any:
    """Output of the decoder for a packed row of three sequences."""
    row = packed_row([7, 1, 12])
    row.cu_seqlens_kv = row.cu_seqlens_q
    row.max_seqlen_q = row.max_seqlen_kv = 12
    positions = row.positions[None]
    embedded = model.embedding(positions * 5 % 100, positions)
    rotary = model.rotary_pos_emb(12, packed_seq=True)
    return model.decoder(embedded, None, rotary_pos_emb=rotary, packed_seq_params=row)


def main() -> None:
    with TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        layout = resolve_parallel(ParallelConfig(), 1, model_shape(family_config("qwen3_moe")))
        setup.initialize_megatron(layout, PLATFORM, seed=1, timeout_minutes=5)
        for family in ("qwen3_moe", "qwen3_next"):
            version = ".".join(map(str, megatron_version()))
            print(json.dumps({"megatron": version, "family": family, **compare(family)}), flush=True)


if __name__ == "__main__":
    main()
