"""Megatron's ``torch_dist`` format, read once by each group of ranks that hold the same.

The optimizer's part is one rank's alone; the weights are those of all data-parallel replicas. Of these one reads each
tensor, and the others receive it over their own network instead of from the file system that all ranks share.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from torch.distributed.checkpoint.api import CheckpointException

from megatron_dppo.errors import CheckpointError
from megatron_dppo.files.disk import in_one_line
from megatron_dppo.mcore.unpickling import check_metadata, restricted_loading
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
        reason = str(error) if isinstance(error, CheckpointError) else in_one_line(error)
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
        problem = in_one_line(error)
    problems = from_each(problem, dist.group.WORLD)
    failed = [rank for rank, problem in enumerate(problems) if problem]
    if failed:
        where = "" if len(failed) == len(problems) else f" (on rank {', '.join(map(str, failed))})"
        raise CheckpointError(problems[failed[0]] + where)
    return found  # type: ignore[return-value]
