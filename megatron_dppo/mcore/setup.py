"""Process groups and random states: Megatron's globals, returned as explicit arguments."""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch.distributed import Store  # type: ignore[attr-defined]

from megatron_dppo.config.layout import Layout
from megatron_dppo.parallel.groups import ParallelGroups
from megatron_dppo.parallel.network import connection_limit
from megatron_dppo.parallel.objects import all_gather_objects
from megatron_dppo.parallel.platform import Platform
from megatron_dppo.parallel.rendezvous import join_ranks
from megatron_dppo.parallel.shared_mesh import MessageTag, new_shared_mesh_group


def initialize_megatron(
    layout: Layout,
    platform: Platform,
    *,
    seed: int,
    timeout_minutes: float,
    wait_minutes: float | None = None,
    world: dist.ProcessGroup | None = None,
) -> ParallelGroups:
    """Build every process group of the layout and seed Megatron's random states.

    ``torch.distributed`` must be initialized already (``start_process_group``). ``wait_minutes`` (None:
    ``timeout_minutes``) is the timeout in the CPU groups for objects, where ranks may wait long for one that samples,
    scores or writes; it is ignored with ``world``, the result of ``new_host_world``, which has a timeout.
    """
    if world is not None:
        # One rank may have read files for minutes. The limit on connecting begins when all are here.
        dist.barrier(world)
    with connection_limit(dist.get_rank()):
        build_megatron_groups(layout, distributed_timeout_minutes=max(1, round(timeout_minutes)))
        seed_random_states(seed)
        world = world or new_host_world(wait_minutes or timeout_minutes)
        data_parallel = tuple(dist.get_process_group_ranks(parallel_state.get_data_parallel_group()))
        return ParallelGroups(
            tp=parallel_state.get_tensor_model_parallel_group(),
            cp=parallel_state.get_context_parallel_group(),
            pp=parallel_state.get_pipeline_model_parallel_group(),
            dp_cp=parallel_state.get_data_parallel_group(with_context_parallel=True),
            ep=parallel_state.get_expert_model_parallel_group(),
            etp=parallel_state.get_expert_tensor_parallel_group(),
            edp=parallel_state.get_expert_data_parallel_group(),
            # Megatron's groups use NCCL on CUDA. Objects and control data travel over the CPU between the same ranks.
            dp=_new_host_group(data_parallel, MessageTag.DATA_PARALLEL, world),
            replica=_new_host_group(_replica(world), MessageTag.REPLICA, world),
            world=world,
        )


def build_megatron_groups(layout: Layout, **options: int | bool) -> None:
    """Build Megatron's own process groups of a layout, without the gloo groups that only its checkpoints use."""
    sizes: dict[str, Any] = {**parallel_sizes(layout), **options}
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False, **sizes)


def parallel_sizes(layout: Layout) -> dict[str, int | None]:
    """Return the sizes of a layout by Megatron's names."""
    return dict(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
    )


def _replica(world: dist.ProcessGroup) -> tuple[int, ...]:
    """Return the ranks with this data-parallel index. Megatron has such a group only without context parallelism."""
    indices = all_gather_objects(parallel_state.get_data_parallel_rank(), world)
    return tuple(rank for rank, index in enumerate(indices) if index == indices[dist.get_rank()])


def new_host_world(wait_minutes: float) -> dist.ProcessGroup:
    """Create a gloo group of all ranks; a collective. On CUDA the default group uses NCCL for everything."""
    with connection_limit(dist.get_rank()):
        return dist.new_group(timeout=timedelta(minutes=wait_minutes), backend="gloo")


def new_background_group(world: dist.ProcessGroup) -> dist.ProcessGroup:
    """Create a group of all ranks for another thread, with the connections of ``world``; a collective."""
    return new_shared_mesh_group(range(dist.get_world_size()), world, MessageTag.BACKGROUND)


def _new_host_group(ranks: tuple[int, ...], tag: MessageTag, world: dist.ProcessGroup) -> dist.ProcessGroup:
    """Create the CPU groups that the ranks request, and return this rank's; a collective of all ranks.

    A group of all ranks is ``world``. The others share its connections.
    """
    requested = all_gather_objects(ranks, world)
    everyone = tuple(range(dist.get_world_size()))
    # ``new_group`` is a collective of all ranks, members or not, so all create all groups in one order.
    groups = {members: new_shared_mesh_group(members, world, tag) for members in sorted(set(requested) - {everyone})}
    return world if ranks == everyone else groups[ranks]


def start_process_group(platform: Platform, timeout_minutes: float, store: Store | None = None) -> None:
    """Create the default process group, if there is none.

    The model does not use that group, but ranks wait in it while checkpoints are written, so its timeout is
    ``run.wait_minutes``. ``store`` is the result of ``join_ranks``; None calls it.
    """
    if dist.is_initialized():
        return
    store = store or join_ranks(timeout_minutes)
    rank = int(os.environ["RANK"])
    with connection_limit(rank):
        # Without ``device_id``: with it torch makes every later group, gloo groups included, by one more ncclCommSplit
        # of all ranks.
        dist.init_process_group(
            platform.backend,
            timeout=timedelta(minutes=timeout_minutes),
            store=store,
            rank=rank,
            world_size=int(os.environ["WORLD_SIZE"]),
        )


def shutdown_megatron() -> None:
    """Destroy all process groups."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def seed_random_states(seed: int) -> None:
    """Seed all random states of this rank."""
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def random_states() -> dict[str, torch.Tensor]:
    """Return all random states of this rank: torch's, CUDA's and those of Megatron's tracker."""
    states = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    tracker = tensor_parallel.get_cuda_rng_tracker().get_states()
    return states | {f"tracker/{name}": state for name, state in tracker.items()}


def restore_random_states(states: dict[str, torch.Tensor]) -> None:
    """Restore the result of ``random_states``."""
    torch.set_rng_state(states["torch"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
    prefix = "tracker/"
    tracker = {name.removeprefix(prefix): state for name, state in states.items() if name.startswith(prefix)}
    tensor_parallel.get_cuda_rng_tracker().set_states(tracker)
