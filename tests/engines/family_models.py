"""Tiny models of every family in folders that servers load, and float64 transformers as the reference."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

from megatron_dppo.export.hf_folder import save_hf_folder
from megatron_dppo.hf.families import ALIASES
from megatron_dppo.hf.folder import WeightStream, build_hf_model, stream_model
from tests.distributed.families import TINY, family_config, in_float64
from tests.distributed.parity import randomize
from tests.engines.tiny import END, SPECIAL, VOCAB, byte_tokenizer

PUBLISHED = "qwen3_5_moe"
"""The folder of Qwen3.5 as published: nested config.json, prefixed names, weights of vision and further tokens."""
_TOKENS = {"bos_token_id": 1, "eos_token_id": END, "pad_token_id": 0}
_POSITIONS = 2048
_HEAD_DIM = 32
"""The smallest head of vLLM's attention on a CPU."""
_TWO_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
"""Sizes of families without a key for the size of a head."""
_EXPERT_SIZES = ("moe_intermediate_size", "shared_expert_intermediate_size")
_LATENT = {
    **{"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    # transformers computes them from other fields, and a copied configuration has the values of its source.
    **{"head_dim": 64, "qk_head_dim": 192},
}
"""Sizes of the published models, the only ones of vLLM's kernel for latent attention on a CPU."""
_LINEAR = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
"""Those of vLLM's kernel for gated delta nets on a CPU."""
SERVER_KEYS: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(("qwen2", "qwen2_moe"), _TWO_HEADS),
    # vLLM does not read it.
    "gpt_oss": {"swiglu_limit": 7.0},
    # SGLang does not read ``head_dim``.
    "mixtral": _TWO_HEADS,
    "olmoe": _TWO_HEADS | {"num_key_value_heads": 2, "rms_norm_eps": 1e-5},
    **dict.fromkeys(("deepseek_v3", "moonlight", "kimi_k2", "glm4_moe_lite"), _LATENT),
    **dict.fromkeys(("qwen3_next", "qwen3_5_moe_text", PUBLISHED), _LINEAR),
}
"""Keys that differ from the tiny models of the parity tests, by the name of the model."""
NAMES = (*TINY, PUBLISHED)


def server_config(name: str) -> Any:
    """Return the configuration of a tiny model: that of the parity tests, with sizes that servers accept."""
    config = family_config("qwen3_5_moe_text" if name == PUBLISHED else name)
    keys = {"vocab_size": VOCAB, **_TOKENS, **SERVER_KEYS.get(name, {})}
    if config.max_position_embeddings < _POSITIONS:
        keys["max_position_embeddings"] = _POSITIONS
    if "head_dim" in TINY.get(name, (None, {"head_dim": 0}))[1]:
        keys["head_dim"] = _HEAD_DIM
    # SGLang pads smaller experts on a CPU, and could not prove them.
    keys |= {key: 64 for key in _EXPERT_SIZES if getattr(config, key, None)}
    rope = config.rope_parameters
    if rope.get("rope_type") == "yarn":
        # Servers have no positions beyond those of the scaled embedding.
        keys["rope_parameters"] = {**rope, "original_max_position_embeddings": int(_POSITIONS / rope["factor"])}
    return type(config)(**{**config.to_dict(), **keys})


class FamilyModel:
    """A tiny model in a folder that the project's export wrote.

    Args:
        name: One of ``NAMES``.
        folder: Is made.
        seed: Of the weights.
        dtype: Of the weights on disk.
    """

    def __init__(self, name: str, folder: Path, seed: int, dtype: torch.dtype = torch.float32) -> None:
        self.folder = folder
        source = folder.with_name(folder.name + "_source")
        config = server_config(name)
        if name == PUBLISHED:
            write_published(source, config)
        else:
            config.architectures = [TINY[name][0].hf_class]
            config.save_pretrained(source)
        if name in ALIASES:
            name_alias(source, name)
        byte_tokenizer(SPECIAL).save_pretrained(source)
        self.model = randomize(build_hf_model(config, torch.float32, seed=seed))
        for weight in self.model.parameters():
            weight.data = weight.data.to(dtype).float()
        save_hf_folder(folder, source, self.weights(), dtype)
        self.exact = in_float64(self.model)

    def weights(self) -> WeightStream:
        """Return the weights by Hugging Face name, one entry per expert."""
        return stream_model(self.model)

    @torch.no_grad()
    def distributions(self, prompt: Sequence[int], response: Sequence[int], temperature: float = 1.0) -> Tensor:
        """Return the log-probabilities at each response token in float64. Shape ``[R, V]``."""
        logits = self.exact(torch.tensor([[*prompt, *response]])).logits[0]
        return (logits[len(prompt) - 1 : -1].double() / temperature).log_softmax(-1)

    def logprobs(self, prompt: Sequence[int], response: Sequence[int], temperature: float = 1.0) -> Tensor:
        """Return the log-probabilities of the response tokens. Shape ``[R]``."""
        chosen = torch.tensor(response)[:, None]
        return self.distributions(prompt, response, temperature).gather(1, chosen).squeeze(1)


def name_alias(folder: Path, alias: str) -> None:
    """Rewrite config.json as Kimi-K2 has it: its own ``model_type`` and class, rotary keys of transformers 4."""
    file = folder / "config.json"
    values = json.loads(file.read_text())
    rope = values.pop("rope_parameters")
    values["rope_theta"] = rope.pop("rope_theta")
    values["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
    # Of code that is not in the folder: no server may need it.
    values["auto_map"] = {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}
    file.write_text(json.dumps({**values, "model_type": alias}))


_VISION = dict(
    depth=1, hidden_size=64, intermediate_size=64, num_heads=2, out_hidden_size=64, num_position_embeddings=16
)


def write_published(folder: Path, text: Any) -> None:
    """Write a folder as Qwen publishes Qwen3.5: a vision model and a layer for further tokens beside the text model."""
    config = AutoConfig.for_model("qwen3_5_moe", text_config=text.to_dict(), vision_config=_VISION, **_TOKENS)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in model.state_dict().items()}
    tensors["mtp.fc.weight"] = torch.randn(64, 128)
    config.architectures = ["Qwen3_5MoeForConditionalGeneration"]
    config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


__all__ = ["NAMES", "PUBLISHED", "FamilyModel", "name_alias", "server_config", "write_published"]
