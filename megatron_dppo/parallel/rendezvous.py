"""Meeting of the ranks that torchrun or Slurm started: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

Ranks open the store first, before any of them reads data, which may take rank 0 an hour. So a rank that cannot reach
the store, or has not opened it, within some minutes never will: the run ends with its name.
"""

import os
import socket
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from megatron_dppo.errors import RendezvousError
from megatron_dppo.parallel.network import choose_interface

START_SECONDS = 900.0
"""Limit for the last rank to start. Nodes may fetch their containers at different speeds."""
_PROBE_SECONDS = 5.0
_GRACE_SECONDS = 2.0
_SINGLE_PROCESS = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
"""Values of a process that no launcher started. Port 0: the system chooses a free one."""
_SHOWN_RANKS = 8


def open_store(start_seconds: float | None = None) -> Store | None:
    """Open the store of all ranks and note in it that this rank has started; None if a default group exists.

    A RendezvousError if MASTER_ADDR and MASTER_PORT cannot be reached within ``start_seconds`` (None:
    ``START_SECONDS``).
    """
    if dist.is_initialized():
        return None
    for name, value in _SINGLE_PROCESS.items():
        os.environ.setdefault(name, value)
    limit = START_SECONDS if start_seconds is None else start_seconds
    rank = int(os.environ["RANK"])
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    # torchrun's own process has the store, and keeps it when it restarts the ranks. Otherwise rank 0 opens it.
    is_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    prefix = f"/attempt/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/megatron_dppo"
    is_server = rank == 0 and not is_torchrun
    if not is_server:
        _wait_for_listener(host, port, limit)
    # Not torch's rendezvous: there rank 0 waits for all clients, and names none of those that are missing.
    tcp_store = TCPStore(host, port, None, is_server, timedelta(seconds=limit), False, multi_tenant=True)
    store = PrefixStore(prefix, tcp_store)
    store.set(_started(rank), socket.gethostname())
    return store


def join_ranks(
    timeout_minutes: float,
    other_hosts: Sequence[str] = (),
    store: Store | None = None,
    start_seconds: float | None = None,
) -> Store | None:
    """Wait for all ranks, and choose the network interface of the groups that are created later.

    ``timeout_minutes`` is the limit for the last rank to come (rank 0 may read data before), ``start_seconds`` that for
    the last one to start; a RendezvousError names a rank that does not. ``store`` is the result of ``open_store``; None
    calls it. Returns the store, None if a default group exists.
    """
    store = store or open_store(start_seconds)
    if store is None:
        return None
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    seconds = START_SECONDS if start_seconds is None else start_seconds
    started = [_started(other) for other in range(world_size)]
    fix = "WORLD_SIZE counts the processes of all nodes. Fix: start the missing ones with the same MASTER_ADDR and PORT"
    _wait_for_keys(store, started, seconds, "started", fix)
    store.set_timeout(timedelta(minutes=timeout_minutes))
    store.set(f"joined/{rank}", "")
    fix = "Their own output has the reason. Fix: raise run.wait_minutes if they read large data"
    joined = [f"joined/{other}" for other in range(world_size)]
    _wait_for_keys(store, joined, 60 * timeout_minutes, "finished their checks", fix)
    choose_interface(store, rank, world_size, other_hosts)
    return store


def _started(rank: int) -> str:
    return f"started/{rank}"


def _wait_for_keys(store: Store, keys: Sequence[str], seconds: float, what: str, fix: str) -> None:
    """Wait until all ranks have set their keys; the error names those that have not done ``what``."""
    # Rank 0 may have the store, which the others need to name those that are missing.
    grace = _GRACE_SECONDS if os.environ["RANK"] == "0" else 0.0
    try:
        store.wait(list(keys), timedelta(seconds=seconds + grace))
        return
    except dist.DistError as error:
        problem = error
    try:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        here = [rank for rank in range(len(keys)) if rank not in missing]
        hosts = sorted({store.get(_started(rank)).decode() for rank in here})
    except dist.DistError as error:
        raise RendezvousError(
            f"the process that has the store of all ranks ({_master()}) ended while this one waited for ranks that "
            f"have not {what}. Its output has the reason"
        ) from error
    if missing:
        raise RendezvousError(
            f"{len(missing)} of {len(keys)} ranks have not {what} within {seconds / 60:.3g} minutes: rank "
            f"{', '.join(map(str, missing[:_SHOWN_RANKS]))}{', ...' if len(missing) > _SHOWN_RANKS else ''}. Ranks on "
            f"{', '.join(hosts[:_SHOWN_RANKS])} have. {fix}"
        ) from problem


def _wait_for_listener(host: str, port: int, seconds: float) -> None:
    """Wait until something accepts connections on the port."""
    end = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=_PROBE_SECONDS).close()
            return
        except socket.gaierror as error:
            reason = f"this host, {socket.gethostname()}, cannot resolve that name ({error.strerror})"
        except ConnectionRefusedError:
            reason = "that host has no process that listens on the port: rank 0 did not start there, or ended"
        except OSError as error:
            reason = f"that address cannot be reached ({error.strerror or error}); a firewall may block the port"
        if time.monotonic() > end:
            raise RendezvousError(
                f"rank {os.environ['RANK']} could not reach {_master()} within {seconds / 60:.3g} minutes: {reason}. "
                "Fix: set MASTER_ADDR to a name or address of rank 0's host that all nodes can reach"
            )
        time.sleep(0.5)


def _master() -> str:
    return f"MASTER_ADDR:MASTER_PORT = {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
