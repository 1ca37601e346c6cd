"""Groups that share the connections of the group of all ranks, against gloo groups of the same ranks."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_dppo.parallel.objects import (
    all_gather_objects,
    all_to_all_objects,
    broadcast_object,
    gather_objects,
    scatter_object,
)
from tests.distributed.spawn import run_distributed

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.distributed

GROUPS: Sequence[Sequence[int]] = ([0, 1, 2, 3, 4], [1, 3, 4], [0, 2], [1, 2, 3, 4], [2])


def random_tensor(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(-(2**40), 2**40, shape, generator=torch.Generator().manual_seed(seed))


def results(group: dist.ProcessGroup, seed: int) -> list[torch.Tensor]:
    """Every collective of tensors, from every root."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    made: list[torch.Tensor] = []
    for root in range(size):
        value = random_tensor(seed + rank, 3, 2)
        dist.broadcast(value, group=group, group_src=root)
        made.append(value)
        parts = [torch.zeros(5, dtype=torch.int64) for _ in range(size)]
        dist.gather(random_tensor(seed + rank, 5), parts if rank == root else None, group=group, group_dst=root)
        outgoing = [random_tensor(seed + root + 7 * other, 4) for other in range(size)]
        received = torch.zeros(4, dtype=torch.int64)
        dist.scatter(received, outgoing if rank == root else None, group=group, group_src=root)
        made += [*parts, received]
    gathered = [torch.zeros(2, 3, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(gathered, random_tensor(seed + rank, 2, 3), group=group)
    total = random_tensor(seed + rank, 17)
    dist.all_reduce(total, group=group)
    equal = torch.zeros(2 * size, dtype=torch.int64)
    dist.all_to_all_single(equal, random_tensor(seed + rank, 2 * size), group=group)
    # Rank r sends (r + 2 s) % 4 rows to rank s; some send nothing.
    sent = [(rank + 2 * other) % 4 for other in range(size)]
    arriving = [(other + 2 * rank) % 4 for other in range(size)]
    uneven = torch.zeros(sum(arriving), 2, dtype=torch.int64)
    dist.all_to_all_single(uneven, random_tensor(seed + rank, sum(sent), 2), arriving, sent, group=group)
    if size > 1:
        neighbor = torch.zeros(3, dtype=torch.int64)
        receiving = dist.irecv(neighbor, group=group, group_src=(rank - 1) % size)
        assert receiving is not None
        dist.send(random_tensor(seed + rank, 3), group=group, group_dst=(rank + 1) % size)
        receiving.wait()
        made.append(neighbor)
    dist.barrier(group)
    return [*made, *gathered, total, equal, uneven]


def objects(group: dist.ProcessGroup) -> list[object]:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    scattered: list[object] = [None]
    dist.scatter_object_list(
        scattered, [f"for {other}" * (other + 1) for other in range(size)], group=group, group_src=0
    )
    gathered: list[object] = [None] * size
    dist.gather_object({"rank": rank, "text": "x" * rank}, gathered if rank == 0 else None, group=group, group_dst=0)
    listed: list[object] = [rank, "same"]
    dist.broadcast_object_list(listed, group=group, group_src=size - 1)
    return [
        scattered,
        gathered,
        listed,
        broadcast_object(lambda: ("from", rank), group),
        all_gather_objects(bytes(rank), group),
        gather_objects([rank], group),
        all_to_all_objects([[(rank, other)] * (other % 3) for other in range(size)], group),
        scatter_object(
            lambda: list(range(9)), group, [other % 2 for other in range(size)], lambda value, need: value[need:]
        ),
    ]


def check(rank: int, world_size: int) -> None:
    from megatron_dppo.parallel.shared_mesh import MessageTag, new_shared_mesh_group

    world = dist.new_group(backend="gloo")
    assert world is not None
    for number, members in enumerate(GROUPS):
        # Groups of one tag are disjoint; here all have one, and each is used up before the next.
        mesh = new_shared_mesh_group(members, world, MessageTag.REPLICA)
        reference = dist.new_group(list(members), backend="gloo")
        if rank not in members:
            assert mesh is dist.GroupMember.NON_GROUP_MEMBER
            continue
        assert reference is not None
        assert dist.get_process_group_ranks(mesh) == list(members)
        assert (dist.get_rank(mesh), dist.get_world_size(mesh)) == (members.index(rank), len(members))
        assert dist.get_backend(mesh) == "shared_mesh"
        for result, expected in zip(results(mesh, number), results(reference, number), strict=True):
            assert torch.equal(result, expected), (members, result, expected)
        assert objects(mesh) == objects(reference), members
    check_threads(rank, world)
    check_refusals(world)


def check_threads(rank: int, world: dist.ProcessGroup) -> None:
    """Groups with different tags and the group of all ranks, at once in three threads, in different orders."""
    from megatron_dppo.parallel.shared_mesh import MessageTag, new_shared_mesh_group

    groups = [world] + [
        new_shared_mesh_group(range(dist.get_world_size()), world, tag)
        for tag in (MessageTag.DATA_PARALLEL, MessageTag.BACKGROUND)
    ]
    expected = [results(world, seed) for seed in range(3)]
    failures: list[int] = []

    def use(index: int) -> None:
        for _ in range(20):
            made = results(groups[index], index)
            if not all(map(torch.equal, made, expected[index])):
                failures.append(index)

    threads = [threading.Thread(target=use, args=((index + rank) % 3,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def check_refusals(world: dist.ProcessGroup) -> None:
    from megatron_dppo.parallel.shared_mesh import MessageTag, new_shared_mesh_group

    group = new_shared_mesh_group(range(dist.get_world_size()), world, MessageTag.REPLICA)
    with pytest.raises(NotImplementedError, match="shared_mesh only adds"):
        dist.all_reduce(torch.zeros(1), dist.ReduceOp.MAX, group=group)
    with pytest.raises(NotImplementedError, match="shared_mesh has no reduce"):
        dist.reduce(torch.zeros(1), group=group, group_dst=0)
    with pytest.raises(NotImplementedError, match="shared_mesh has no all_gather_single"):
        dist.all_gather_into_tensor(torch.zeros(5), torch.zeros(1), group=group)
    with pytest.raises(NotImplementedError, match="got tag 3"):
        dist.send(torch.zeros(1), group=group, group_dst=(group.rank() + 1) % 5, tag=3)


def check_timeout(rank: int, world_size: int) -> None:
    """A rank that waits for one that never sends fails after the timeout of the group of all ranks."""
    from megatron_dppo.parallel.shared_mesh import MessageTag, new_shared_mesh_group

    world = dist.new_group(backend="gloo", timeout=timedelta(seconds=2))
    assert world is not None
    group = new_shared_mesh_group([0, 1], world, MessageTag.REPLICA)
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"(?i)timed out"):
            dist.recv(torch.zeros(1), 1, group=group)
    dist.barrier()


def test_collectives_are_those_of_gloo_and_threads_do_not_disturb_each_other() -> None:
    run_distributed(check, 5)


def test_a_rank_that_does_not_send_ends_the_wait_of_the_others() -> None:
    run_distributed(check_timeout, 2)


def test_a_rank_has_one_socket_to_each_other_rank_for_all_groups_over_the_cpu() -> None:
    """Counted by the script of the docs with 6 processes: groups of 3, of 2, and of all ranks twice."""
    command = [sys.executable, "-m", "benchmarks.sockets", "--ranks", "6", "--compute", "1024"]
    output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=240).stdout
    assert output.splitlines()[2:] == ["| 6 | 5 | 5 | 0.83 |", "| 1024 | - | 1023 | 1.00 |"]
