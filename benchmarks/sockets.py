"""Sockets of a rank for the process groups over the CPU: counted with real processes, and computed for more ranks.

    python -m benchmarks.sockets [--ranks 8 16 32] [--compute 128 1024] [--tp 2]

The processes are forked and create the groups of a run with saves in the background, as on GPUs: Megatron's own groups
use NCCL there and are fakes here. NCCL's own sockets are not counted. On CPUs Megatron's groups use gloo too, and each
has connections of its own. Every group is used before the count. Connections of the store come on top: see
``megatron_dppo.parallel.network.count_store_sockets``.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_dppo.config.layout import Layout
from megatron_dppo.files import write_synced
from megatron_dppo.mcore.shims import apply_shims
from megatron_dppo.parallel.network import count_mesh_sockets
from megatron_dppo.parallel.objects import all_gather_objects
from megatron_dppo.parallel.platform import Platform

_MINUTES = 2.0


def main() -> None:
    """Count and compute, and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 16, 32])
    parser.add_argument("--compute", type=int, nargs="*", default=[128, 1024])
    parser.add_argument("--tp", type=int, default=2)
    options = parser.parse_args()
    print(f"| ranks (tp{options.tp}) | counted | computed | of the world |")
    print("|---|---|---|---|")
    for world_size in [*options.ranks, *options.compute]:
        counts = set(count(world_size, options.tp)) if world_size in options.ranks else set()
        expected = count_mesh_sockets(world_size)
        shown = ", ".join(map(str, sorted(counts))) or "-"
        print(f"| {world_size} | {shown} | {expected} | {expected / world_size:.2f} |", flush=True)


def count(world_size: int, tp: int) -> list[int]:
    """Return the sockets of each rank."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [partial(_rank_main, rank, world_size, tp, Path(folder)) for rank in range(world_size)]
        pids = [_fork(rank) for rank in ranks]
        # After the forks: a process that is forked beside the store's thread may inherit a lock that is never released.
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        write_synced(Path(folder) / "port", str(server.port))
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        if any(codes):
            sys.exit(f"exit codes of the ranks: {codes}")
        return [int((Path(folder) / str(rank)).read_text()) for rank in range(world_size)]


def _fork(run: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            run()
            code = 0
        finally:
            os._exit(code)
    return pid


def _rank_main(rank: int, world_size: int, tp: int, folder: Path) -> None:
    from megatron_dppo.mcore import setup

    torch.set_num_threads(1)
    while not (folder / "port").exists():
        time.sleep(0.05)
    store = dist.TCPStore("127.0.0.1", int((folder / "port").read_text()), world_size, is_master=False)
    before = _num_connections()
    dist.init_process_group("fake", store=dist.PrefixStore("run", store), rank=rank, world_size=world_size)
    dp = world_size // tp
    layout = Layout(
        world_size=world_size,
        **{"tp": tp, "pp": 1, "vpp": 1, "cp": 1, "dp": dp, "ep": 1, "etp": tp, "expert_dp": dp},
        sequence_parallel=tp > 1,
        overlap_p2p_comm=False,
    )
    world = setup.new_host_world(_MINUTES)
    platform = Platform.detect(force_cpu=True)
    groups = setup.initialize_megatron(layout, platform, seed=1, timeout_minutes=_MINUTES, world=world)
    for group in (groups.world, groups.dp, groups.replica, setup.new_background_group(world)):
        all_gather_objects(rank, group)
    (folder / str(rank)).write_text(str(_num_connections() - before))
    if store.add("done", 1) == world_size:
        store.set("complete", "")
    store.wait(["complete"])


def _num_connections() -> int:
    """Return the number of connections of this process."""
    established = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "01":
                established.add(f"socket:[{fields[9]}]")
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            links.append(os.readlink(entry))
        except OSError:
            continue
    return sum(link in established for link in links)


if __name__ == "__main__":
    apply_shims(Platform.detect(force_cpu=True))
    main()
