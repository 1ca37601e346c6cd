"""Training runs with servers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.e2e.bases import chain_sum_base
from tests.e2e.runs import flags
from tests.engines.proxy import Proxy
from tests.engines.servers import Engine


def arguments(engines: Sequence[Engine | Proxy], folder: Path, **more: Any) -> list[str]:
    """A small fp32 run with these servers, from a model after a short supervised training."""
    values: dict[str, Any] = dict(
        run__output_dir=folder,
        run__num_steps=4,
        rollout__engine="sglang",
        rollout__servers__urls=json.dumps([engine.url for engine in engines]),
        rollout__dtype="fp32",
        rollout__prompts_per_step=8,
        rollout__samples_per_prompt=8,
        train__router_replay="rollout",
        eval__every=4,
        eval__max_prompts=8,
        log__tensorboard="false",
    )
    if "model__path" not in more:
        values["model__path"] = chain_sum_base(30)
    return flags(**{**values, **more})


def from_model(
    engines: Sequence[Engine | Proxy], model: Path, folder: Path, dtype: str = "bf16", **more: Any
) -> list[str]:
    """A run on one process that starts from the weights of a model, with one update a step."""
    values: dict[str, Any] = dict(
        parallel__expert_model_parallel_size=1,
        model__path=model,
        model__dtype=dtype,
        rollout__dtype=dtype,
        rollout__max_new_tokens=32,
        rollout__weight_sync__method="ipc",
        train__mini_batches=1,
        eval__every=100,
        eval__max_prompts=1,
    )
    return arguments(engines, folder, **{**values, **more})
