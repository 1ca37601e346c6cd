"""Layers of a model that are rehearsed when the others are extrapolated from them."""

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_dppo.config.layout import Layout
from megatron_dppo.errors import CheckpointError
from megatron_dppo.hf.folder import model_shape

LayerKind = tuple[str | None, bool]
"""Kind of a layer: its entry in ``layer_types`` (None without them), and True if it is dense in an MoE model."""

_LISTS = ("layer_types", "mlp_layer_types", "attn_type_list")
"""Keys of config.json with an entry for each layer."""


@dataclass(frozen=True, kw_only=True)
class FewLayers:
    """Layers of a model chunk to rehearse."""

    base: tuple[int, ...]
    """Indices in the whole model. Every kind of layer of the chunk is among them."""
    additions: tuple[tuple[int, int], ...]
    """For each kind its first layer, and how often the chunk has the kind beyond ``base``."""

    def variants(self) -> list[tuple[tuple[int, ...], int]]:
        """Return the layers to rehearse: ``base``, and ``base`` with a layer twice, and how often that is left out."""
        added = [(tuple(sorted((*self.base, layer))), count) for layer, count in self.additions]
        return [(self.base, 0), *added]


def choose_layers(hf_config: Any, layout: Layout, rank: int) -> FewLayers | None:
    """Return the layers from which a rank can be extrapolated.

    Layers of one kind need the same memory and time, so a chunk's is a constant plus a multiple for each kind. The
    constant has what one layer needs beyond what it keeps, at the moment of the peak. That moment is near the first or
    the last layers. So both ends of the chunk stay, and layers are added between them. Layers must be split evenly.
    None if its layers are no more than would be rehearsed, or its chunks have different kinds.
    """
    kinds = layer_kinds(hf_config)
    chunks = layout.pp * layout.vpp
    size = len(kinds) // chunks
    # Megatron numbers pipeline stages outermost, and gives each stage every pp-th chunk.
    stage = rank * layout.pp // layout.world_size
    starts = [(stage + index * layout.pp) * size for index in range(layout.vpp)]
    counts = [Counter(kinds[start : start + size]) for start in starts]
    if any(count != counts[0] for count in counts):
        return None
    first = starts[0]
    chunk = range(first, first + size)
    # The first layer of each kind, and the last one.
    first_layers = {kinds[i]: i for i in reversed(chunk)}
    last_layers = {kinds[i]: i for i in chunk}
    base = tuple(sorted({*first_layers.values(), *last_layers.values()}))
    additions = []
    for kind, layer in sorted(first_layers.items(), key=lambda item: item[1]):
        if more := counts[0][kind] - sum(kinds[i] == kind for i in base):
            additions.append((layer, more))
    rehearsed = len(base) + len(additions) * (len(base) + 1)
    return None if size <= rehearsed else FewLayers(base=base, additions=tuple(additions))


def layer_kinds(hf_config: Any) -> list[LayerKind]:
    """Return the kind of each layer of the model."""
    shape = model_shape(hf_config)
    types = getattr(hf_config, "layer_types", None) or [None] * shape.num_layers
    return [(types[i], i in shape.dense_layers) for i in range(shape.num_layers)]


def with_layers(hf_config: Any, layers: Sequence[int], chunks: int) -> Any | None:
    """Return the config of a model in which each of ``chunks`` model chunks has these layers of the model, in order.

    None if no config.json describes such a model, as where dense layers must precede all others.
    """
    kinds = layer_kinds(hf_config)
    chosen = list(layers) * chunks
    config = copy.deepcopy(hf_config)
    config.num_hidden_layers = len(chosen)
    for name in _LISTS:
        if values := getattr(hf_config, name, None):
            setattr(config, name, [values[i] for i in chosen])
    dense = [position for position, i in enumerate(chosen) if kinds[i][1]]
    if hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = len(dense)
    if hasattr(config, "mlp_only_layers"):
        config.mlp_only_layers = dense
        config.decoder_sparse_step = 1
    try:
        has_kinds = layer_kinds(config) == [kinds[i] for i in chosen]
    except CheckpointError:
        return None
    return config if has_kinds else None
