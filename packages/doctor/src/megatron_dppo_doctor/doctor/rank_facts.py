"""Facts of each rank of a job, side by side: versions, variables, limits, host names, clocks."""

import ipaddress
import resource
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_dppo.parallel.network import count_mesh_sockets, count_store_sockets
from megatron_dppo_doctor.doctor.combinations import find_bad_combinations
from megatron_dppo_doctor.doctor.job_rank import JobRank
from megatron_dppo_doctor.doctor.machine import PACKAGES, VARIABLES, MachineFacts, inspect_machine

_EQUAL_ROWS = {
    "python": "pickled objects of the ranks need one minor version",
    "megatron-dppo": "the ranks run different code",
    "megatron-core": "the ranks run different code",
    "torch": "the ranks run different code",
    "transformer-engine": "the ranks compute with different kernels",
    "CUDA of torch": "the ranks compute with different kernels",
    "NCCL": "NCCL refuses a communicator of different versions",
    "NCCL_CUMEM_ENABLE": "ranks cannot open each other's memory on one machine",
    "NCCL_NVLS_ENABLE": "ranks choose different algorithms and wait for each other",
    "NVTE_FLASH_ATTN": "the ranks compute with different kernels",
    "NVTE_FUSED_ATTN": "the ranks compute with different kernels",
}
"""Rows in which a difference stops a run or changes its numbers, with the reason. Other differences are warnings."""
_OTHER_FILES = 512
"""Open files beside the sockets over the CPU: NCCL's sockets, libraries, the run's files, connections to servers."""
_MAX_CLOCK_SKEW = 2.0
"""Seconds. Heartbeats and time limits compare clocks of machines."""
_MIN_SHARED_MEMORY_GIB = 1.0
"""For each GPU: NCCL and data loaders keep buffers in /dev/shm."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong in a job."""

    text: str
    fix: str
    is_fatal: bool = True
    """True if a run cannot start, hangs or computes wrong numbers."""

    def __str__(self) -> str:
        return f"{'problem' if self.is_fatal else 'warning'}  {self.text}. Fix: {self.fix}"


@dataclass(frozen=True)
class RankFacts:
    """Facts of one rank."""

    rank: int
    host: str
    rows: dict[str, str]
    """Versions and variables, which are compared between the ranks."""
    host_addresses: list[str]
    """Addresses that the host's own name resolves to on it. Empty if it does not resolve."""
    interface: str
    """Network interface of the process groups: the user's, or that of the route to rank 0. Empty: not known."""
    max_open_files: int
    """Hard limit, to which a run raises its own. -1: none."""
    locked_memory: int
    """Soft limit of locked memory in bytes. -1: none."""
    shared_memory_gib: float
    """Free space in /dev/shm."""
    num_gpus: int
    bad_combinations: list[tuple[str, str, bool]]
    """Text of each known-bad combination, its fix, and whether it stops a run."""


def inspect_rank(job: JobRank) -> RankFacts:
    """Return the facts of this process."""
    machine = inspect_machine()
    host = socket.gethostname()
    bad_combinations = []
    for match in find_bad_combinations(machine):
        row = match.combination
        bad_combinations.append((f"{match.observed}: {row.reason}", f"{match.fix}. ({row.source})", row.is_fatal))
    return RankFacts(
        rank=job.rank,
        host=host,
        rows=_rows(machine),
        host_addresses=_resolve(host),
        interface="",
        max_open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        locked_memory=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        shared_memory_gib=_free_shared_memory(),
        num_gpus=len(machine.gpus),
        bad_combinations=bad_combinations,
    )


def _rows(machine: MachineFacts) -> dict[str, str]:
    gpus = sorted({gpu.name for gpu in machine.gpus})
    return {
        "python": ".".join(map(str, machine.python[:2])),
        **{name: machine.packages.get(name, "-") for name in PACKAGES},
        "driver": machine.driver or "-",
        "CUDA of torch": machine.torch_cuda or "-",
        "NCCL": machine.nccl or "-",
        "GPUs": f"{len(machine.gpus)} x {' + '.join(gpus)}" if gpus else "none",
        **{name: machine.variables.get(name, "-") for name in VARIABLES},
    }


def _resolve(host: str) -> list[str]:
    try:
        return sorted({str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)})
    except OSError:
        return []


def _free_shared_memory() -> float:
    try:
        return shutil.disk_usage("/dev/shm").free / 2**30
    except OSError:
        return 0.0


def format_rows(facts: Sequence[RankFacts]) -> Iterator[str]:
    """Yield a line for each row; values that differ are listed with their ranks."""
    for name in facts[0].rows:
        groups = _group_by_value(facts, name)
        if set(groups) == {"-"}:
            continue
        yield f"{name}: {next(iter(groups))}" if len(groups) == 1 else f"{name}: {_list_groups(groups)}"


def _group_by_value(facts: Iterable[RankFacts], name: str) -> dict[str, list[RankFacts]]:
    groups: dict[str, list[RankFacts]] = {}
    for rank in facts:
        groups.setdefault(rank.rows.get(name, "-"), []).append(rank)
    return groups


