"""Worker extension of a vLLM server of this trainer. It runs inside vLLM; nothing else in the package imports it.

    PYTHONPATH=.../megatron_dppo_engines/serving/vllm_extension ...
        --worker-extension-cls megatron_dppo_vllm.WorkerExtension
        --weight-transfer-config '{"backend": "megatron_dppo"}'

vLLM's own transfer backends broadcast over a communicator that only a trainer with vLLM installed can open, and none
runs on a CPU. This one joins a plain torch group (gloo or NCCL) and speaks the same routes. vLLM 0.32.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron_dppo_memory import copy_from_handle
from megatron_dppo_sums import record_loaded_digests, stop_recording, sums_as_loaded, sums_in_use
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import Backend, _get_default_group, _new_process_group_helper, _world
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

NAME = "megatron_dppo"


@dataclass
class JoinInfo(WeightTransferInitInfo):
    """A torch process group whose store is at ``host:port``; the servers' ranks start at ``rank_offset``."""

    host: str
    port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: str
    timeout: float


@dataclass
class Weights(WeightTransferUpdateInfo):
    """A bucket of tensors (names, dtypes, shapes), broadcast or in the trainer's memory."""

    names: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    memory: dict[str, Any] | None = None


class Arriving(NamedTuple):
    """A broadcast bucket that may not have arrived yet."""

    info: Weights
    data: torch.Tensor
    """Bytes of the bucket, uint8 [bytes]."""
    received: Any

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Wait for the bucket, and yield its tensors by Hugging Face name."""
        self.received.wait()
        yield from split_bucket(self.info, self.data)


def split_bucket(info: Weights, data: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a bucket by Hugging Face name."""
    parts = data.split(byte_sizes(info))
    for name, part, dtype, shape in zip(info.names, parts, info.dtypes, info.shapes, strict=True):
        yield name, part.view(getattr(torch, dtype)).view(shape)


def byte_sizes(info: Weights) -> list[int]:
    """Return the size of each tensor of a bucket in bytes."""
    items = [getattr(torch, name).itemsize for name in info.dtypes]
    return [math.prod(shape) * item for shape, item in zip(info.shapes, items, strict=True)]


class TorchGroupEngine(WeightTransferEngine[JoinInfo, Weights]):
    """Transfer of weights by Hugging Face name, over a torch process group or by reference.

    A broadcast bucket is loaded by the call after the one that announces it, so that the next bucket arrives meanwhile.
    That call also reports its errors.
    """

    init_info_cls = JoinInfo
    update_info_cls = Weights
    _group: Any = None
    _arriving: Arriving | None = None

    def init_transfer_engine(self, init_info: JoinInfo) -> None:
        """Join the process group; return when all ranks have joined."""
        self.shutdown()
        config = self.parallel_config
        rank = init_info.rank_offset + config.data_parallel_index * config.world_size + config.rank
        limit = timedelta(seconds=init_info.timeout)
        store = TCPStore(init_info.host, init_info.port, init_info.world_size, False, timeout=limit)
        with unbound_default_group():
            group, _ = _new_process_group_helper(
                init_info.world_size,
                rank,
                [],
                Backend(init_info.backend),
                PrefixStore(init_info.group_name, store),
                group_name=init_info.group_name,
                timeout=limit,
            )
        # ``new_group`` would register the ranks, but it works only within a default group.
        _world.pg_group_ranks[group] = {i: i for i in range(init_info.world_size)}
        self._group = group

    def start_weight_update(self) -> None:
        """Open an update. A broken update is ended first: vLLM would continue with its half-loaded layers."""
        self.drop_arriving()
        prepare(self.model, self.model_config, self.device)
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive some tensors (the base class waits for an accelerator, which a CPU does not have)."""
        info = self.parse_update_info(update_info)
        try:
            self.receive_weights(info)
        except BaseException:
            # vLLM ends the update here, and would be left with layers that have no weights.
            self.drop_arriving()
            close(self.model, self.model_config)
            raise
        if self.device.type != "cpu":
            # Not of the whole device: that would wait for the bucket that is arriving.
            torch.accelerator.current_stream().synchronize()

    def receive_weights(self, update_info: Weights) -> None:
        """Load a bucket."""
        if update_info.memory is not None:
            self.model.load_weights(split_bucket(update_info, copy_from_handle(update_info.memory, self.device)))
        else:
            # The order matters: the next bucket must be arriving while the one before is loaded.
            previous = self._arriving
            self._arriving = self._receive(update_info)
            self._load(previous)

    def _receive(self, info: Weights) -> Arriving:
        if self._group is None:
            raise RuntimeError("no process group: init_weight_transfer_engine was not called")
        # A new buffer each time: vLLM keeps views of it until a layer is complete.
        data = torch.empty(sum(byte_sizes(info)), dtype=torch.uint8, device=self.device)
        return Arriving(info, data, dist.broadcast(data, group=self._group, group_src=0, async_op=True))

    def _load(self, arriving: Arriving | None) -> None:
        if arriving is not None:
            self.model.load_weights(arriving.tensors())

    def drop_arriving(self) -> None:
        """Give up an update: do not wait for the bucket that was announced last."""
        self._arriving = None

    def finish_weight_update(self) -> None:
        """Load the last bucket, and close the update."""
        last = self._arriving
        self._arriving = None
        try:
            self._load(last)
        finally:
            close(self.model, self.model_config)
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def shutdown(self) -> None:
        """Leave the group."""
        group = self._group
        self._group = None
        if group is not None:
            dist.destroy_process_group(group)


WeightTransferEngineFactory.register_engine(NAME, TorchGroupEngine)


@contextmanager
def unbound_default_group() -> Iterator[None]:
    """Create groups in a ``with`` block that are not split from vLLM's default group.

    vLLM binds that group to a device; torch then makes every NCCL group by ``ncclCommSplit`` of its communicator, which
    waits for all of its ranks to do the same, in the same order. The trainer has the same function in
    ``weights/transfer_group.py``, which is not installed here.
    """
    default = _get_default_group() if dist.is_initialized() else None
    bound = None if default is None else default.bound_device_id
    if default is None or bound is None:
        yield
        return
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = bound


def experts(model: nn.Module) -> Iterator[Any]:
    """Yield the object that holds the kernel of each layer of experts."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if hasattr(method, "moe_kernel"):
            yield method


