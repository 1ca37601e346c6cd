"""Network interface of a rank's process groups, and a time limit for connecting them.

gloo listens on the address that this host's own name resolves to, unless GLOO_SOCKET_IFNAME names an interface. Debian
and Ubuntu resolve that name to 127.0.1.1, where no other host can connect: the ranks then wait without end. The route
to MASTER_ADDR leads through the right interface.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
EXIT_CODE = 4
"""Exit code of a rank that cannot connect, the same as that of a hung run."""
_CONNECT_SECONDS = 300.0
_SIOCGIFCONF = 0x8912
_IFREQ_BYTES = 40
_MAX_INTERFACES = 1024
_IPV6_TABLE = Path("/proc/net/if_inet6")
_KEY = "megatron_dppo/source/"
_STORE_CLIENTS = 2
"""Connections of a rank to the store."""


def choose_interface(store: Store, rank: int, world_size: int, other_hosts: Sequence[str] = ()) -> str | None:
    """Set the variables of ``INTERFACE_VARIABLES`` that the user has not set; call it before any group is created.

    All ranks must call it. Nothing is set if all ranks and ``other_hosts``, which show the network to the servers, are
    on this machine. Returns the name of the interface, None if none was needed, or none was found.
    """
    source = source_address(os.environ["MASTER_ADDR"])
    store.set(f"{_KEY}{rank}", source or "")
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if is_loopback(source) and local_world_size < world_size:
        # MASTER_ADDR is a name of this machine that its /etc/hosts resolves to a loopback address. The route to the
        # first rank of the next node leads through the network between the nodes. Ranks are numbered node by node.
        other = store.get(f"{_KEY}{local_world_size}").decode()
        source = source_address(other) if other else None
    hosts = iter(other_hosts)
    while is_loopback(source) and (host := next(hosts, None)) is not None:
        source = source_address(host)
    interface = None if is_loopback(source) else find_interface(str(source))
    os.environ.update(interface_variables(interface, os.environ))
    return interface


def interface_variables(interface: str | None, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ``INTERFACE_VARIABLES`` that the user has not set, for an interface."""
    return {name: interface for name in INTERFACE_VARIABLES if name not in environ} if interface else {}


def source_address(host: str) -> str | None:
    """Return this machine's address on the route to a host, if possible not loopback; None without a route."""
    addresses = []
    try:
        infos = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in infos:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(address)
                addresses.append(str(probe.getsockname()[0]))
            except OSError:
                continue
    return next((address for address in addresses if not is_loopback(address)), next(iter(addresses), None))


def is_loopback(address: str | None) -> bool:
    """Return True for None and for an address that no other machine can reach."""
    return address is None or ipaddress.ip_address(address.partition("%")[0]).is_loopback


def find_interface(address: str) -> str | None:
    """Return the network interface that has an address; None if no interface has it."""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    return next((name for name, value in _interfaces() if value == wanted), None)


def _interfaces() -> Iterator[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    """Yield the name and address of each interface of this machine."""
    buffer = array.array("B", bytes(_IFREQ_BYTES * _MAX_INTERFACES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        start, length = buffer.buffer_info()
        result = fcntl.ioctl(probe, _SIOCGIFCONF, struct.pack("iP", length, start))
    (used,) = struct.unpack("i", result[:4])
    for offset in range(0, used, _IFREQ_BYTES):
        entry = buffer[offset : offset + _IFREQ_BYTES].tobytes()
        # A second address of an interface may have a label, ``eth0:1``.
        label = entry[:16].partition(b"\0")[0].decode()
        yield label.partition(":")[0], ipaddress.IPv4Address(entry[20:24])
    try:
        lines = _IPV6_TABLE.read_text(encoding="ascii").splitlines()
    except OSError:
        return
    for fields in map(str.split, lines):
        yield fields[5], ipaddress.IPv6Address(bytes.fromhex(fields[0]))


def count_mesh_sockets(world_size: int) -> int:
    """Return the sockets of a rank to other ranks over the CPU, which gloo opens for the group of all ranks.

    All other groups over the CPU share them (``parallel.shared_mesh``). ``benchmarks/sockets.py`` counts them. On GPUs
    NCCL's come on top, on CPUs those of Megatron's groups.
    """
    return world_size - 1


def count_store_sockets(world_size: int) -> int:
    """Return the sockets of the process that holds the store: rank 0 under Slurm, torchrun's process otherwise."""
    return _STORE_CLIENTS * world_size


@contextmanager
def connection_limit(rank: int) -> Iterator[None]:
    """End this process if the ranks do not connect within 5 minutes; the rank that gloo waits for may hang longer."""

    def report() -> None:
        print(f"\n[rank {rank}] error: {describe_failure()}", file=sys.stderr, flush=True)

    with time_limit(_CONNECT_SECONDS, report, EXIT_CODE):
        yield


@contextmanager
def time_limit(seconds: float, report: Callable[[], None], exit_code: int) -> Iterator[None]:
    """End this process if the block takes longer: one that hangs in native code gets no exception."""

    def give_up() -> None:
        report()
        os._exit(exit_code)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def describe_failure() -> str:
    """Return a message for ranks that could not connect, with the addresses that they use."""
    host = socket.gethostname()
    try:
        addresses = sorted({str(info[4][0]) for info in socket.getaddrinfo(host, None)})
        resolved = f"resolves to {', '.join(addresses)}"
    except OSError:
        resolved = "resolves to nothing"
    settings = ", ".join(f"{name}={os.environ.get(name, '(not set)')}" for name in INTERFACE_VARIABLES)
    return (
        f"the ranks did not connect to each other within {_CONNECT_SECONDS / 60:g} minutes. The name of this host, "
        f"{host}, {resolved}; {settings}, MASTER_ADDR={os.environ.get('MASTER_ADDR')}. Fix: set both variables to the "
        "interface of the network between the nodes (`ip addr` shows it), and let no firewall block its ports"
    )