def _list_groups(groups: Mapping[str, Sequence[RankFacts]]) -> str:
    return "; ".join(f"{value} ({name_ranks(ranks)})" for value, ranks in groups.items())


def name_ranks(facts: Sequence[RankFacts]) -> str:
    """Return ``ranks 8, 9 and 6 more on n2, n3``."""
    numbers = sorted(rank.rank for rank in facts)
    hosts = list(dict.fromkeys(rank.host for rank in sorted(facts, key=lambda fact: fact.rank)))
    shown = ", ".join(map(str, numbers[:2])) + (f" and {len(numbers) - 2} more" if len(numbers) > 2 else "")
    shown_hosts = ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")
    return f"rank{'s' if len(numbers) > 1 else ''} {shown} on {shown_hosts}"


def compare_facts(facts: Sequence[RankFacts], clock_offsets: Mapping[str, float]) -> Iterator[Finding]:
    """Yield what is wrong on a rank or differs between ranks.

    ``clock_offsets`` are the seconds by which the clock of each host is ahead of rank 0's.
    """
    ranks_by_combination: dict[tuple[str, str, bool], list[RankFacts]] = {}
    for rank in facts:
        for text, fix, is_fatal in rank.bad_combinations:
            ranks_by_combination.setdefault((text, fix, is_fatal), []).append(rank)
    for (text, fix, is_fatal), ranks in ranks_by_combination.items():
        where = "" if len(ranks) == len(facts) else f" ({name_ranks(ranks)})"
        yield Finding(text + where, fix, is_fatal)
    for name in facts[0].rows:
        groups = _group_by_value(facts, name)
        if len(groups) > 1:
            yield _difference(name, groups)
    yield from _host_name_findings(facts)
    yield from _limit_findings(facts)
    for host, offset in clock_offsets.items():
        if abs(offset) > _MAX_CLOCK_SKEW:
            yield Finding(
                f"the clock of {host} is {abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} rank 0's",
                "synchronise the clocks (chrony or ntpd)",
                is_fatal=False,
            )


def _difference(name: str, groups: Mapping[str, Sequence[RankFacts]]) -> Finding:
    reason = _EQUAL_ROWS.get(name)
    text = f"{name} differs: {_list_groups(groups)}"
    if name in ("GPUs", "driver"):
        fix = "ask for nodes of one kind; the slowest sets the pace"
    else:
        fix = f"set {name} to one value on all nodes" if name in VARIABLES else f"install one {name} everywhere"
    return Finding(f"{text}; {reason}" if reason else text, fix, is_fatal=reason is not None)


def _host_name_findings(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    """Check the name of each host: gloo listens at its address, unless an interface is known."""
    if len({rank.host for rank in facts}) == 1:
        return
    reasons: dict[str, list[RankFacts]] = {}
    for rank in facts:
        if rank.interface:
            continue
        if not rank.host_addresses:
            reasons.setdefault("does not resolve there", []).append(rank)
        elif all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in rank.host_addresses):
            reasons.setdefault(f"resolves to {', '.join(rank.host_addresses)} there", []).append(rank)
    for reason, ranks in reasons.items():
        yield Finding(
            f"the host's own name {reason} ({name_ranks(ranks)}), so other nodes cannot reach what gloo offers",
            "set GLOO_SOCKET_IFNAME to the interface of the network between the nodes, or mend /etc/hosts",
        )


def _limit_findings(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    # Rank 0 may be on any of these nodes in the next job.
    needed = count_mesh_sockets(len(facts)) + count_store_sockets(len(facts)) + _OTHER_FILES
    low = [rank for rank in facts if 0 <= rank.max_open_files < needed]
    if low:
        yield Finding(
            f"the hard limit of open files is {min(rank.max_open_files for rank in low)} ({name_ranks(low)}); "
            f"{len(facts)} ranks need up to {needed}",
            "raise it (`ulimit -Hn`; with Slurm PropagateResourceLimitsExcept=NOFILE, in containers --ulimit nofile)",
        )
    locked = [rank for rank in facts if rank.num_gpus and 0 <= rank.locked_memory < 2**36]
    if locked:
        yield Finding(
            f"locked memory is limited to {min(rank.locked_memory for rank in locked) / 2**20:.0f} MiB "
            f"({name_ranks(locked)}); InfiniBand and pinned buffers need it",
            "`ulimit -l unlimited` (/etc/security/limits.conf, or LimitMEMLOCK=infinity of slurmd)",
            is_fatal=False,
        )
    small = [
        rank for rank in facts if rank.num_gpus and rank.shared_memory_gib < _MIN_SHARED_MEMORY_GIB * rank.num_gpus
    ]
    if small:
        yield Finding(
            f"/dev/shm has {min(rank.shared_memory_gib for rank in small):.2g} GiB free ({name_ranks(small)})",
            "give the container more (--shm-size, --ipc=host)",
            is_fatal=False,
        )
