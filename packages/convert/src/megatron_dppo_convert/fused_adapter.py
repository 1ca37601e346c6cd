"""Adapters of experts in the layout of PEFT 0.18: one parameter has those of all experts of a layer."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_dppo.errors import CheckpointError
from megatron_dppo.export.adapter_folder import EXPERT, PROJECTIONS, write_adapter
from megatron_dppo_engines.weight_files import ADAPTER_FILE


def fuse_adapter(source: Path, target: Path) -> None:
    """Write the adapters of a run in the layout of ``fuse_experts``."""
    weights = source / ADAPTER_FILE
    if not weights.is_file():
        raise CheckpointError(f"{source} has no adapter_model.safetensors; name the hf-adapter/ of a run")
    config = json.loads((source / "adapter_config.json").read_text())
    write_adapter(target, *fuse_experts(load_file(weights), config))


def fuse_experts(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the layout of PEFT 0.18 for transformers 5, which keeps the weights of all experts in one parameter.

    PEFT 0.18 expects ``[experts, in, out]`` but the parameter is ``[experts, out, in]``, so A and B change their names.
    """
    result = dict(tensors)
    layers = dict[str, dict[tuple[int, str], dict[str, Tensor]]]()
    for name in tensors:
        if match := EXPERT.match(name):
            layer, expert, module, matrix = match.groups()
            # Modules of transformers 5, which has one name for all families.
            layer = layer.replace(".block_sparse_moe.", ".mlp.")
            pair = layers.setdefault(layer, {}).setdefault((int(expert), PROJECTIONS[module]), {})
            pair[matrix] = result.pop(name)
    if not layers:
        return result, dict(config)
    projections = {projection for pairs in layers.values() for _, projection in pairs}
    for layer, pairs in layers.items():
        experts = sorted({expert for expert, _ in pairs})
        # PEFT wraps the module once per parameter: the first wrapper is the base layer of the second.
        for base_layer, parts in (("base_layer.", ("gate", "up")), ("", ("down",))):
            if projections & set(parts):
                prefix = base_layer if "down" in projections else ""
                fused = [_fuse_pairs({p: pairs[e, p] for p in parts if p in projections}, parts) for e in experts]
                # B becomes PEFT's A, [experts * n * rank, out]: the expert varies slowest.
                result[f"{layer}.{prefix}lora_A.weight"] = torch.cat([b.t() for b, _ in fused]).contiguous()
                # A becomes PEFT's B, [in, n * rank * experts]: the expert varies fastest.
                rows = torch.stack([a for _, a in fused]).permute(2, 1, 0)
                result[f"{layer}.{prefix}lora_B.weight"] = rows.flatten(1).contiguous()
    # The third part from the end, as in ``...mlp.up_proj.lora_A.weight``.
    modules = {name.split(".")[-3] for name in result}
    return result, {**config, **_fused_config(config, projections, modules)}


def _fuse_pairs(pairs: Mapping[str, Mapping[str, Tensor]], parts: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    """Return B ``[out, n * rank]`` and A ``[n * rank, in]`` of the projections that one parameter holds."""
    example = next(iter(pairs.values()))
    # A projection without an adapter gets zeros, which add nothing.
    b = [pairs[part]["B"] if part in pairs else torch.zeros_like(example["B"]) for part in parts]
    a = [pairs[part]["A"] if part in pairs else torch.zeros_like(example["A"]) for part in parts]
    return torch.block_diag(*b), torch.cat(a)


def _fused_config(config: Mapping[str, Any], projections: set[str], modules: set[str]) -> dict[str, Any]:
    fused = {"gate_up_proj": bool(projections & {"gate", "up"}), "down_proj": "down" in projections}
    # Two projections in one parameter have twice the rank; twice the alpha keeps the scale.
    twice = r".*\.experts\.gate_up_proj"
    return {
        "target_modules": [name for name in config["target_modules"] if name in modules],
        "target_parameters": [f"mlp.experts.{name}" for name, is_present in fused.items() if is_present],
        "rank_pattern": {twice: 2 * config["r"]} if fused["gate_up_proj"] else {},
        "alpha_pattern": {twice: 2 * config["lora_alpha"]} if fused["gate_up_proj"] else {},
    }
