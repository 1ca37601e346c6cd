"""What training keeps on the device between updates, moved to the host while inference servers use the device.

Megatron's own helpers (``offload_grad_buffers``, ``MegatronOptimizer.offload_to_cpu``, 0.16 to 0.19) are not used: the
second gives the optimizer's parameters another storage, so that fp32 ones are no views of the model's weights any more
and training goes nowhere; both do nothing on a CPU, where they would have to be tested.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from megatron_dppo.mcore.optim import Optimizer, optimizer_tensors

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
    def leave(self, *, weights: bool) -> None:
        """Move gradient buffers and optimizer state off the device, and with ``weights`` the weights too.

        May be called again with ``weights``. In between, the weights can be read and computed with; only ``come_back``
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
    def come_back(self) -> None:
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
