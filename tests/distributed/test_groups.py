"""Groups for what ranks tell each other: the ranks of Megatron's groups, over the CPU, with a limit of their own."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from columns import same
from megatron_dppo.parallel.groups import ParallelGroups
from megatron_dppo.parallel.objects import all_gather_objects, all_to_all_objects, broadcast_object, scatter_object
from megatron_dppo.parallel.platform import Platform
from tests.distributed.spawn import run_distributed
from tests.unit.configs import ONE_RANK

pytestmark = pytest.mark.distributed


def limit_of(group: dist.ProcessGroup) -> timedelta:
    return group._get_backend(torch.device("cpu")).options._timeout


def initialize(world_size: int, sizes: dict[str, int], **limits: float) -> ParallelGroups:
    """Build the groups of a layout whose other sizes are 1."""
    from megatron_dppo.mcore.shims import apply_shims

    platform = Platform.detect(force_cpu=True)
    apply_shims(platform)
    from megatron_dppo.mcore.setup import initialize_megatron

    layout = replace(ONE_RANK, world_size=world_size, **sizes)
    return initialize_megatron(layout, platform, seed=1, timeout_minutes=3, **limits)


def check(rank: int, world_size: int) -> None:
    groups = initialize(4, {"tp": 2, "dp": 2, "etp": 2, "expert_dp": 2}, wait_minutes=50)
    ranks = {name: dist.get_process_group_ranks(getattr(groups, name)) for name in ("dp", "replica", "world", "tp")}
    pair = [rank - rank % 2, rank - rank % 2 + 1]
    assert ranks == {"dp": [rank % 2, rank % 2 + 2], "replica": pair, "world": [0, 1, 2, 3], "tp": pair}
    assert dist.get_backend(groups.world) == "gloo" and limit_of(groups.world) == timedelta(minutes=50)
    for group in (groups.dp, groups.replica):
        assert dist.get_backend(group) == "shared_mesh", "it has no connections of its own"
    from megatron.core import parallel_state

    assert parallel_state._DATA_PARALLEL_GROUP_GLOO is None, "it would have as many connections, and nothing uses it"
    for group in (groups.tp, groups.dp_cp):
        assert group is not None and limit_of(group) == timedelta(minutes=3)
    # What one says, the others of its group hear, and nobody else.
    assert broadcast_object(lambda: f"of {rank}", groups.replica) == f"of {pair[0]}"
    assert all_gather_objects(rank, groups.dp) == [rank % 2, rank % 2 + 2]
    assert groups.dp is not None
    assert all_to_all_objects([[f"{rank} to {other}"] for other in ranks["dp"]], groups.dp) == [
        f"{other} to {rank}" for other in ranks["dp"]
    ]
    check_columns(rank, groups)


def check_columns(rank: int, groups: ParallelGroups) -> None:
    """Tensors arrive as they are, views without what lies around them; each rank gets what it needs."""
    assert groups.world is not None
    whole = torch.arange(1000, dtype=torch.int32)
    sent: dict[str, Any] = {
        "view": whole[3:8],
        "again": whole[3:8],
        "across": torch.arange(6).view(2, 3).t(),
        "half": torch.tensor([1.5, float("-inf")]).bfloat16(),
        "bool": torch.tensor([True, False, True]),
        "nothing": torch.empty(0, 4, dtype=torch.uint8),
        "scalar": torch.tensor(-0.0),
        "rest": ("text", 1, None),
    }
    got = broadcast_object(lambda: sent, groups.world)
    assert same(got, {**sent, "across": sent["across"].contiguous()} if rank else sent)
    if rank:
        assert got["view"].untyped_storage().nbytes() < 1000, "a view brings nothing but itself"
    # Parts of odd sizes, so that what follows them is not aligned by accident.
    swapped = all_to_all_objects([[sent, bytes(rank + other)] for other in range(4)], groups.world)
    assert [len(each) for each in swapped[1::2]] == [other + rank for other in range(4)]
    assert all(same(each["view"], whole[3:8]) for each in swapped[::2])

    needs = [None, "few", None, "few"]
    made = scatter_object(lambda: whole, groups.world, needs, lambda value, need: value[:2] if need else value)
    assert same(made, whole[:2] if needs[rank] else whole)
    assert scatter_object(lambda: whole, groups.world, [None] * 4, lambda *_: whole[:0]).shape == whole.shape


def check_one_group(rank: int, world_size: int) -> None:
    groups = initialize(2, {"dp": 2, "ep": 2})
    assert groups.dp is groups.world
    assert groups.replica is not None and dist.get_process_group_ranks(groups.replica) == [rank]
    assert all_gather_objects(rank, groups.dp) == [0, 1]


def test_data_parallel_ranks_that_are_all_ranks_share_the_group_of_the_world() -> None:
    run_distributed(check_one_group, 2)


def test_ranks_talk_over_the_cpu_with_a_limit_of_their_own() -> None:
    run_distributed(check, 4)
