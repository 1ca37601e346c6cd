"""Adapters of a run as a folder in PEFT's format: ``adapter_config.json`` and ``adapter_model.safetensors``.

Each expert has adapters of its own, as in PEFT for models whose experts are modules. docs/lora.md lists which versions
load this layout; ``megatron-dppo convert adapter`` writes the other one.
"""

import json
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_dppo.config.model import LoraConfig
from megatron_dppo.files import disk_errors, fsync, usual_rights
from megatron_dppo.hf.folder import WeightStream, drain
from megatron_dppo.parallel.objects import is_leader, run_on_leader
from megatron_dppo_engines.weight_files import ADAPTER_FILE

_WHAT = "the adapter"
PROJECTIONS = {
    **{"gate_proj": "gate", "up_proj": "up", "down_proj": "down"},
    **{"w1": "gate", "w3": "up", "w2": "down"},
}
"""Projection by the name of its module; w1, w2 and w3 are those of Mixtral and MiniMax-M2."""
EXPERT = re.compile(rf"(.*\.(?:mlp|block_sparse_moe)\.experts)\.(\d+)\.({'|'.join(PROJECTIONS)})\.lora_([AB])\.weight$")
"""Names of the adapters of one expert: layer, expert, module, A or B."""
_OTHER_MLP = re.compile(r".*\.mlp\.(shared_experts?\.)?(gate|up|down)_proj\.lora_[AB]\.weight$")
_PEFT_LOADS: tuple[frozenset[str], ...] = (frozenset(), frozenset({"down"}), frozenset({"gate", "up", "down"}))
"""Projections of routed experts that PEFT 0.21.2 loads together."""


def save_adapter(
    target: Path, adapters: WeightStream, lora: LoraConfig, base: str, *, group: ProcessGroup | None = None
) -> None:
    """Write an adapter folder, which appears complete and replaces an older one of that name.

    The stream is consumed to its end in any case. The first rank holds all of it, and warns if PEFT cannot read it.
    ``base`` is the folder of the base model, or its name on the hub. ``group`` calls this together, and gets the same
    DiskError.
    """
    stream = iter(adapters)
    leads = is_leader(group)
    try:
        tensors = copy_to_cpu(stream) if leads else {}
    finally:
        # The stream is a collective: it must end on all ranks, even if the copy fails here.
        drain(stream)
    run_on_leader(lambda: write_adapter(target, tensors, adapter_config(lora, base)) if leads else None, group)
    # Only the first rank has names, so only it warns.
    if problem := describe_peft_problem(tensors):
        print(f"warning  {target}: {problem}", file=sys.stderr, flush=True)


def describe_peft_problem(names: Iterable[str]) -> str:
    """Return why PEFT 0.21.2 with transformers 5 does not read adapters of these names, or an empty string.

    There the weights of all routed experts are one parameter for gate and up and one for down. PEFT turns the targets
    into these parameters, for the whole model (``utils/transformers_weight_conversion.py``).
    """
    names = list(names)
    modules = {match[3] for name in names if (match := EXPERT.match(name))}
    projections = frozenset(PROJECTIONS[module] for module in modules)
    advice = "Fix: use the merged model in hf/ (megatron-dppo convert megatron-to-hf writes it from a checkpoint)"
    if projections not in _PEFT_LOADS:
        shown = ", ".join(name for name in PROJECTIONS if name in modules)
        gate, up, down = ("w1", "w3", "w2") if modules & {"w1", "w3"} else ("gate_proj", "up_proj", "down_proj")
        return (
            f"PEFT 0.21.2 does not load adapters of routed experts on {shown} alone; expected {down}, or {gate}, {up} "
            f"and {down}. {advice}, or train with such lora.target_modules"
        )
    if projections and any(_OTHER_MLP.match(name) for name in names):
        return (
            "PEFT 0.21.2 silently drops the adapters of shared experts and dense MLPs of a model with routed experts. "
            f"{advice}"
        )
    return ""


def copy_to_cpu(adapters: WeightStream) -> dict[str, Tensor]:
    """Return all tensors of a stream in host memory, for ``write_adapter``."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in adapters}


def adapter_config(lora: LoraConfig, base: str) -> dict[str, object]:
    """Return PEFT's ``LoraConfig`` as JSON; missing keys have PEFT's defaults."""
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


def write_adapter(target: Path, tensors: Mapping[str, Tensor], config: Mapping[str, object]) -> None:
    """Write the two files and sync them to disk."""
    partial = target.with_name(target.name + ".partial")
    with disk_errors(target, _WHAT):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        (partial / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
        with usual_rights(partial / ADAPTER_FILE):
            save_file(dict(tensors), partial / ADAPTER_FILE, metadata={"format": "pt"})
        for file in partial.iterdir():
            fsync(file)
        fsync(partial)
        # POSIX renames no folder onto one that has files.
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        fsync(target.parent)
