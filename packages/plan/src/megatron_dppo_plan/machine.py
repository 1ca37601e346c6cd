"""GPUs and their links by data sheet, the fraction a run is expected to reach, and FLOP counts of operations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from megatron_dppo.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class GpuNode:
    """A GPU model and its node."""

    name: str
    memory: int
    """Bytes of device memory."""
    flops: Mapping[str, float]
    """Dense FLOP/s of matrix products by dtype."""
    memory_bandwidth: float
    """Bytes per second of device memory."""
    node_bandwidth: float
    """Bytes per second from a GPU to GPUs of its NVLink domain."""
    network_bandwidth: float
    """Bytes per second from a GPU to other NVLink domains, and as many in the other direction."""
    gpus_per_node: int = 8
    gpus_per_domain: int = 8
    """GPUs that NVLink connects: a node, or a rack of them."""
    host_link_bandwidth: float = 64e9
    """Bytes per second between a GPU and its host in each direction. H100 SXM data sheet: PCIe Gen5, 128 GB/s."""
    host_memory_bandwidth: float = 2 * 307.2e9 / 8
    """Bytes per second of host memory for each GPU. DGX H100 and H200: two Xeon Platinum 8480C, each with 8 channels of
    DDR5-4800, 307.2 GB/s (Intel's specifications)."""
    host_memory: int = 2 * 2**40
    """Bytes of host memory of a node. DGX H100 and H200 data sheets: 2 TB."""
    disk_bandwidth: float = 2e9
    """Bytes per second that a node writes to a shared file system: an assumption."""
    reserved: int = 4 * 2**30
    """Estimated bytes of the CUDA context, NCCL's buffers and library workspaces, until they are measured."""
    sleeping_server_bytes: int = 3 * 2**30
    """Estimated bytes on the GPU of an inference server that released weights and cache, until they are measured: CUDA
    context, CUDA graphs and NCCL's buffers."""
    flops_efficiency: float = 0.5
    """Fraction of ``flops`` that large products reach in training: an estimate, +- 30 %."""
    bandwidth_efficiency: float = 0.7
    """The same fraction for memory and links."""

    def operation_seconds(self, flops: int, dtype: str, moved: int) -> float:
        """Return the roofline time of an operation: the longer of arithmetic and memory traffic."""
        peak = self.flops.get(dtype, self.flops["float32"]) * self.flops_efficiency
        return max(flops / peak, moved / (self.memory_bandwidth * self.bandwidth_efficiency))

    def collective_seconds(self, name: str, ranks: tuple[int, ...], sent: int) -> float:
        """Return the time of collectives that get ``sent`` bytes from each rank, by the bytes that a ring moves."""
        size = len(ranks)
        if size == 1:
            return 0.0
        is_within_domain = len({rank // self.gpus_per_domain for rank in ranks}) == 1
        link = (self.node_bandwidth if is_within_domain else self.network_bandwidth) * self.bandwidth_efficiency
        return sent * _ring_factor(name, size) / link

    def host_optimizer_seconds(self, parameters: int, gradient: int) -> float:
        """Return the time of one update of offloaded parameters, without overlap.

        ``gradient`` is its bytes on the link. bf16 weights return; torch converts both on the host.
        """
        # Host memory per parameter: write the fp32 gradient (4), read gradient, copy and moments (16), write copy and
        # moments (12), read the copy (4), write the bf16 weight (2).
        memory_seconds = parameters * (4 + 16 + 12 + 4 + 2) / self.host_memory_bandwidth
        link_seconds = parameters * (gradient + 2) / self.host_link_bandwidth
        return (link_seconds + memory_seconds) / self.bandwidth_efficiency


def _ring_factor(name: str, size: int) -> float:
    """Return the bytes through a rank's link for each byte of its input."""
    if name.startswith("allreduce"):
        return 2 * (size - 1) / size
    if name.startswith(("allgather", "_allgather")):
        return size - 1
    if name.startswith(("reduce_scatter", "_reduce_scatter", "alltoall")):
        return (size - 1) / size
    if name in ("send", "recv", "broadcast"):
        return 1.0
    raise PlanError(f"No cost model for the collective {name}. Fix: add it to megatron_dppo_plan/machine.py")


_HOPPER = {"bfloat16": 989.4e12, "float16": 989.4e12, "float32": 67e12, "float64": 67e12}
"""H100 SXM data sheet (nvidia.com/en-us/data-center/h100): BF16 tensor core 1,979 with sparsity, so 989.4 dense; FP32
67, without TF32. The H200 (nvidia.com/en-us/data-center/h200) has the same."""


MACHINES: Mapping[str, GpuNode] = {
    machine.name: machine
    for machine in (
        GpuNode(
            name="h100",
            memory=round(79.1 * 2**30),  # as reported by torch for the 80 GB version (vllm-project/vllm issue 27508)
            flops=_HOPPER,
            memory_bandwidth=3.35e12,  # data sheet: 3.35 TB/s
            node_bandwidth=450e9,  # NVLink 900 GB/s, both directions together
            network_bandwidth=50e9,  # DGX H100: one ConnectX-7 of 400 Gb/s for each GPU
        ),
        GpuNode(
            name="h200",
            memory=139 * 2**30,  # as reported by torch, of 141 GB
            flops=_HOPPER,
            memory_bandwidth=4.8e12,  # data sheet: 4.8 TB/s
            node_bandwidth=450e9,
            network_bandwidth=50e9,
        ),
        # GB300 NVL72 data sheet (nvidia.com/en-us/data-center/gb300-nvl72), for one of its 72 GPUs.
        GpuNode(
            name="gb300",
            memory=int(288e9),
            flops={"bfloat16": 2500e12, "float16": 2500e12, "float32": 80e12, "float64": 1.3e12},
            memory_bandwidth=8e12,
            node_bandwidth=900e9,  # NVLink 1.8 TB/s, both directions together
            network_bandwidth=100e9,  # one ConnectX-8 of 800 Gb/s for each GPU
            gpus_per_node=4,
            gpus_per_domain=72,
            host_link_bandwidth=450e9,  # NVLink-C2C 900 GB/s, both directions together
            host_memory_bandwidth=512e9 / 2,  # a Grace CPU for two GPUs
            host_memory=2 * 480 * 10**9,
        ),
    )
}


def get_machine(name: str) -> GpuNode:
    """Return a machine of the table."""
    if name not in MACHINES:
        raise PlanError(f"--machine {name}: expected one of {', '.join(MACHINES)}")
    return MACHINES[name]


_aten = torch.ops.aten
_CPU_ATTENTION_FORWARD = _aten._scaled_dot_product_flash_attention_for_cpu
_CPU_ATTENTION_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward
_MATMULS = (_aten.mm, _aten.addmm)


def compute_dtype(func: Any, args: Sequence[Any], inputs: Sequence[Tensor]) -> torch.dtype:
    """Return the dtype of an operation's arithmetic."""
    if func._overloadpacket in _MATMULS:
        return _matmul_factors(func._overloadpacket, args)[0].dtype
    return inputs[0].dtype if inputs else torch.float32


def _matmul_factors(packet: Any, args: Sequence[Any]) -> tuple[Tensor, Tensor]:
    return args[0:2] if packet is _aten.mm else args[1:3]  # type: ignore[return-value]


def count_flops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """Return the FLOPs of an operation: 2 for a multiply-add, 0 where torch counts none.

    Causal attention counts half of torch's number, since kernels skip the masked half.
    """
    packet = func._overloadpacket
    if packet is _CPU_ATTENTION_FORWARD:
        shapes = _with_equal_heads(args[:3])
        return int(sdpa_flop_count(*shapes)) // (1 + _is_causal(func, args, kwargs))
    if packet is _CPU_ATTENTION_BACKWARD:
        # The gradient of the output comes first; it has the queries' heads.
        shapes = _with_equal_heads(args[:4])
        return int(sdpa_backward_flop_count(*shapes)) // (1 + _is_causal(func, args, kwargs))
    if packet in _MATMULS:
        # Torch's own formula fails for the overload with out_dtype.
        left, right = _matmul_factors(packet, args)
        return 2 * left.shape[0] * left.shape[1] * right.shape[1]
    if packet is _aten.convolution_backward:
        return _convolution_backward_flops(args)
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=out))
    name = func._schema.name
    if any(part in name for part in ("attention", "::mm", "::bmm", "matmul", "conv", "gemm", "grouped_mm")):
        raise PlanError(f"No FLOP formula for {name}. Fix: add it to megatron_dppo_plan/machine.py")
    return 0


def _with_equal_heads(tensors: Sequence[Tensor]) -> list[torch.Size]:
    """Return the shapes with the first tensor's heads: torch 2.11 has no formula for fewer heads of keys."""
    heads = tensors[0].shape[1]
    return [torch.Size((x.shape[0], heads, *x.shape[2:])) for x in tensors]


def _convolution_backward_flops(args: Sequence[Any]) -> int:
    """Return the FLOPs of a convolution's backward pass: each requested gradient costs as much as the forward pass.

    Torch's own formula counts a product of all channels for the gradient of a weight of channels in groups.
    """
    gradient, _, weight = args[:3]
    assert not args[7], "transposed convolutions have other sizes"
    needs_input, needs_weight = args[10][:2]
    forward = 2 * gradient.numel() * weight[0].numel()
    return forward * (needs_input + needs_weight)


def _is_causal(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if "is_causal" in kwargs:
        return bool(kwargs["is_causal"])
    position = [argument.name for argument in func._schema.arguments].index("is_causal")
    return bool(args[position]) if position < len(args) else False
