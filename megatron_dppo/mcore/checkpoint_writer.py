"""Megatron's ``torch_dist`` format, written tensor by tensor.

Megatron's own strategy copies everything that a rank writes to host memory first, and forks processes that write it: at
30B on 8 GPUs, 53 GB a rank. Here torch's file writer copies 10 MB ahead of what it writes. The files are the same.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_torch_dist

_COPIED_AHEAD = 10_000_000
"""bytes"""


class StreamedSave(TorchDistSaveShardedStrategy):
    """Each rank writes one file, without a second copy of what is in it.

    Args:
        world: all ranks, in their order; for the plan, which is made of Python objects. None = the default group.
        staged: copy what this rank writes to host memory in ``async_save``, so that the state may change from then on.
    """

    def __init__(self, world: dist.ProcessGroup | None, *, staged: bool = False) -> None:
        super().__init__("torch_dist", 1)
        self._world, self._staged = world, staged

    def async_save(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path, async_strategy: str = ""
    ) -> AsyncRequest:
        """What writes the shards of which this rank is the main replica: a collective of all ranks when it is called.

        It raises torch's ``CheckpointException`` when a rank cannot write, with the reason of each. ``async_strategy``
        is an argument of Megatron Core 0.19.2, for its own writers.
        """
        for entry in nested_values(sharded_state_dict) if self._staged else ():
            if isinstance(entry, ShardedTensor) and is_main_replica(entry.replica_id):
                entry.data = entry.data.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        found, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica=True)
        write = partial(
            save_torch_dist,
            mcore_to_pyt_state_dict(found),
            # The caller brings the files to the disk. Copying ahead needs the stream of the thread's GPU.
            storage_writer=_Writer(
                checkpoint_dir, sync_files=False, per_thread_copy_ahead=0 if self._staged else _COPIED_AHEAD
            ),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
            process_group=self._world,
        )
        return AsyncRequest(async_fn=write, async_fn_args=(), finalize_fns=[])


class _Writer(FileSystemWriter):
    """Torch's, which leaves the folder's path and a random number out of ``.metadata``: the one is a class that a
    reader would have to allow, and with the other no two checkpoints of the same state would be the same."""

    def storage_meta(self) -> None:
        return None


def shared_save(world: dist.ProcessGroup | None, replicas: dist.ProcessGroup | None, *, staged: bool) -> Any:
    """``StreamedSave`` that the ranks of ``replicas`` (data and context parallelism) share where they hold the same."""
    return FullyParallelSaveStrategyWrapper(StreamedSave(world, staged=staged), replicas)
