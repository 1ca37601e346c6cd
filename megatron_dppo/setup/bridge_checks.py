"""Settings that a model of Megatron Bridge does not support, refused by name before a run starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_dppo.config.schema import Config
from megatron_dppo.errors import ConfigError
from megatron_dppo.hf.families import FAMILIES


def bridge_problems(config: Config, model_type: str) -> Iterator[ConfigError]:
    """Yield the settings that rely on rules of a family, which a model of Megatron Bridge does not have here.

    Args:
        config: Configuration with ``model.provider = "megatron-bridge"``.
        model_type: ``model_type`` of config.json.
    """
    settings: list[tuple[str, Any, bool, str]] = [
        ("lora.rank", config.lora.rank, True, "adapters are made by the rules of a family"),
        (
            "train.router_replay",
            config.train.router_replay,
            config.train.router_replay != "off",
            "routes are read by the layers of a family; use 'off'",
        ),
        ("train.layer_noise.std", config.train.layer_noise.std, True, "its layers are unknown; use 0"),
        ("rollout.batch_invariant", config.rollout.batch_invariant, True, "its kernels are Megatron Bridge's"),
        ("rollout.servers.model", config.rollout.servers.model, True, "which weights are quantized is a family's rule"),
        ("distillation.teacher_path", config.distillation.teacher_path, True, "use distillation.teacher_urls"),
        ("model.reference_path", config.model.reference_path, True, "use null: the policy at the start of RL"),
    ]
    if model_type not in FAMILIES:
        engine = config.rollout.engine
        settings += [
            (
                "rollout.engine",
                engine,
                engine == "local",
                "the local engine does not know its weights on disk; use 'sglang' or 'vllm'",
            ),
            ("model.random_init", config.model.random_init, True, "weights come from the folder"),
        ]
    for key, value, is_refused, reason in settings:
        if value and is_refused:
            yield ConfigError(f"{key} = {value!r} with model.provider = 'megatron-bridge': {reason}")
