"""A run's adapters as a folder in PEFT's format: ``adapter_config.json`` and ``adapter_model.safetensors``.

Each expert's adapters have a name of their own, as in PEFT for models whose experts are modules. docs/lora.md says
which versions load it how; ``fused_experts`` is the other layout.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_dppo.config.model import LoraConfig
from megatron_dppo.errors import CheckpointError
from megatron_dppo.files import disk_errors, fsync
from megatron_dppo.hf.folder import WeightStream, drain
from megatron_dppo.parallel.objects import agreed, is_leader

_WHAT = "the adapter"
_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.lora_([AB])\.weight$")


def save_adapter(
    target: Path, adapters: WeightStream, lora: LoraConfig, base: str, *, group: ProcessGroup | None = None
) -> None:
    """Write the folder; it appears at once and complete, an older one of that name is replaced.

    The stream is taken to its end, whatever happens; the first rank holds all of it.

    Args:
        target: the folder.
        adapters: whole tensors by PEFT's names, the same on all ranks.
        lora: rank, scale and targets.
        base: the model's folder, or its name on the hub.
        group: ranks that call this together.

    Raises:
        DiskError: on all ranks, when the first one cannot write.
    """
    stream, leads = iter(adapters), is_leader(group)
    try:
        found = on_cpu(stream) if leads else {}
    finally:
        drain(stream)
    agreed(lambda: write_adapter(target, found, adapter_config(lora, base)) if leads else None, group)


def on_cpu(adapters: WeightStream) -> dict[str, Tensor]:
    """All of a stream, for ``write_adapter``."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in adapters}


def adapter_config(lora: LoraConfig, base: str) -> dict[str, Any]:
    """PEFT's ``LoraConfig`` as JSON; what is not there is PEFT's default."""
    alpha = lora.scale * lora.rank
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "target_modules": list(lora.target_modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def write_adapter(target: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """The two files, on the disk.

    Raises:
        DiskError: the disk is full or cannot be written to.
    """
    partial = target.with_name(target.name + ".partial")
    with disk_errors(target, _WHAT):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        (partial / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_file(dict(tensors), partial / "adapter_model.safetensors", metadata={"format": "pt"})
        for file in partial.iterdir():
            fsync(file)
        fsync(partial)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        fsync(target.parent)


def fuse_adapter(source: Path, target: Path) -> None:
    """Write the adapters of a run in the layout of ``fused_experts``.

    Args:
        source: hf-adapter/ of a run.
        target: new folder.

    Raises:
        CheckpointError: ``source`` has no adapters.
        DiskError: the folder cannot be written.
    """
    weights = source / "adapter_model.safetensors"
    if not weights.is_file():
        raise CheckpointError(f"{source} has no adapter_model.safetensors; name the hf-adapter/ of a run")
    config = json.loads((source / "adapter_config.json").read_text())
    write_adapter(target, *fused_experts(load_file(weights), config))


def fused_experts(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The layout of PEFT 0.18 for transformers 5, which keeps the weights of all experts in one parameter.

    PEFT 0.18 takes ``[experts, out, in]`` for ``[experts, in, out]``: what it calls A is B, and the other way round.

    Returns:
        Tensors and configuration.
    """
    result, experts = dict(tensors), dict[str, dict[tuple[int, str], dict[str, Tensor]]]()
    for name in tensors:
        if found := _EXPERT.match(name):
            pair = experts.setdefault(found[1], {}).setdefault((int(found[2]), found[3]), {})
            pair[found[4]] = result.pop(name)
    if not experts:
        return result, dict(config)
    kinds = {kind for pairs in experts.values() for _, kind in pairs}
    for layer, pairs in experts.items():
        numbers = sorted({expert for expert, _ in pairs})
        for inner, parts in (("base_layer.", ("gate", "up")), ("", ("down",))):
            if kinds & set(parts):
                inner = inner if "down" in kinds else ""
                fused = [_fused({p: pairs[e, p] for p in parts if p in kinds}, parts) for e in numbers]
                result[f"{layer}.{inner}lora_A.weight"] = torch.cat([b.t() for b, _ in fused]).contiguous()
                rows = torch.stack([a for _, a in fused]).permute(2, 1, 0)
                result[f"{layer}.{inner}lora_B.weight"] = rows.flatten(1).contiguous()
    return result, {**config, **_fused_config(config, kinds, {name.split(".")[-3] for name in result})}


def _fused(pairs: Mapping[str, Mapping[str, Tensor]], parts: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    """B ``[out, n * rank]`` and A ``[n * rank, in]`` of the parts that one parameter holds."""
    some = next(iter(pairs.values()))
    b = [pairs[part]["B"] if part in pairs else torch.zeros_like(some["B"]) for part in parts]
    a = [pairs[part]["A"] if part in pairs else torch.zeros_like(some["A"]) for part in parts]
    return torch.block_diag(*b), torch.cat(a)


def _fused_config(config: Mapping[str, Any], kinds: set[str], modules: set[str]) -> dict[str, Any]:
    fused = {"gate_up_proj": bool(kinds & {"gate", "up"}), "down_proj": "down" in kinds}
    twice = r".*\.experts\.gate_up_proj"
    return {
        "target_modules": [name for name in config["target_modules"] if name in modules],
        "target_parameters": [f"mlp.experts.{name}" for name, there in fused.items() if there],
        "rank_pattern": {twice: 2 * config["r"]} if fused["gate_up_proj"] else {},
        "alpha_pattern": {twice: 2 * config["lora_alpha"]} if fused["gate_up_proj"] else {},
    }
