"""Weights and optimizer state on the host while the device is needed otherwise, and reference weights there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megatron_dppo.mcore.mapping import router_biases
from megatron_dppo.mcore.optim import Optimizer, optimizer_tensors


class OffloadedParameters:
    """Parameters in host memory that can be loaded onto the device.

    Unloaded parameters are empty tensors, so that using one by mistake fails instead of reading old values.

    Args:
        parameters: Parameters to offload. Those on CUDA are copied to pinned memory.
        device: Device on which they are used.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
        self._host_copies = [(p, to_host(p) if p.is_cuda else p.data) for p in parameters]
        self._device = device
        self.unload()

    def load(self) -> None:
        """Copy the parameters to the device."""
        for parameter, host_copy in self._host_copies:
            parameter.data = host_copy.to(self._device, non_blocking=True)

    def unload(self) -> None:
        """Free the parameters on the device. The host copies stay."""
        for parameter, _ in self._host_copies:
            parameter.data = parameter.data.new_empty(0)


class OffloadedModel:
    """Model chunks whose weights are in host memory between forward passes.

    Args:
        chunks: Unwrapped model chunks of this rank. They only run forward, without gradients.
        device: Device on which they run.
        by_layer: Load each transformer layer right before it runs and unload it right after, in every forward pass.
            All other weights are loaded for the duration of ``loaded``.
    """

    def __init__(self, chunks: Sequence[Any], device: torch.device, *, by_layer: bool) -> None:
        layers = [layer for chunk in chunks for layer in chunk.decoder.layers] if by_layer else []
        layer_parameter_ids = {id(p) for layer in layers for p in layer.parameters()}
        # A dict by id: tied weights appear in several chunks and must be offloaded once.
        resident = {id(p): p for chunk in chunks for p in chunk.parameters() if id(p) not in layer_parameter_ids}
        self._resident = OffloadedParameters(list(resident.values()), device)
        for layer in layers:
            offloaded = OffloadedParameters(list(layer.parameters()), device)
            layer.register_forward_pre_hook(lambda *_, offloaded=offloaded: offloaded.load())
            layer.register_forward_hook(lambda *_, offloaded=offloaded: offloaded.unload())

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """Keep the weights on the device inside the block, so that the chunks can run."""
        self._resident.load()
        try:
            yield
        finally:
            self._resident.unload()


def to_host(values: Tensor) -> Tensor:
    """A copy in host memory, page-locked where it comes from a GPU."""
    copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
    return copy.copy_(values.detach())


class ReferenceWeights:
    """A copy of this rank's shard, made when the model holds the reference policy.

    One copy of the shard in host memory for as long as this lives, and a second one while the two are swapped; nothing
    on the device. Gradients and optimizer are not touched.

    Args:
        chunks: the unwrapped model chunks of this rank.
    """

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self._parameters = [
            tensor for chunk in chunks for tensor in (*chunk.parameters(), *dict(router_biases(chunk)).values())
        ]
        self._host = [to_host(parameter) for parameter in self._parameters]

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The model is the reference policy inside, and what it was before, bit for bit, afterwards."""
        policy = [to_host(parameter) for parameter in self._parameters]
        self._write(self._host)
        try:
            yield
        finally:
            self._write(policy)

    @torch.no_grad()
    def _write(self, values: Sequence[Tensor]) -> None:
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.copy_(value)


_PIECE = 2**28
"""Bytes of host memory in one piece: torch rounds what it pins up to a power of two."""


_Host = tuple[Tensor, ...]


class DeviceState:
    """Empties storages in place and fills them again, so that every view of them stays what it is.

    Bytes of the host, pinned with CUDA, are kept from one time to the next: those of weights and optimizer state.

    Args:
        models: the model chunks of this rank, inside of Megatron's DDP.
        optimizer: theirs.
    """

    def __init__(self, models: Sequence[nn.Module], optimizer: Optimizer) -> None:
        self._models, self._optimizer = list(models), optimizer
        self._away: dict[torch.UntypedStorage, _Host] = {}
        """what left the device, with its bytes"""
        self._empty: dict[torch.UntypedStorage, int] = {}
        """gradient buffers that left, with their sizes: nothing of them is needed"""
        self._host: dict[torch.UntypedStorage, _Host] = {}

    @torch.no_grad()
    def offload(self, *, weights: bool) -> None:
        """Move gradient buffers and optimizer state off the device, and with ``weights`` the weights too.

        May be called again with ``weights``. In between, the weights can be read and computed with; only ``restore``
        makes an update possible. The gradients are zero then.
        """
        self._optimizer.finish_overlapped_gather()
        self._optimizer.drop_gradients()
        parameters = [parameter for model in self._models for parameter in model.parameters()]
        of_weights = set(_storages(parameters))
        gradients = [found for p in parameters if isinstance(found := getattr(p, "main_grad", None), Tensor)]
        for storage in _storages(gradients):
            if storage not in of_weights and storage.nbytes():
                self._empty[storage] = storage.nbytes()
        for storage in _storages(optimizer_tensors(self._optimizer)):
            if storage not in of_weights and storage.device == parameters[0].device:
                self._keep(storage)
        if weights:
            for storage in of_weights:
                self._keep(storage)
        _finish(parameters[0].device)
        for storage in (*self._empty, *self._away):
            storage.resize_(0)
        if parameters[0].is_cuda:
            torch.cuda.empty_cache()

    @torch.no_grad()
    def restore(self) -> None:
        """Everything is on the device again, bit for bit where it was."""
        for storage, host in self._away.items():
            storage.resize_(sum(map(len, host)))
            for piece, bytes_ in zip(_pieces(storage), host, strict=True):
                piece.copy_(bytes_, non_blocking=True)
        for storage, size in self._empty.items():
            storage.resize_(size)
            _bytes_of(storage).zero_()
        _finish(next(self._models[0].parameters()).device)
        self._host, self._away, self._empty = self._away, {}, {}  # a loaded checkpoint may have other storages

    def _keep(self, storage: torch.UntypedStorage) -> None:
        if not storage.nbytes():
            return
        host = self._host.get(storage, ())
        if sum(map(len, host)) != storage.nbytes():
            pinned = storage.device.type == "cuda"
            host = tuple(torch.empty(len(p), dtype=torch.uint8, pin_memory=pinned) for p in _pieces(storage))
            self._host[storage] = host
        for bytes_, piece in zip(host, _pieces(storage), strict=True):
            bytes_.copy_(piece, non_blocking=True)
        self._away[storage] = host


def _storages(tensors: Iterable[Tensor]) -> Iterator[torch.UntypedStorage]:
    """Each storage once."""
    return iter(dict.fromkeys(tensor.untyped_storage() for tensor in tensors))


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _pieces(storage: torch.UntypedStorage) -> Sequence[Tensor]:
    return _bytes_of(storage).split(_PIECE)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
