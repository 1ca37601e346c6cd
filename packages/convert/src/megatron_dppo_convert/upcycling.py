"""Dense Hugging Face folders upcycled to mixtures of experts, one tensor at a time.

Every expert is a copy of the dense MLP plus noise, and the weights of the chosen experts sum to 1. Without noise the
mixture therefore computes what the dense model computes, whatever its random router chooses.
"""

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_dppo.errors import CheckpointError
from megatron_dppo.export.hf_folder import save_hf_folder
from megatron_dppo.files import require_space
from megatron_dppo.hf.folder import model_shape, read_hf_config, weight_shapes
from megatron_dppo.hf.weight_files import DTYPES, FolderWeights, check_tied_output
from megatron_dppo_convert.upcycled_config import Upcycling, upcycled_config

INIT_STD = 0.02
"""Standard deviation of weights that the dense model does not have."""
_EXPERT = re.compile(r"(.*\.mlp)\.experts\.\d+\.(gate_proj|up_proj|down_proj)\.weight")
_SHARED_EXPERT_INPUT = re.compile(r".*\.shared_expert\.(gate_proj|up_proj)\.weight")
_ROUTER = ".mlp.gate.weight"
_OUTPUT = "lm_head.weight"


@dataclass(frozen=True)
class UpcycledModel:
    """Summary of a folder that was written."""

    model_type: str
    parameters_before: int
    parameters_after: int


def upcycle_folder(
    source: Path, target: Path, settings: Upcycling, *, max_shard_bytes: int = 5 * 2**30
) -> UpcycledModel:
    """Write the mixture of experts of a dense folder, complete or not at all.

    Nothing is written before the configuration and the names, shapes and dtypes of all weights have been checked. One
    dense tensor and one file of the target are in memory at a time. Tensors keep the dtypes of the dense ones.
    """
    from transformers import AutoConfig

    if target.exists():
        raise CheckpointError(f"Expected a new folder, got {target}, which exists. Fix: delete it or choose another.")
    dense_config = read_hf_config(source)
    config = upcycled_config(dense_config, settings, source)
    upcycled = AutoConfig.for_model(**config)
    model_shape(upcycled)
    dense_shapes = weight_shapes(dense_config)
    upcycled_shapes = weight_shapes(upcycled)
    weights = FolderWeights(source, "the dense folder")
    dtypes = _check_weights(source, weights, dense_shapes, tied=dense_config.tie_word_embeddings)
    before, after = (sum(map(math.prod, shapes.values())) for shapes in (dense_shapes, upcycled_shapes))
    require_space(target, after * max(dtype.itemsize for dtype in dtypes.values()), "the mixture of experts")
    stream = _upcycled_weights(weights, upcycled_shapes, dtypes, settings)
    save_hf_folder(target, source, stream, None, config=config, max_shard_bytes=max_shard_bytes)
    return UpcycledModel(config["model_type"], before, after)


def _check_weights(
    source: Path, weights: FolderWeights, expected: Mapping[str, tuple[int, ...]], *, tied: bool
) -> dict[str, torch.dtype]:
    """Return the dtype of every weight that the dense model has."""
    names = weights.names()
    missing = sorted(expected.keys() - names)
    if missing:
        raise CheckpointError(
            f"Expected the {len(expected)} weights that config.json describes in {source}, got {len(missing)} fewer; "
            f"missing: {', '.join(missing[:3])}. Fix: download the complete folder."
        )
    if tied:
        check_tied_output(weights)
        names.discard(_OUTPUT)
    unexpected = sorted(names - expected.keys())
    if unexpected:
        raise CheckpointError(
            f"Expected only weights of the dense model in {source}, got {', '.join(unexpected[:3])}. Fix: choose a "
            "model whose config.json describes all of its weights."
        )
    dtypes = {}
    for name, shape in expected.items():
        stored_shape, stored = weights.describe(name)
        if stored_shape != shape or stored not in DTYPES:
            raise CheckpointError(
                f"Expected {name} with shape {shape} in {' or '.join(DTYPES)} in {source}, got {stored_shape} in "
                f"{stored}. Fix: use an unquantized folder whose config.json describes its weights."
            )
        dtypes[name] = DTYPES[stored]
    return dtypes


def _upcycled_weights(
    weights: FolderWeights,
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
    settings: Upcycling,
) -> Iterator[tuple[str, Tensor]]:
    """Stream every weight of the mixture of experts by its name on disk."""
    for name, shape in shapes.items():
        expert = _EXPERT.fullmatch(name)
        if expert is not None:
            yield name, _expert_weight(weights[f"{expert[1]}.{expert[2]}.weight"], name, settings)
        elif name in dtypes:
            yield name, weights[name]
        else:
            yield name, new_weight(name, shape, settings.seed).to(_dtype_beside(name, dtypes))


def _expert_weight(dense: Tensor, name: str, settings: Upcycling) -> Tensor:
    if settings.noise == 0:
        return dense
    weight = dense.float()
    noise = torch.randn(weight.shape, generator=_generator(settings.seed, name))
    return weight.add(noise, alpha=settings.noise * float(weight.std())).to(dense.dtype)


def new_weight(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return a weight that the dense model does not have.

    The output of the shared expert is zero because its down projection is. Its other projections are random, so that
    the down projection receives a gradient. Its gate and the biases of q, k and v are zero.
    """
    if name.endswith(_ROUTER) or _SHARED_EXPERT_INPUT.fullmatch(name):
        return INIT_STD * torch.randn(shape, generator=_generator(seed, name))
    return torch.zeros(shape)


def _dtype_beside(name: str, dtypes: Mapping[str, torch.dtype]) -> torch.dtype:
    """Return the dtype of the dense weights next to a new one."""
    if name.endswith(".bias"):
        return dtypes[f"{name.removesuffix('bias')}weight"]
    return dtypes[f"{name.partition('.mlp.')[0]}.mlp.gate_proj.weight"]


def _generator(seed: int, name: str) -> torch.Generator:
    """Return the random numbers of one tensor, which depend on nothing but the seed and the name."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    # Shifted to 63 bits, so that it is a positive int64.
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
