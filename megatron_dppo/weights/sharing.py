"""Whose memory each inference server reads (``rollout.weight_sync.method = "ipc"``), found before any work starts."""

from __future__ import annotations

import os
import platform as machine
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import torch.distributed as dist

from megatron_dppo.config.rollout import RolloutConfig
from megatron_dppo.errors import ConfigError
from megatron_dppo.parallel.objects import from_each
from megatron_dppo.parallel.platform import DTYPES, Platform
from megatron_dppo.weights.handles import Sharing


@dataclass(frozen=True)
class RankLocation:
    """Where a rank of the trainer is."""

    host: str
    local_rank: int
    reached_by: frozenset[str]
    """URLs of servers that are on its machine"""


def find_sharing(
    rollout: RolloutConfig, *, gpus_per_server: int, platform: Platform, world: dist.ProcessGroup | None, tied: bool
) -> Sharing:
    """Find which rank shares its memory with which server; a collective of all ranks.

    Args:
        rollout: with servers and the weight sync method ``ipc``.
        gpus_per_server: GPUs of each server.
        platform: device of this process.
        world: all ranks.
        tied: the model's output layer is its embedding.

    Raises:
        ConfigError: a server is not on the trainer's machines, or not on its GPUs.
    """
    settings = rollout.weight_sync
    servers = rollout.servers
    if platform.is_cuda and not servers.colocated:
        raise ConfigError(
            "rollout.weight_sync.method = 'ipc' with rollout.servers.colocated = false: a server opens memory of its "
            "own GPU only. Set colocated = true where servers and trainer share their GPUs, or method = 'distributed'"
        )
    urls = [url.rstrip("/") for url in servers.resolved_urls]  # as the clients have them
    here = frozenset(url for url in urls if is_here(url))
    place = RankLocation(machine.node(), int(os.environ.get("LOCAL_RANK", "0")), here)
    places = from_each(place, world)
    return Sharing(
        owners=owners_of(urls, gpus_per_server, places, on_gpus=platform.is_cuda),
        bucket_bytes=settings.bucket_megabytes * 2**20,
        dtype=DTYPES[rollout.dtype],
        tied=tied,
        group=world,
    )


def is_here(url: str) -> bool:
    """Whether the host of a URL is an address of this machine."""
    try:
        found = socket.getaddrinfo(urlsplit(url).hostname, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, _, _, address in found:
        with socket.socket(family, kind) as probe:
            try:
                probe.bind((address[0], 0))
                return True
            except OSError:
                continue
    return False


def owners_of(urls: Sequence[str], size: int, places: Sequence[RankLocation], *, on_gpus: bool) -> dict[str, list[int]]:
    """By URL: for each of the server's ranks the trainer's rank on its GPU.

    On each machine the servers have the trainer's GPUs in order, as ``megatron-dppo serve`` gives them; on a CPU all
    read the memory of the machine's first rank.

    Args:
        urls: of the servers.
        size: GPUs of one server.
        places: of the trainer's ranks.
        on_gpus: whether both are on GPUs.

    Raises:
        ConfigError: a server is elsewhere, or there are fewer ranks than GPUs of servers.
    """
    owners: dict[str, list[int]] = {}
    used: dict[str, int] = {}
    for url in urls:
        hosts = [place.host for place in places if url in place.reached_by]
        if not hosts:
            raise ConfigError(
                f"rollout.servers.urls: {url} is on none of the trainer's machines ({_hosts(places)}), whose memory "
                "rollout.weight_sync.method = 'ipc' has it open. Start it there, or set the method to 'disk' or "
                "'distributed'"
            )
        ranks = [rank for rank, place in enumerate(places) if place.host == hosts[0]]
        ranks.sort(key=lambda rank: places[rank].local_rank)
        if not on_gpus:
            owners[url] = ranks[:1] * size
            continue
        first = used.get(hosts[0], 0)
        used[hosts[0]] = first + size
        if first + size > len(ranks):
            raise ConfigError(
                f"rollout.weight_sync.method = 'ipc': up to {url} the servers on {hosts[0]} have {first + size} GPUs, "
                f"the trainer {len(ranks)} ranks there. Each GPU of a server needs a rank of the trainer on it: lower "
                "rollout.servers.count or the servers' tensor-parallel size, or start more ranks"
            )
        owners[url] = ranks[first : first + size]
    return owners


def _hosts(places: Sequence[RankLocation]) -> str:
    return ", ".join(dict.fromkeys(place.host for place in places))
