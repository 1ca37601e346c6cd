"""Digests of the weights in a vLLM worker, as they were loaded and as they are used; runs inside vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron_dppo_digest import TensorDigests, device_algorithm
from torch import Tensor, nn
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

_UNIT_ROWS = 256
"""Rows of the identity that a packed layer multiplies at a time."""


def sums_in_use(model: nn.Module) -> dict[str, str]:
    """Return the digest of each tensor; of one that a CPU has packed out of reach, that of what is read back."""
    sums = RecordedSums()
    for name, weight in _weights_in_use(model):
        sums.add(plain_name(name), weight)
    return sums.read()


def _weights_in_use(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    # A tied head is the embedding under a second name, by which it is sent too. Where a CPU has packed a weight, vLLM
    # leaves an empty one.
    for name, weight in model.named_parameters(remove_duplicate=False):
        if weight.numel():
            yield name, weight
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and not weight.numel() and hasattr(module, "cpu_linear"):
            yield f"{name}.weight", _unpack(module, weight)


class RecordedSums:
    """Digests of tensors by name. On a GPU they stay there until ``read``."""

    def __init__(self) -> None:
        self._digests: dict[str, TensorDigests] = {}
        self._count = 0

    def add(self, name: str, weight: Tensor) -> None:
        """Add a tensor, which must not change before ``flush``. One of the same name is replaced."""
        algorithm = device_algorithm(weight.device)
        digests = self._digests.setdefault(algorithm, TensorDigests(algorithm))
        digests.add((name, self._count), 0, weight)
        self._count += 1

    def flush(self) -> None:
        """Finish all reads of the tensors, which may change afterwards."""
        for digests in self._digests.values():
            digests.flush()

    def read(self) -> dict[str, str]:
        """Return the hexadecimal digests."""
        results = [item for digests in self._digests.values() for item in digests.hexdigests().items()]
        return {name: ranks[0] for (name, _), ranks in sorted(results, key=lambda item: item[0][1])}


def sums_as_loaded(model: nn.Module) -> dict[str, str]:
    """Return the digests that ``record_loaded_digests`` recorded in the last update."""
    recorded = getattr(model, "megatron_dppo_loaded", None)
    return {} if recorded is None else recorded.read()


def plain_name(name: str) -> str:
    """Return the name that vLLM's checkpoints and SGLang use, in a model for images that of its language model."""
    name = name.removeprefix("language_model.").replace(".routed_experts.", ".")
    return name.replace(".base_layer.", ".")  # in layers with adapters


def record_loaded_digests(model: nn.Module) -> None:
    """Record, until ``stop_recording``, the digest of each tensor that a layer loads, before vLLM changes its form.

    vLLM calls a layer's ``process_weights_after_loading`` when all of its weights are in, and before it has packed,
    padded or reordered them.
    """
    names = {id(module): name for name, module in model.named_modules()}
    loaded = RecordedSums()
    model.megatron_dppo_loaded = loaded

    def recording(process: Any) -> Any:
        def process_weights_after_loading(layer: nn.Module) -> None:
            for name, weight in layer.named_parameters(recurse=False) if id(layer) in names else ():
                loaded.add(plain_name(f"{names[id(layer)]}.{name}"), weight)
            loaded.flush()
            process(layer)

        return process_weights_after_loading

    # Layers can share a method, which is wrapped once.
    for method in {id(m): m for m in quantize_methods(model)}.values():
        method.process_weights_after_loading = recording(method.process_weights_after_loading)


def quantize_methods(model: nn.Module) -> Iterator[Any]:
    """Yield the object of each layer that changes the form of its weights."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, QuantizeMethodBase):
            yield method


def stop_recording(model: nn.Module) -> None:
    """Stop recording at the end of an update; the recorded digests stay."""
    for method in quantize_methods(model):
        # The wrapper is an attribute of the object; below it is the method of the class.
        vars(method).pop("process_weights_after_loading", None)


@torch.inference_mode()
def _unpack(module: Any, weight: Tensor) -> Tensor:
    """Return a packed layer's weights as they were before packing.

    A row of the identity gives one column of the weights without rounding: one product, and sums with zeros. So a
    single element that changed by one bit shows. In the rounded product with another input it would not. A zero may
    lose its sign.
    """
    # The shape before packing, which vLLM keeps for reloads; not of layers with adapters.
    known = get_layerwise_info(module).restore_metadata[0].get("weight")
    width = module.input_size_per_partition if known is None else known.shape[-1]
    columns = []
    for start in range(0, width, _UNIT_ROWS):
        rows = torch.arange(min(_UNIT_ROWS, width - start))
        inputs = torch.zeros(len(rows), width, dtype=weight.dtype)
        inputs[rows, start + rows] = 1
        columns.append(module.cpu_linear(inputs, weight, None).T)
    return torch.cat(columns, 1)
