"""Assignment of trainer ranks to the servers that read their memory (``rollout.weight_sync.method = "ipc"``)."""

import os
import platform as machine
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import torch.distributed as dist

from megatron_dppo.config.rollout import RolloutConfig
from megatron_dppo.errors import ConfigError
from megatron_dppo.parallel.objects import all_gather_objects
from megatron_dppo.parallel.platform import DTYPES, Platform
from megatron_dppo.weights.ipc import MemorySharing


@dataclass(frozen=True)
class RankLocation:
    """Location of a trainer rank."""

    host: str
    local_rank: int
    local_urls: frozenset[str]
    """URLs of servers on its machine."""


def find_sharing(
    rollout: RolloutConfig, *, gpus_per_server: int, platform: Platform, world: dist.ProcessGroup | None, tied: bool
) -> MemorySharing:
    """Assign ranks to the servers of the weight sync method ``ipc``; a collective of all ranks."""
    settings = rollout.weight_sync
    servers = rollout.servers
    if platform.is_cuda and not servers.colocated:
        raise ConfigError(
            "rollout.weight_sync.method = 'ipc' with rollout.servers.colocated = false: a server opens memory of its "
            "own GPU only. Set colocated = true where servers and trainer share their GPUs, or method = 'distributed'"
        )
    urls = [url.rstrip("/") for url in servers.resolved_urls]  # in the form that the clients use
    local_urls = frozenset(url for url in urls if is_local(url))
    location = RankLocation(machine.node(), int(os.environ.get("LOCAL_RANK", "0")), local_urls)
    locations = all_gather_objects(location, world)
    return MemorySharing(
        owners=find_owners(urls, gpus_per_server, locations, on_gpus=platform.is_cuda),
        bucket_bytes=settings.bucket_megabytes * 2**20,
        dtype=DTYPES[rollout.dtype],
        tied=tied,
        group=world,
    )


def is_local(url: str) -> bool:
    """Return True if the host of a URL is an address of this machine."""
    try:
        infos = socket.getaddrinfo(urlsplit(url).hostname, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    # A socket binds only to an address of its own machine.
    for family, kind, _, _, address in infos:
        with socket.socket(family, kind) as probe:
            try:
                probe.bind((address[0], 0))
                return True
            except OSError:
                continue
    return False


def find_owners(
    urls: Sequence[str], size: int, locations: Sequence[RankLocation], *, on_gpus: bool
) -> dict[str, list[int]]:
    """Return for each of the ``size`` ranks of a server the trainer's rank on its GPU, by URL.

    On each machine the servers use the trainer's GPUs in order, as ``megatron-dppo serve`` assigns them. On a CPU all
    servers read the memory of the machine's first rank.
    """
    owners: dict[str, list[int]] = {}
    used: dict[str, int] = {}
    for url in urls:
        hosts = [location.host for location in locations if url in location.local_urls]
        if not hosts:
            machines = ", ".join(dict.fromkeys(location.host for location in locations))
            raise ConfigError(
                f"rollout.servers.urls: {url} is on none of the trainer's machines ({machines}), and "
                "rollout.weight_sync.method = 'ipc' shares memory of one machine. Start it there, or set the method to "
                "'disk' or 'distributed'"
            )
        ranks = [rank for rank, location in enumerate(locations) if location.host == hosts[0]]
        # GPU i of a machine is that of its rank with LOCAL_RANK i.
        ranks.sort(key=lambda rank: locations[rank].local_rank)
        if not on_gpus:
            owners[url] = ranks[:1] * size
            continue
        first = used.get(hosts[0], 0)
        used[hosts[0]] = first + size
        if first + size > len(ranks):
            raise ConfigError(
                f"rollout.weight_sync.method = 'ipc': the servers on {hosts[0]}, up to {url}, use {first + size} GPUs, "
                f"but the trainer has {len(ranks)} ranks there. Each GPU of a server needs a rank of the trainer on "
                "it. Lower rollout.servers.count or the servers' tensor-parallel size, or start more ranks"
            )
        owners[url] = ranks[first : first + size]
    return owners
