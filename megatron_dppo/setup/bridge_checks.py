"""Settings that a model of Megatron Bridge does not support, refused by name before a run starts."""

from collections.abc import Iterator
from operator import attrgetter

from megatron_dppo.config.schema import Config
from megatron_dppo.errors import ConfigError
from megatron_dppo.hf.families import FAMILIES


def bridge_problems(config: Config, model_type: str) -> Iterator[ConfigError]:
    """Yield the settings that rely on rules of a family, which a model of Megatron Bridge does not have here."""
    replay = [("train.router_replay", "routes are read by the layers of a family; use 'off'")]
    settings = [
        ("lora.rank", "adapters are made by the rules of a family"),
        *(replay if config.train.router_replay != "off" else []),
        ("train.layer_noise.std", "its layers are unknown; use 0"),
        ("rollout.batch_invariant", "its kernels are Megatron Bridge's"),
        ("rollout.servers.model", "which weights are quantized is a family's rule"),
        ("distillation.teacher_path", "use distillation.teacher_urls"),
        ("model.reference_path", "use null: the policy at the start of RL"),
    ]
    if model_type not in FAMILIES:
        if config.rollout.engine == "local":
            reason = "the local engine does not know its weights on disk; use 'sglang' or 'vllm'"
            settings.append(("rollout.engine", reason))
        settings.append(("model.random_init", "weights come from the folder"))
    for key, reason in settings:
        if value := attrgetter(key)(config):
            yield ConfigError(f"{key} = {value!r} with model.provider = 'megatron-bridge': {reason}")
