"""Names and shards of a model's weights, in Megatron and Hugging Face, by the rules of its family.

``shard`` and ``unshard`` convert between full tensors and tensor-parallel shards. No Megatron, no collectives.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Module

from megatron_dppo.config.layout import ModelShape
from megatron_dppo.hf.families import get_family
from megatron_dppo.hf.families.rules import EMBEDDING, FINAL_NORM, OUTPUT, TIED_OUTPUT, Rule, join_sections


def parameters(shape: ModelShape, tied: bool) -> Iterator[tuple[Rule, int, int]]:
    """Yield every ``(rule, layer, expert)`` of a model, in the order of the network, without tied output weights."""
    yield EMBEDDING, 0, 0
    family = get_family(shape)
    attention, linear = family.attention(shape), family.linear(shape)
    for layer in range(shape.num_layers):
        has_experts = shape.num_experts is not None and layer not in shape.dense_layers
        mixer = linear if layer in shape.linear_layers else attention
        for rule in mixer + (family.experts if has_experts else family.dense):
            for expert in range(shape.num_experts or 1) if rule.is_expert else (0,):
                yield rule, layer, expert
    yield FINAL_NORM, 0, 0
    if not tied:
        yield OUTPUT, 0, 0


def find_rule(name: str, shape: ModelShape, tied: bool) -> tuple[Rule, int, int]:
    """Return rule, layer and expert of a Megatron parameter name with *global* indices."""
    layer_match = re.match(r"decoder\.layers\.(\d+)\.", name)
    expert_match = re.search(r"\.experts\.linear_fc[12]\.(?:weight|bias)(\d+)$", name)
    layer, expert = (int(m[1]) if m else 0 for m in (layer_match, expert_match))
    family = get_family(shape)
    output = TIED_OUTPUT if tied else OUTPUT
    mixer = family.linear(shape) if layer in shape.linear_layers else family.attention(shape)
    for rule in (*mixer, *family.dense, *family.experts, EMBEDDING, FINAL_NORM, output):
        if rule.names(layer, expert)[0] == name:
            return rule, layer, expert
    raise KeyError(f"No rule maps the Megatron parameter {name!r} to Hugging Face.")


def shard(rule: Rule, full: Tensor, rank: int, parts: int, shape: ModelShape) -> Tensor:
    """Return the shard of a full tensor for one of ``parts`` tensor-parallel ranks."""
    if rule.shard_dim is None or parts == 1:
        return full
    # Megatron splits sections such as gate and up separately, so that each rank has matching parts of all.
    local = [section.chunk(parts, rule.shard_dim)[rank] for section in rule.cut(full, shape)]
    return torch.cat(local, rule.shard_dim)


def unshard(rule: Rule, shards: Sequence[Tensor], shape: ModelShape) -> Tensor:
    """Return the full tensor of all shards in rank order; the inverse of ``shard``."""
    if rule.shard_dim is None or len(shards) == 1:
        return shards[0]
    return join_sections([rule.cut(part, shape) for part in shards], rule.shard_dim)


def pad_vocabulary(full: Tensor, size: int) -> Tensor:
    """Append zero rows up to ``size`` vocabulary entries."""
    return torch.cat([full, full.new_zeros(size - full.shape[0], *full.shape[1:])]) if size > full.shape[0] else full


_BIAS = "expert_bias"


def router_biases(model: Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the router biases by name. They choose experts and are buffers in fp32, but belong to the weights."""
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name.endswith(f".router.{_BIAS}"))


def use_fp32_decays(model: Module) -> None:
    """Give the decays of linear attention (``A_log``) fp32 in a model of another dtype, as servers have them.

    Their exponential multiplies the state at every token, so rounding them adds up over a sequence.
    """
    for parameter in _decays(model):
        parameter.data = parameter.data.float()


def _decays(model: Module) -> Iterator[Tensor]:
    return (parameter for name, parameter in model.named_parameters() if name.endswith(".A_log"))


@contextmanager
def preserve_fp32(models: Sequence[Module]) -> Iterator[None]:
    """Keep router biases and decays in fp32 while the block converts models to another dtype.

    The token counts that update the biases stay in fp32 too: in bf16 a count would stop at 256.
    """
    routers = [m for model in models for m in model.modules() if isinstance(getattr(m, _BIAS, None), Tensor)]
    names = (_BIAS, "local_tokens_per_expert")
    buffers = [(router, name, getattr(router, name)) for router in routers for name in names]
    decays = [(parameter, parameter.data) for model in models for parameter in _decays(model)]
    yield
    for router, name, buffer in buffers:
        setattr(router, name, buffer)
    for parameter, data in decays:
        parameter.data = data
