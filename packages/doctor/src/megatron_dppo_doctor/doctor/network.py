"""The network between the ranks of a job, measured: one store, gloo, NCCL, and the group that sends weights."""

import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from megatron_dppo.errors import JobError
from megatron_dppo.parallel.network import time_limit
from megatron_dppo.weights.transfer_group import (
    TorchTransport,
    broadcast_bucket,
    close_transfer_group,
    flatten_bucket,
    open_transfer_group,
)
from megatron_dppo_doctor.doctor.job_rank import JobRank
from megatron_dppo_doctor.doctor.rank_facts import Finding

LIMIT_SECONDS = 60.0
"""Time limit of each phase."""
_BYTES = {"gloo": 8 * 2**20, "nccl": 256 * 2**20}
"""Size of a timed message."""
_REPEATS = 3
_SLOW_LINK = 0.5
"""A link below this share of the median is named."""
_CLOCK_PINGS = 5


def join_store(job: JobRank) -> Store:
    """Connect to the store of the job."""
    try:
        return TCPStore(
            job.address,
            job.port,
            job.world_size,
            is_master=job.rank == 0 and not job.launcher_has_store,
            timeout=timedelta(seconds=LIMIT_SECONDS),
            wait_for_workers=False,
        )
    except (OSError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise JobError(
            f"rank {job.rank} on {socket.gethostname()}: no store at {job.address}:{job.port} within "
            f"{LIMIT_SECONDS:.0f} s ({reason}). Fix: MASTER_ADDR has to be an address of rank 0's machine that this "
            "one can reach, and the port open between them"
        ) from error


@contextmanager
def limited(what: str, job: JobRank, fix: str) -> Iterator[None]:
    """End this process with exit code 1 and a message if the block takes longer than the limit."""

    def report() -> None:
        if job.local_rank == 0:
            where = f"rank {job.rank} on {socket.gethostname()}"
            print(f"problem  {what} did not end within {LIMIT_SECONDS:.0f} s ({where}). Fix: {fix}", flush=True)

    # The timeouts of collectives come first, where they work.
    with time_limit(LIMIT_SECONDS + 5.0, report, 1):
        yield


def measure_clocks(store: Store, job: JobRank, hosts: list[str]) -> dict[str, float]:
    """Return the seconds by which each host's clock is ahead of rank 0's; empty on ranks other than 0.

    Rank 0 asks the first rank of each node for its time. Half of the shortest round trip bounds the error.
    """
    first_ranks = {host: hosts.index(host) for host in dict.fromkeys(hosts)}
    offsets = {}
    for host, rank in first_ranks.items():
        if rank == 0 or job.rank not in (0, rank):
            continue
        measured = []
        for i in range(_CLOCK_PINGS):
            question = f"clock/{rank}/{i}/question"
            answer = f"clock/{rank}/{i}/answer"
            if job.rank == rank:
                store.get(question)
                store.set(answer, repr(time.time()))
                continue
            sent = time.time()
            store.set(question, "")
            theirs = float(store.get(answer))
            received = time.time()
            measured.append((received - sent, theirs - (sent + received) / 2))
        if job.rank == 0:
            offsets[host] = min(measured)[1]
    return offsets


def measure_network(store: Store, job: JobRank, hosts: list[str]) -> Iterator[str | Finding]:
    """Check and time gloo and, with GPUs, NCCL between all ranks. Every rank runs it; yields the same on all."""
    ranks_per_node = max(hosts.count(host) for host in set(hosts))
    has_devices = torch.cuda.is_available() and ranks_per_node <= torch.cuda.device_count()
    backends = ["gloo", *(["nccl"] if has_devices else [])]
    if torch.cuda.is_available() and not has_devices:
        yield f"NCCL: not measured, since {ranks_per_node} ranks of a node share {torch.cuda.device_count()} devices"
    fixes = {
        "gloo": "set GLOO_SOCKET_IFNAME to the interface of the network between the nodes; see host names above",
        "nccl": "set NCCL_SOCKET_IFNAME; run again with NCCL_DEBUG=INFO and read its last lines",
    }
    for backend in backends:
        with limited(f"{backend} between {job.world_size} ranks", job, fixes[backend]):
            yield from _measure_backend(backend, PrefixStore(backend, store), job, hosts)
    with limited("one bucket through a transfer group", job, "check the address in rollout.weight_sync.host"):
        yield from _check_transfer(PrefixStore("transfer", store), job, backends[-1], hosts)


def _measure_backend(backend: str, store: Store, job: JobRank, hosts: list[str]) -> Iterator[str | Finding]:
    device = torch.device("cuda", job.local_rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    start = time.perf_counter()
    dist.init_process_group(
        backend, store=store, rank=job.rank, world_size=job.world_size, timeout=timedelta(seconds=LIMIT_SECONDS)
    )
    total = torch.tensor([float(job.rank + 1)], device=device)
    dist.all_reduce(total)
    seconds = time.perf_counter() - start
    expected = job.world_size * (job.world_size + 1) / 2
    if float(total) != expected:
        yield Finding(f"{backend}: the sum over all ranks is {float(total):g}, expected {expected:g}", "report it")
    message = torch.zeros(_BYTES[backend] // 4, device=device)
    all_reduce = fastest(lambda: dist.all_reduce(message), device)
    links = _measure_links(message, job)
    dist.destroy_process_group()
    speeds = {
        f"{hosts[rank - 1]} -> {hosts[rank]}": message.nbytes / link / 1e9
        for rank, link in enumerate(links)
        if hosts[rank - 1] != hosts[rank]
    }
    yield (
        f"{backend}: first all-reduce after {seconds:.1f} s; all-reduce of {message.nbytes >> 20} MiB "
        f"{ring_gigabytes(message.nbytes, job.world_size) / all_reduce:.2f} GB/s a link"
    )
    if not speeds:
        return
    median = statistics.median(speeds.values())
    slowest = min(speeds, key=lambda link: speeds[link])
    yield f"{backend} between nodes: median {median:.2f} GB/s, slowest {slowest} {speeds[slowest]:.2f} GB/s"
    if len(speeds) > 2 and speeds[slowest] < _SLOW_LINK * median:
        yield Finding(
            f"{backend}: {slowest} carries {speeds[slowest]:.2f} GB/s, the median link {median:.2f}",
            "leave the node out, and report it to who runs the cluster",
            is_fatal=False,
        )


def ring_gigabytes(num_bytes: int, world_size: int) -> float:
    """Return the GB that each link of a ring carries in an all-reduce: ``2 (n - 1) / n`` of the bytes."""
    return 2 * (world_size - 1) / world_size * num_bytes / 1e9


def fastest(function: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a call: the fastest of several, after one that is not counted."""
    best = float("inf")
    for i in range(_REPEATS + 1):
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if i:
            best = min(best, time.perf_counter() - start)
    return best


def shift(message: Tensor, received: Tensor) -> None:
    """Send a message to the next rank, and receive that of the rank before this one."""
    rank, world = dist.get_rank(), dist.get_world_size()
    # Both in one batch: every rank sends first, and could wait for a receive that comes after a send.
    send = dist.P2POp(dist.isend, message, (rank + 1) % world)
    receive = dist.P2POp(dist.irecv, received, (rank - 1) % world)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()


def _measure_links(message: Tensor, job: JobRank) -> list[float]:
    """Return for each rank the seconds of a message from the rank before it, all at the same time."""
    received = torch.empty_like(message)
    seconds = torch.tensor([fastest(lambda: shift(message, received), message.device)], device=message.device)
    links = [torch.zeros_like(seconds) for _ in range(job.world_size)]
    dist.all_gather(links, seconds)
    return [float(link) for link in links]


def _check_transfer(store: Store, job: JobRank, backend: str, hosts: list[str]) -> Iterator[str | Finding]:
    """Send one bucket from rank 0 to the first rank of the last node, as weights go to a server."""
    receiver = hosts.index(hosts[-1]) or job.world_size - 1
    where = f"transfer group ({backend}, {hosts[0]} -> {hosts[receiver]})"
    if job.rank == 0:
        try:
            listener, port = TorchTransport().listen(job.address)
        except OSError as error:
            store.set("address", "")
            store.set("reason", error.strerror or str(error))
        else:
            store.set("address", f"{listener.getsockname()[0]} {port}")
    if not (address := store.get("address").decode()):
        reason = store.get("reason").decode()
        yield Finding(
            f"{where}: rank 0 cannot listen on {job.address} ({reason})",
            "set rollout.weight_sync.host to an address of rank 0's machine that the servers can reach",
        )
        return
    if job.rank in (0, receiver):
        _send_bucket(store, job, backend, address.split(), listener if job.rank == 0 else None)
    if store.get("arrived") == b"1":
        yield f"{where}: one bucket of 4 MiB arrived unchanged"
    else:
        yield Finding(f"{where}: the bucket arrived changed", "report it")


def _send_bucket(store: Store, job: JobRank, backend: str, address: list[str], listener: socket.socket | None) -> None:
    """Send a bucket from rank 0, and compare it on the other rank of the group."""
    group = open_transfer_group(
        address[0],
        int(address[1]),
        name="megatron_dppo_doctor",
        rank=0 if job.rank == 0 else 1,
        world_size=2,
        backend=backend,
        timeout=LIMIT_SECONDS,
        listening=listener,
    )
    device = torch.device("cuda", job.local_rank) if backend == "nccl" else torch.device("cpu")
    content = torch.arange(2**20, dtype=torch.int32, device=device)
    bucket = flatten_bucket([("weight", content if job.rank == 0 else torch.zeros_like(content))])
    broadcast_bucket(bucket, group)
    if job.rank:
        store.set("arrived", str(int(torch.equal(bucket.data.view(torch.int32), content))))
    store.wait(["arrived"], timedelta(seconds=LIMIT_SECONDS))
    close_transfer_group(group)
