"""Megatron's ``torch_dist`` format, written tensor by tensor.

Megatron's own strategy copies everything that a rank writes to host memory first, and forks processes that write it: at
30B on 8 GPUs, 53 GB a rank. Here torch's file writer copies 10 MB ahead of what it writes. The files are the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_torch_dist

from megatron_dppo.parallel.groups import ParallelGroups


class StreamedSave(SaveShardedStrategy):
    """Each rank writes one file, without a second copy of what is in it.

    Args:
        world: all ranks, in their order; for the plan, which is made of Python objects. None = the default group.
    """

    can_handle_sharded_objects = True

    def __init__(self, world: dist.ProcessGroup | None) -> None:
        super().__init__("torch_dist", 1)
        self._world = world

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        """Write the shards of which this rank is the main replica (a collective of all ranks).

        Raises:
            torch.distributed.checkpoint.api.CheckpointException: a rank cannot write; with the reason of each.
        """
        found, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica=True)
        save_torch_dist(
            mcore_to_pyt_state_dict(found),
            # The caller brings the files to the disk.
            storage_writer=_Writer(checkpoint_dir, sync_files=False),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
            process_group=self._world,
        )


class _Writer(FileSystemWriter):
    """Torch's, which leaves the folder's path and a random number out of ``.metadata``: the one is a class that a
    reader would have to allow, and with the other no two checkpoints of the same state would be the same."""

    def storage_meta(self) -> None:
        return None


def shared_save(groups: ParallelGroups) -> Any:
    """``StreamedSave`` that ranks with the same weights share."""
    return FullyParallelSaveStrategyWrapper(StreamedSave(groups.world), groups.dp_cp)
