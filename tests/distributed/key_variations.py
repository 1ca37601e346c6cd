"""Every key of config.json of a tiny model with other values: Megatron equals transformers, or the model is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_dppo.config.loss import LossConfig
from megatron_dppo.errors import CheckpointError, ConfigError
from megatron_dppo.hf.config_keys import check_config_keys
from megatron_dppo.hf.folder import build_hf_model, model_shape
from megatron_dppo.parallel.platform import Platform
from megatron_dppo.policy.update import Updater
from tests.distributed.families import TINY, family_config
from tests.distributed.parity import (
    TOLERANCE,
    Case,
    HFSide,
    build_trainer,
    config_for,
    logprob_error,
    randomize,
    samples,
)

# Names of the model and of its files, and what concerns no layer or random weights alone.
NOT_KEYS = {"model_type", "architectures", "transformers_version", "dtype", "torch_dtype", "_name_or_path", "id2label"}
NOT_KEYS |= {
    "label2id",
    "problem_type",
    "return_dict",
    "output_attentions",
    "output_hidden_states",
    "is_encoder_decoder",
    "initializer_range",
}
OF_OTHER_FAMILIES: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (True,),
    "mlp_bias": (True,),
    "clip_qkv": (0.5,),
    "sliding_window": (4,),
    "use_sliding_window": (True,),
    "layer_types": (["sliding_attention"] * 4, ["full_attention"] * 4),
    "head_dim": (8, 32),
    "norm_topk_prob": (True, False),
    "routed_scaling_factor": (2.0,),
    "scoring_func": ("softmax",),
    "topk_method": ("greedy",),
    "moe_layer_freq": (2,),
    "first_k_dense_replace": (2,),
    "num_nextn_predict_layers": (1,),
    "n_group": (2, 4),
    "topk_group": (2,),
    "router_jitter_noise": (0.1,),
    "rope_interleave": (False,),
    "rope_theta": (500.0,),
    "rope_scaling": ({"type": "linear", "factor": 4.0}, {"rope_type": "dynamic", "factor": 4.0}),
    "partial_rotary_factor": (0.5,),
    "attn_output_gate": (False,),
    "output_gate_type": ("sigmoid",),
    "qkv_bias": (True,),
    "full_attention_interval": (2,),
    "mamba_ssm_dtype": ("bfloat16",),
    "mtp_num_hidden_layers": (1,),
    "quantization_config": ({"quant_method": "fp8"},),
    "use_qk_norm": (True, False),
    "shared_expert_intermediate_size": (0, 8),
    "is_causal": (False,),
    "rotary_dim": (8,),
    "num_experts_per_token": (4,),
    "unknown_key": (0.5,),
}
"""Keys that some model has: a family that transformers gives none of them may find them in a config.json."""
KNOWN = {
    ("'linear_key_head_dim': 1}", False): "the norm of one number is its sign: rounding of 1e-7 becomes 1e-5",
}
"""Differences by key or by change, and whether the model has latent attention."""


def others(key: str, value: Any) -> Iterator[Any]:
    """Yield values other than the given one."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, 2 * value, 1, None)
    elif key == "rms_norm_eps":
        yield from (1e-2, 1e-9)
    elif isinstance(value, float):
        yield from (2 * value + 0.5, 0.0)
    elif isinstance(value, str):
        yield "gelu" if key == "hidden_act" else "other"
    elif isinstance(value, list):
        yield from (value[::-1], [])
    elif value is None:
        yield from (1, 8, 0.5, True)


def variations(config: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a label and all keys of each changed configuration."""
    keys = {key: value for key, value in config.to_dict().items() if key not in NOT_KEYS}
    changes = [(key, {key: other}) for key, value in keys.items() for other in others(key, value)]
    changes += [(key, {key: other}) for key, values in OF_OTHER_FAMILIES.items() for other in values]
    rope = keys["rope_parameters"]
    for key, value in rope.items():
        changes += [("rope_parameters", {"rope_parameters": rope | {key: other}}) for other in others(key, value)]
    # Sections of positions for images; those of text are the same in each.
    mrope = rope | {"mrope_interleaved": True, "mrope_section": [1, 1, 0]}
    changes.append(("rope_parameters", {"rope_parameters": mrope}))
    for kind in ("default", "linear", "dynamic", "yarn", "llama3"):
        scaled = rope | {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 16}
        changes.append(("rope_parameters", {"rope_parameters": scaled}))
        changes.append(("rope_parameters", {"rope_parameters": scaled | {"partial_rotary_factor": 0.5}}))
    for _, change in changes:
        if any(keys.get(key, change) != value for key, value in change.items()):
            yield str(change), keys | change


def outcome(family: str, keys: Mapping[str, Any], platform: Platform) -> str:
    """Return ``invalid`` for what transformers cannot compute, else ``refused``, ``equal``, or the error."""
    from megatron.core import parallel_state
    from transformers import AutoConfig

    try:
        # transformers writes into the dictionaries of the rotary embedding.
        hf_config = AutoConfig.for_model(TINY[family][0].model_type, **deepcopy(keys))
    except Exception:  # transformers raises what its validators raise
        return "invalid"
    try:
        check_config_keys(keys, hf_config, Path("config.json"))
        model_shape(hf_config)
    except CheckpointError:
        return "refused"
    try:
        hf_config._experts_implementation = "eager"  # the grouped one wants sizes that are multiples of 4
        model = randomize(build_hf_model(hf_config, torch.float32, seed=0))
        reference = HFSide(Case(family=family), model=model)
        with torch.no_grad():
            # The reference replaces routers, and so may compute what transformers does not.
            model(samples()[0].tokens[None])
            is_finite = bool(reference.logprobs(samples()[0]).isfinite().all())
    except Exception:  # transformers raises what its layers raise
        is_finite = False
    if not is_finite:
        return "invalid"
    try:
        trainer = build_trainer(Case(family=family), model, platform, "fp32")
        updater = Updater(trainer, config_for(Case()).train, LossConfig(name="minirl"))
        error = logprob_error(updater, reference, samples()[:4])
    except (CheckpointError, ConfigError):
        return "refused"
    except Exception as problem:  # a run must not end in a traceback
        return f"error {type(problem).__name__}: {problem}"
    finally:
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
    return "equal" if error < TOLERANCE else f"error {error:.1e}"


def run(rank: int, world_size: int, families: list[str], every: int) -> None:
    """Check every ``every``-th variation of each family."""
    from megatron_dppo.mcore.shims import apply_shims

    assert world_size == 1
    # Megatron makes dozens of groups for each model and never ends their threads. One process needs one group.
    dist.new_group = lambda *args, **kwargs: dist.group.WORLD
    platform = Platform.detect(force_cpu=True)
    apply_shims(platform)
    wrong, counts = [], {}
    for family in families:
        config = family_config(family)
        is_latent = "kv_lora_rank" in config.to_dict()
        for label, keys in list(variations(config))[::every]:
            result = outcome(family, keys, platform)
            if result.startswith("error") and not any(k in label and is_latent == latent for k, latent in KNOWN):
                wrong.append(f"{family}, {label}: {result}")
            counts[family, result[:5]] = counts.get((family, result[:5]), 0) + 1
            dist.barrier()
    print("variations:", counts)
    assert not wrong, "\n".join(wrong)
    assert {family for family, result in counts if result == "equal"} == set(families), counts
