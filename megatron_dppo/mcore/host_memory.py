"""Weights and optimizer state in host memory while they are not needed on the device."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from megatron_dppo.mcore.mapping import router_biases
from megatron_dppo.mcore.optim import Optimizer, optimizer_tensors


class OffloadedParameters:
    """Parameters in host memory (those on CUDA in pinned memory) that can be loaded onto the device.

    Unloaded parameters are empty tensors, so that using one by mistake fails instead of reading old values.
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
    """Model chunks whose weights are in host memory between forward passes, which they run without gradients.

    ``by_layer`` loads each transformer layer right before it runs and unloads it right after, in every forward pass.
    All other weights are loaded for the duration of ``loaded``.
    """

    def __init__(self, chunks: Sequence[GPTModel], device: torch.device, *, by_layer: bool) -> None:
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
    """Return a copy in host memory, pinned if the values are on a GPU."""
    copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
    return copy.copy_(values.detach())


class ReferenceWeights:
    """Host copy of this rank's shard, made while the model holds the reference policy.

    It needs one copy of the shard in host memory, and a second one while the two are swapped. It needs no device
    memory. Gradients and optimizer state stay as they are.
    """

    def __init__(self, chunks: Sequence[GPTModel]) -> None:
        self._parameters = [
            tensor for chunk in chunks for tensor in (*chunk.parameters(), *dict(router_biases(chunk)).values())
        ]
        self._host = [to_host(parameter) for parameter in self._parameters]

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Make the model the reference policy inside the block; afterwards its weights are bitwise as before."""
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


BUFFER_BYTES = 2**28
"""Bytes of one pinned buffer. Torch rounds pinned allocations up to a power of two, so large ones waste memory."""
_HostBuffers = tuple[Tensor, ...]
"""Contents of one storage, in buffers of at most ``BUFFER_BYTES`` bytes."""


class DeviceState:
    """Offloads weights, optimizer state and gradient buffers from the device, and restores them.

    Storages are resized in place, so that all views of them stay valid: Megatron's parameters, ``main_grad`` and
    optimizer shards are views of a few large buffers. Host buffers, pinned with CUDA, are reused the next time.
    """

    def __init__(self, models: Sequence[nn.Module], optimizer: Optimizer) -> None:
        self._models = list(models)
        self._optimizer = optimizer
        self._offloaded: dict[torch.UntypedStorage, _HostBuffers] = {}
        """Storages that are off the device, with their contents."""
        self._emptied: dict[torch.UntypedStorage, int] = {}
        """Gradient buffers that are off the device, with their sizes in bytes. Their contents are not needed."""
        self._host_buffers: dict[torch.UntypedStorage, _HostBuffers] = {}

    @torch.no_grad()
    def offload(self, *, weights: bool) -> None:
        """Move gradient buffers and optimizer state off the device, and with ``weights`` the weights too.

        A second call with ``weights=True`` may follow one without. In between, the weights can be exported and used in
        forward passes. An update needs ``restore`` first, after which the gradients are zero.
        """
        self._optimizer.finish_overlapped_gather()
        self._optimizer.drop_gradients()
        parameters = [parameter for model in self._models for parameter in model.parameters()]
        weight_storages = set(_storages(parameters))
        gradients = [grad for p in parameters if isinstance(grad := getattr(p, "main_grad", None), Tensor)]
        for storage in _storages(gradients):
            # A gradient buffer that shares its storage with the weights holds weights too: it moves with them.
            if storage not in weight_storages and storage.nbytes():
                self._emptied[storage] = storage.nbytes()
        for storage in _storages(optimizer_tensors(self._optimizer)):
            if storage not in weight_storages and storage.device == parameters[0].device:
                self._copy_to_host(storage)
        if weights:
            for storage in weight_storages:
                self._copy_to_host(storage)
        # The copies are asynchronous: storages may shrink only after they are finished.
        _synchronize(parameters[0].device)
        for storage in (*self._emptied, *self._offloaded):
            storage.resize_(0)
        if parameters[0].is_cuda:
            torch.cuda.empty_cache()

    @torch.no_grad()
    def restore(self) -> None:
        """Move everything back to the device, bitwise as it was. Gradient buffers are zero."""
        for storage, host in self._offloaded.items():
            storage.resize_(sum(map(len, host)))
            for piece, host_piece in zip(_pieces(storage), host, strict=True):
                piece.copy_(host_piece, non_blocking=True)
        for storage, size in self._emptied.items():
            storage.resize_(size)
            _as_bytes(storage).zero_()
        _synchronize(next(self._models[0].parameters()).device)
        # Only the buffers of this time are kept: loading a checkpoint may have replaced storages.
        self._host_buffers = self._offloaded
        self._offloaded = {}
        self._emptied = {}

    def _copy_to_host(self, storage: torch.UntypedStorage) -> None:
        if not storage.nbytes():
            return
        host = self._host_buffers.get(storage, ())
        if sum(map(len, host)) != storage.nbytes():
            pinned = storage.device.type == "cuda"
            host = tuple(torch.empty(len(p), dtype=torch.uint8, pin_memory=pinned) for p in _pieces(storage))
            self._host_buffers[storage] = host
        for host_piece, piece in zip(host, _pieces(storage), strict=True):
            host_piece.copy_(piece, non_blocking=True)
        self._offloaded[storage] = host


def _storages(tensors: Iterable[Tensor]) -> Iterator[torch.UntypedStorage]:
    """Return an iterator over the tensors' storages, each once."""
    return iter(dict.fromkeys(tensor.untyped_storage() for tensor in tensors))


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _pieces(storage: torch.UntypedStorage) -> Sequence[Tensor]:
    return _as_bytes(storage).split(BUFFER_BYTES)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
