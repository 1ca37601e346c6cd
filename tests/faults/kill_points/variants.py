"""The runs that are killed: tiny ones, each with another part of what a run saves or sends."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from megatron_dppo.hf.folder import build_hf_model, read_hf_config, stream_model
from megatron_dppo_lab.embedded_tasks import chain_sum

_MODEL = Path(__file__).parents[3] / "examples/chain_sum/model"
_SMALL = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 16,
    "moe_intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts": 4,
}
_ROWS = {"train": 32, "eval": 2}
"""Rows of each file of data: each start reads all."""
_BASE: dict[str, dict[str, Any]] = {
    "run": {"output_dir": "run", "num_steps": 3},
    "model": {"path": "model", "dtype": "fp32"},
    "data": {"train": "train.jsonl", "eval": "eval.jsonl"},
    "rollout": {"prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 3, "dtype": "fp32"},
    "optimizer": {"lr": 0.01},
    "eval": {"every": 1, "max_prompts": 2},
    "checkpoint": {"save_every": 1, "keep": 1, "keep_best": True},
    "log": {"tensorboard": False},
}


@dataclass(frozen=True)
class Variant:
    """A configuration and how it is started."""

    name: str
    changes: dict[str, dict[str, Any]] = field(default_factory=dict)
    world_size: int = 1
    method: str = ""
    """of the weight sync with a server; empty = the local engine"""

    @property
    def evidence(self) -> Literal["exact", "rounded", "names"]:
        """Comparison of the sampling test's evidence, as much of it as does not depend on the clock.

        It adds up responses as they arrive from servers: the last digits depend on the order. It also counts those that
        no step trains on: those that come first are the short ones, so their tokens alone would be no sample. Where
        servers sample ahead, a step counts what of the next one has arrived by then: only the names are compared.
        """
        if not self.method:
            return "exact"
        return "names" if self.changes.get("train", {}).get("max_staleness", 0) > 0 else "rounded"

    def prepare(self, folder: Path, port: int = 0) -> None:
        """Write model and configuration to a new folder, where the run is started."""
        shutil.copytree(_MODEL, folder / "model")
        config = json.loads((folder / "model/config.json").read_text())
        (folder / "model/config.json").write_text(json.dumps(config | _SMALL))
        weights = stream_model(build_hf_model(read_hf_config(folder / "model"), torch.float32, seed=0))
        save_file({name: tensor.contiguous() for name, tensor in weights}, folder / "model/model.safetensors")
        for split, count in _ROWS.items():
            rows = [{"prompt": prompt, "label": label} for prompt, label in chain_sum.problems(split)[:count]]
            (folder / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        sections = {name: dict(values) for name, values in _BASE.items()}
        changes = dict(self.changes)
        if self.method:
            changes["rollout"] = {"engine": "sglang"}
            changes["rollout.servers"] = {"urls": [f"http://127.0.0.1:{port}"]}
            changes["rollout.weight_sync"] = {"method": self.method, "bucket_megabytes": 1}
        for name, values in changes.items():
            sections.setdefault(name, {}).update(values)
        (folder / "run.toml").write_text("".join(_section(name, values) for name, values in sections.items()))


def _section(name: str, values: dict[str, Any]) -> str:
    return f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("plain"),
        Variant(
            "ahead",
            {"train": {"max_staleness": 1, "mini_batches": 2}, "rollout": {"dynamic_sampling": True, "max_refills": 1}},
        ),
        Variant("two-ranks", {"parallel": {"expert_model_parallel_size": 2}}, world_size=2),
        Variant("background", {"checkpoint": {"async_save": True}}),
        Variant("disk", method="disk"),
        Variant("ipc", method="ipc"),
        Variant("disk-stale", {"train": {"max_staleness": 1}}, method="disk"),
    )
}
