"""Process groups of a layout, passed as arguments instead of looked up in Megatron's globals."""

from dataclasses import dataclass

from torch.distributed import ProcessGroup


@dataclass(frozen=True, kw_only=True)
class ParallelGroups:
    """One group per kind of parallelism that this rank takes part in; None means not sharded.

    The first seven are Megatron's, for tensors of the model. The last three carry Python objects and control data: they
    use the CPU, never NCCL, and have longer timeouts. The connections of ``world``, a gloo group, serve all three.
    """

    tp: ProcessGroup | None = None
    cp: ProcessGroup | None = None
    pp: ProcessGroup | None = None
    dp_cp: ProcessGroup | None = None
    """Data and context parallel: ranks whose gradients of dense weights are summed."""
    ep: ProcessGroup | None = None
    etp: ProcessGroup | None = None
    edp: ProcessGroup | None = None
    """Expert data parallel: ranks that hold the same experts, and usually the same part of the dense weights."""
    dp: ProcessGroup | None = None
    """Data parallel without context parallel: ranks with different samples."""
    replica: ProcessGroup | None = None
    """Tensor, context and pipeline parallel: ranks that work on the same samples."""
    world: ProcessGroup | None = None
