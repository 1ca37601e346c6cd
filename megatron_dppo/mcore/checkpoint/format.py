"""Reading and writing of Megatron's ``torch_dist`` format, without reading anything twice.

Each rank has optimizer state of its own; data-parallel replicas share their weights. One of them reads each weight, and
the others receive it over the network instead of from the shared file system.
"""

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
from megatron_dppo.parallel.objects import all_gather_objects, run_on_leader

_T = TypeVar("_T")


def read_sharded(template: dict[str, Any], checkpoint: Path, replicas: dist.ProcessGroup | None) -> dict[str, Any]:
    """Return the template with the tensors of a checkpoint; a collective of all ranks.

    None as ``replicas``, the ranks that hold the same weights, experts included, makes every rank read all it holds.
    """
    strategy = _CollectiveLoad()
    try:
        run_on_leader(lambda: check_metadata(checkpoint), dist.group.WORLD)
        with restricted_loading():
            # Checked on all ranks first: Megatron runs collectives between this and the shards, and a rank that has
            # failed here would leave the others waiting.
            run_on_all_ranks(lambda: dist_checkpointing.load_common_state_dict(str(checkpoint)))
            return dist_checkpointing.load(
                template,
                str(checkpoint),
                strategy if replicas is None else FullyParallelLoadStrategyWrapper(strategy, replicas),
            )
    except (Exception, CheckpointException) as error:
        reason = str(error) if isinstance(error, CheckpointError) else summarize_error(error)
        raise CheckpointError(
            f"{checkpoint} cannot be loaded: {reason}. Its files are not those of a checkpoint of this "
            "model. Fix: choose another run.output_dir, or rename this checkpoint to resume from an older one."
        ) from error


class _CollectiveLoad(TorchDistLoadShardedStrategy):
    """Megatron's strategy, with read errors of one rank raised on all.

    Reason: with 0.19.2 each rank reads by itself, and the others would wait for the tensors of a failed one. With
        0.16.1 torch raises the error on all ranks.
    Affected: Megatron Core 0.19.
    Delete when: Megatron raises read errors on all ranks.
    """

    def load(self, *args: Any, **kwargs: Any) -> Any:
        """Load as Megatron's strategy does; it fails on all ranks or on none."""
        return run_on_all_ranks(lambda: super(_CollectiveLoad, self).load(*args, **kwargs))


def run_on_all_ranks(read: Callable[[], _T]) -> _T:
    """Return the result of ``read``; a collective that raises the CheckpointError of one rank on all."""
    result = None
    problem = ""
    try:
        result = read()
    except (Exception, CheckpointException) as error:
        problem = summarize_error(error)
    problems = all_gather_objects(problem, dist.group.WORLD)
    failed = [rank for rank, problem in enumerate(problems) if problem]
    if failed:
        where = "" if len(failed) == len(problems) else f" (on rank {', '.join(map(str, failed))})"
        raise CheckpointError(problems[failed[0]] + where)
    return result  # type: ignore[return-value]


_COPY_AHEAD_BYTES = 10_000_000
"""Bytes that torch's writer copies from the device ahead of writing."""


class StreamedSave(TorchDistSaveShardedStrategy):
    """Save strategy in which each rank writes one file, without a second copy of its contents in memory.

    ``world`` is a CPU group of all ranks, in their order, for the plan, which consists of Python objects; None is the
    default group. ``staged`` copies this rank's tensors to host memory in ``async_save``, so that the state may change
    afterwards.
    """

    def __init__(self, world: dist.ProcessGroup | None, *, staged: bool = False) -> None:
        super().__init__("torch_dist", 1)
        self._world = world
        self._staged = staged

    def async_save(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path, async_strategy: str = ""
    ) -> AsyncRequest:
        """Return the request that writes the shards of which this rank is the main replica.

        Its function is a collective of all ranks. It raises torch's ``CheckpointException``, with the reason of each
        rank, if one cannot write. ``async_strategy`` is an argument of Megatron Core 0.19 and is ignored.
        """
        # Only what this rank writes; other ranks write the other replicas.
        for entry in nested_values(sharded_state_dict) if self._staged else ():
            if isinstance(entry, ShardedTensor) and is_main_replica(entry.replica_id):
                entry.data = entry.data.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        main_replicas, _, _ = _replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, keep_only_main_replica=True
        )
        write = partial(
            save_torch_dist,
            mcore_to_pyt_state_dict(main_replicas),
            # The caller syncs the files. Copying ahead uses the current CUDA stream, so not in a background thread.
            storage_writer=_Writer(
                checkpoint_dir, sync_files=False, per_thread_copy_ahead=0 if self._staged else _COPY_AHEAD_BYTES
            ),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
            process_group=self._world,
        )
        return AsyncRequest(async_fn=write, async_fn_args=(), finalize_fns=[])


class _Writer(FileSystemWriter):
    """Torch's writer without the folder's path and the random id in ``.metadata``.

    The path is of a class that the restricted unpickler would have to allow. With the id, two checkpoints of the same
    state would differ.
    """

    def storage_meta(self) -> None:
        return None


def shared_save(world: dist.ProcessGroup | None, replicas: dist.ProcessGroup | None, *, staged: bool) -> Any:
    """Return a ``StreamedSave`` whose work replicas of the same tensors divide (data and context parallelism)."""
    return FullyParallelSaveStrategyWrapper(StreamedSave(world, staged=staged), replicas)