def prepare(model: nn.Module, model_config: Any, device: torch.device) -> None:
    """Prepare a model for new weights, whatever state an earlier update left."""
    close(model, model_config)
    record_loaded_digests(model)
    if device.type != "cpu":
        return
    # On a CPU vLLM packs the experts' weights only while a layer has no kernel: with one, a reload leaves them unpacked
    # where packed ones are read, and the model is wrong without an error (unquantized_fused_moe_method.py).
    for method in experts(model):
        method.megatron_dppo_kernel = method.moe_kernel
        method.moe_kernel = None


def close(model: nn.Module, model_config: Any) -> None:
    """End an update: layers that got no weights keep theirs, and their kernel."""
    finalize_layerwise_reload(model, model_config)
    for method in experts(model):
        if method.moe_kernel is None:
            method.moe_kernel = getattr(method, "megatron_dppo_kernel", None)
        method.megatron_dppo_kernel = None
    stop_recording(model)


def read_folder(folder: str) -> Iterator[tuple[str, Tensor]]:
    """Return an iterator over all tensors of a folder; ``ValueError`` at once if a file is missing or broken."""
    files = sorted(Path(folder).glob("*.safetensors"))
    index = Path(folder) / "model.safetensors.index.json"
    try:
        if index.exists():
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            files = [Path(folder) / name for name in sorted(names)]
        # All opened before the first is loaded, so that a broken file leaves the weights untouched.
        opened = [safe_open(file, framework="pt") for file in files]
    except Exception as error:
        # The client looks for the first words of this message.
        raise ValueError(f"weights not touched: {error}") from error
    if not opened:
        raise ValueError("weights not touched: the folder has no safetensors files")

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for file in opened:
            for name in file.keys():  # noqa: SIM118 (no dict)
                yield name, file.get_tensor(name)

    return tensors()


class WorkerExtension:
    """Mixin of vLLM's worker, called through ``/collective_rpc``."""

    def megatron_dppo_close_update(self) -> None:
        """End an update that was left open, if there is one; vLLM's own call raises an error if there is none."""
        if self._weight_update_active:  # type: ignore[attr-defined]
            self.weight_transfer_engine.drop_arriving()  # type: ignore[attr-defined]
            self.finish_weight_update()  # type: ignore[attr-defined]

    def megatron_dppo_load(self, folder: str) -> None:
        """Load a Hugging Face folder."""
        weights = read_folder(folder)
        runner = self.model_runner  # type: ignore[attr-defined]
        model = runner.get_model()
        with set_current_vllm_config(self.vllm_config):  # type: ignore[attr-defined]
            prepare(model, runner.model_config, self.device)  # type: ignore[attr-defined]
            try:
                self.reload_weights(weights_iterator=weights)  # type: ignore[attr-defined]
            finally:
                close(model, runner.model_config)

    def megatron_dppo_algorithm(self) -> str:
        """Return the algorithm of the digests (``megatron_dppo_digest``)."""
        return "sha256" if self.device.type == "cpu" else "words"  # type: ignore[attr-defined]

    def megatron_dppo_collectives(self) -> dict[str, Any]:
        """Return what a communicator with the trainer depends on: versions, and variables that must be equal."""
        nccl = torch.cuda.nccl.version() if torch.version.cuda else None
        return {
            "torch": str(torch.__version__),  # a subclass of str, which the engine core cannot send and dies of
            "nccl": None if nccl is None else ".".join(map(str, nccl[:3])),
            "variables": {name: os.environ.get(name) for name in ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE")},
        }

    def megatron_dppo_sums(self) -> dict[str, Any]:
        """Return the digests of all tensors, as they are used and as they were loaded."""
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        tp_rank = self._weight_checksum_prefix().rstrip(":").rpartition(":tp")[2]  # type: ignore[attr-defined]
        return {"tp_rank": int(tp_rank), "sums": sums_in_use(model), "loaded": sums_as_loaded(model)}
