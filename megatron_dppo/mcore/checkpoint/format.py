"""Megatron's ``torch_dist`` format, read once by each group of ranks that hold the same.

The optimizer's part is one rank's alone; the weights are those of all data-parallel replicas. Of these one reads each
tensor, and the others receive it over their own network instead of from the file system that all ranks share.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_torch_dist

from megatron_dppo.errors import CheckpointError
from megatron_dppo.files import summarize_error
from megatron_dppo.mcore.checkpoint.manifest import check_metadata, restricted_loading
from megatron_dppo.parallel.objects import agreed, from_each

T = TypeVar("T")


def read_sharded(template: dict[str, Any], checkpoint: Path, replicas: dist.ProcessGroup | None) -> dict[str, Any]:
    """What Megatron loads of a checkpoint, in the place of the template's tensors (a collective of all ranks).

    Args:
        template: of this rank.
        checkpoint: the folder.
        replicas: ranks that hold the same weights, experts included; None = every rank reads all that it holds.

    Raises:
        CheckpointError: it cannot be loaded here, or on another rank; the same on all.
    """
    strategy = _AgreedLoad()
    try:
        agreed(lambda: check_metadata(checkpoint), dist.group.WORLD)
        with restricted_loading():
            # Between this and the shards Megatron lets the ranks talk to each other.
            _on_all(lambda: dist_checkpointing.load_common_state_dict(str(checkpoint)))
            return dist_checkpointing.load(
                template,
                str(checkpoint),
                strategy if replicas is None else FullyParallelLoadStrategyWrapper(strategy, replicas),
            )
    except (Exception, CheckpointException) as error:
        reason = str(error) if isinstance(error, CheckpointError) else summarize_error(error)
        raise CheckpointError(
            f"{checkpoint} cannot be loaded: {reason}. Its files are not those of a checkpoint of this "
            "model; choose another run.output_dir, or set it aside (rename it) to continue from an older one"
        ) from error


class _AgreedLoad(TorchDistLoadShardedStrategy):
    """A rank that cannot read says so before the others wait for what it reads. Under Megatron Core 0.19.2 each rank
    reads by itself; under 0.16.1 torch tells the others."""

    def load(self, *args: Any, **options: Any) -> Any:
        """See Megatron's; fails on all ranks, or on none."""
        return _on_all(lambda: super(_AgreedLoad, self).load(*args, **options))


def _on_all(read: Callable[[], T]) -> T:
    """What ``read`` returns here.

    Raises:
        CheckpointError: it has failed on a rank, which the message names where others have not; the same on all.
    """
    found, problem = None, ""
    try:
        found = read()
    except (Exception, CheckpointException) as error:
        problem = summarize_error(error)
    problems = from_each(problem, dist.group.WORLD)
    failed = [rank for rank, problem in enumerate(problems) if problem]
    if failed:
        where = "" if len(failed) == len(problems) else f" (on rank {', '.join(map(str, failed))})"
        raise CheckpointError(problems[failed[0]] + where)
    return found  # type: ignore[return-value]


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
