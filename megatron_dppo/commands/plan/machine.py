"""What a GPU and its links can do, by data sheet, and which part of it a run can be expected to reach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from megatron_dppo.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class GpuNode:
    """One kind of GPU in nodes of eight."""

    name: str
    memory: int
    """bytes of device memory"""
    flops: Mapping[str, float]
    """dense FLOP/s of matrix products by dtype"""
    memory_bandwidth: float
    """bytes a second"""
    node_bandwidth: float
    """bytes a second that a GPU sends to GPUs of its node"""
    network_bandwidth: float
    """bytes a second that a GPU sends to other nodes, and receives at the same time"""
    gpus_per_node: int = 8
    host_link_bandwidth: float = 64e9
    """bytes a second between a GPU and its host, each way; H100 SXM data sheet: PCIe Gen5, 128 GB/s in all"""
    host_memory_bandwidth: float = 2 * 307.2e9 / 8
    """bytes a second of the host's memory, for each of its GPUs; DGX H100 and H200: two Xeon Platinum 8480C, each with
    8 channels of DDR5-4800, 307.2 GB/s (Intel's specifications)"""
    reserved: int = 4 * 2**30
    """bytes of the CUDA context, NCCL's buffers and library workspaces: an estimate, to be replaced by a measurement"""
    asleep: int = 3 * 2**30
    """bytes that an inference server keeps on its GPU when it has released weights and cache, in its CUDA context, CUDA
    graphs and NCCL's buffers: an estimate, to be replaced by a measurement"""
    reached_flops: float = 0.5
    """part of ``flops`` that large products reach in training: an estimate, margin +- 30 %"""
    reached_bandwidth: float = 0.7
    """the same for memory and links"""

    def seconds_of(self, flops: int, dtype: str, moved: int) -> float:
        """Of one operation: the longer of its products and its memory traffic."""
        peak = self.flops.get(dtype, self.flops["float32"]) * self.reached_flops
        return max(flops / peak, moved / (self.memory_bandwidth * self.reached_bandwidth))

    def seconds_of_collective(self, name: str, ranks: tuple[int, ...], sent: int) -> float:
        """Of ``sent`` bytes given to collectives of a group, by the bytes that a ring moves through each rank."""
        size = len(ranks)
        if size == 1:
            return 0.0
        inside = len({rank // self.gpus_per_node for rank in ranks}) == 1
        link = (self.node_bandwidth if inside else self.network_bandwidth) * self.reached_bandwidth
        return sent * _factor(name, size) / link

    def seconds_on_host(self, parameters: int, gradient: int) -> float:
        """Of one update of so many parameters on the host, one part after the other.

        The link carries gradients of ``gradient`` bytes there and bf16 weights back (torch converts on the host). The
        host writes the gradients in fp32, reads them, copies and moments, writes the last three and rounds the weights.
        """
        moved = parameters * (4 + 16 + 12 + 4 + 2) / self.host_memory_bandwidth
        return (parameters * (gradient + 2) / self.host_link_bandwidth + moved) / self.reached_bandwidth


def _factor(name: str, size: int) -> float:
    """Bytes through a rank's link for each byte that it gives."""
    if name.startswith("allreduce"):
        return 2 * (size - 1) / size
    if name.startswith(("allgather", "_allgather")):
        return size - 1
    if name.startswith(("reduce_scatter", "_reduce_scatter", "alltoall")):
        return (size - 1) / size
    if name in ("send", "recv", "broadcast"):
        return 1.0
    raise PlanError(f"no cost for the collective {name}: teach it to megatron_dppo/commands/plan/machine.py")


_HOPPER = {"bfloat16": 989.4e12, "float16": 989.4e12, "float32": 67e12, "float64": 67e12}
"""H100 SXM data sheet (nvidia.com/en-us/data-center/h100): BF16 tensor core 1,979 with sparsity, so 989.4 dense; FP32
67, without TF32. The H200 (nvidia.com/en-us/data-center/h200) has the same."""


MACHINES: Mapping[str, GpuNode] = {
    machine.name: machine
    for machine in (
        GpuNode(
            name="h100",
            memory=round(79.1 * 2**30),  # of the 80 GB version, in torch's own messages (vllm-project/vllm issue 27508)
            flops=_HOPPER,
            memory_bandwidth=3.35e12,  # data sheet: 3.35 TB/s
            node_bandwidth=450e9,  # NVLink 900 GB/s, both directions together
            network_bandwidth=50e9,  # DGX H100: one ConnectX-7 of 400 Gb/s for each GPU
        ),
        GpuNode(
            name="h200",
            memory=139 * 2**30,  # what torch reports of its 141 GB
            flops=_HOPPER,
            memory_bandwidth=4.8e12,  # data sheet: 4.8 TB/s
            node_bandwidth=450e9,
            network_bandwidth=50e9,
        ),
    )
}


def machine_named(name: str) -> GpuNode:
    """A machine of the table.

    Raises:
        PlanError: it is not there.
    """
    if name not in MACHINES:
        raise PlanError(f"--machine {name}: expected one of {', '.join(MACHINES)}")
    return MACHINES[name]


_aten = torch.ops.aten


_FORWARD = frozenset({_aten._scaled_dot_product_flash_attention_for_cpu})


_BACKWARD = frozenset({_aten._scaled_dot_product_flash_attention_for_cpu_backward})


_PRODUCTS = frozenset({_aten.mm, _aten.addmm})


def dtype_of(func: Any, args: Sequence[Any], used: Sequence[Tensor]) -> torch.dtype:
    """In which an operation computes: that of its factors."""
    if func._overloadpacket in _PRODUCTS:
        return _factors(func._overloadpacket, args)[0].dtype
    return used[0].dtype if used else torch.float32


def _factors(packet: Any, args: Sequence[Any]) -> tuple[Tensor, Tensor]:
    return args[0:2] if packet is _aten.mm else args[1:3]  # type: ignore[return-value]


def flops_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """Floating-point operations, a multiplication and an addition as two; 0 where torch counts none.

    Causal attention counts half of what torch counts: kernels leave the masked half out.

    Raises:
        PlanError: an attention or matrix operation without a formula.
    """
    packet = func._overloadpacket
    if packet in _FORWARD:
        query, key, value = args[:3]
        return int(sdpa_flop_count(query.shape, key.shape, value.shape)) // (1 + _is_causal(func, args, kwargs))
    if packet in _BACKWARD:
        shapes = [tensor.shape for tensor in args[:4]]
        return int(sdpa_backward_flop_count(*shapes)) // (1 + _is_causal(func, args, kwargs))
    if packet in _PRODUCTS:
        # Torch's own formula does not take the version with out_dtype.
        left, right = _factors(packet, args)
        return 2 * left.shape[0] * left.shape[1] * right.shape[1]
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=out))
    name = func._schema.name
    if any(part in name for part in ("attention", "::mm", "::bmm", "matmul", "conv", "gemm", "grouped_mm")):
        raise PlanError(f"no formula for the FLOPs of {name}: teach it to megatron_dppo/commands/plan/machine.py")
    return 0


def _is_causal(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """``is_causal`` of a call of attention."""
    if "is_causal" in kwargs:
        return bool(kwargs["is_causal"])
    place = [argument.name for argument in func._schema.arguments].index("is_causal")
    return bool(args[place]) if place < len(args) else False
