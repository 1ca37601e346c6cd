"""The process groups of a layout, passed as arguments instead of looked up."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed import ProcessGroup


@dataclass(frozen=True, kw_only=True)
class ParallelGroups:
    """One group per kind of parallelism that this rank takes part in; None = not sharded.

    The first seven are Megatron's, for tensors of the model. The last three are for what ranks tell each other: they go
    over the CPU, never through NCCL, and wait longer.
    """

    tp: ProcessGroup | None = None
    """tensor parallel: weights, vocabulary, sequence parallelism"""
    cp: ProcessGroup | None = None
    """context parallel"""
    pp: ProcessGroup | None = None
    """pipeline stages"""
    dp_cp: ProcessGroup | None = None
    """data and context parallel: ranks whose gradients of dense weights are summed"""
    ep: ProcessGroup | None = None
    """expert parallel"""
    etp: ProcessGroup | None = None
    """expert tensor parallel"""
    edp: ProcessGroup | None = None
    """expert data parallel: ranks that hold the same experts, and of the dense weights as a rule the same part"""
    dp: ProcessGroup | None = None
    """data parallel without context parallel: ranks with different samples"""
    replica: ProcessGroup | None = None
    """tensor, context and pipeline parallel: ranks that work on the same samples"""
    world: ProcessGroup | None = None
    """all ranks"""
