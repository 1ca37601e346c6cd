"""Sockets of a rank for the process groups over the CPU: counted with real processes, and computed for more ranks.

    python -m benchmarks.sockets [--ranks 8 16 32] [--compute 128 1024] [--tp 2]

The processes are forked and only create the groups of a run with saves in the background, as on GPUs: Megatron's own
groups use NCCL there and are fakes here. gloo connects each pair of ranks of a group when the group is created.
Connections of the stores come on top: two of each rank, to rank 0 under Slurm, to torchrun's process otherwise.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_dppo.config.layout import Layout
from megatron_dppo.mcore.compat.shims import apply_shims
from megatron_dppo.parallel.platform import Platform

_MINUTES = 2.0


def main() -> None:
    """Count and compute, and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 16, 32])
    parser.add_argument("--compute", type=int, nargs="*", default=[128, 1024])
    parser.add_argument("--tp", type=int, default=2)
    options = parser.parse_args()
    print(f"| ranks (tp{options.tp}) | counted | computed | of the world | computed, no background saves |")
    print("|---|---|---|---|---|")
    for world_size in [*options.ranks, *options.compute]:
        counts = set(count(world_size, options.tp)) if world_size in options.ranks else set()
        expected = compute(world_size, options.tp)
        shown = ", ".join(map(str, sorted(counts))) or "-"
        without = expected - (world_size - 1)
        print(f"| {world_size} | {shown} | {expected} | {expected / world_size:.2f} | {without} |", flush=True)


def compute(world_size: int, tp: int) -> int:
    """Return the sockets of a rank: one for each other rank of each group over the CPU."""
    world_and_background = 2 * (world_size - 1)
    # With tp = 1 the data-parallel group is the world itself.
    return world_and_background + (world_size // tp - 1 + tp - 1 if tp > 1 else 0)


def count(world_size: int, tp: int) -> list[int]:
    """Return the sockets of each rank."""
    with tempfile.TemporaryDirectory() as folder:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ranks = [partial(_rank_main, rank, world_size, tp, server.port, Path(folder)) for rank in range(world_size)]
        pids = [_fork(rank) for rank in ranks]
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


def _rank_main(rank: int, world_size: int, tp: int, port: int, folder: Path) -> None:
    from megatron_dppo.mcore import setup

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=False)
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
    setup.initialize_megatron(layout, platform, seed=1, timeout_minutes=_MINUTES, world=world)
    setup.new_host_world(_MINUTES, after=world)
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
