"""Several hosts on this machine: network namespaces with names and addresses of their own, on one bridge."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path


class Hosts:
    """Hosts that reach each other, and this machine, over a network; ``close`` takes all of it away.

    A host has its own interfaces, ports, host name and ``/etc/hosts``. Files and processes are those of this machine.

    Args:
        names: of the hosts.
        folder: for their ``/etc/hosts``.

    Raises:
        subprocess.CalledProcessError: this user may not make networks, or iproute2 is missing.
    """

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        # Two runs of the tests on one machine must not meet: neither their names nor their subnets.
        self._bridge, self._subnet = f"md{os.getpid()}", f"10.213.{os.getpid() % 256}"
        self.names = list(names)
        self.address = f"{self._subnet}.254"
        """of this machine in their network"""
        self.addresses = {name: f"{self._subnet}.{i + 1}" for i, name in enumerate(self.names)}
        lines = ["127.0.0.1 localhost\n", *(f"{address} {name}\n" for name, address in self.addresses.items())]
        self._hosts_file = folder / "hosts"
        self._hosts_file.write_text("".join(lines))
        try:
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("address", "add", f"{self.address}/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
            for name in self.names:
                self._add(name)
        except BaseException:
            self.close()
            raise

    def _add(self, name: str) -> None:
        space, plug = self._space(name), self._plug(name)
        _ip("netns", "add", space)
        _ip("link", "add", plug, "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("link", "set", plug, "master", self._bridge, "up")
        _ip("-n", space, "address", "add", f"{self.addresses[name]}/24", "dev", "eth0")
        _ip("-n", space, "link", "set", "eth0", "up")
        _ip("-n", space, "link", "set", "lo", "up")

    def _space(self, name: str) -> str:
        return f"{self._bridge}-{name}"

    def _plug(self, name: str) -> str:
        return f"{self._bridge}-{name}"[:15]

    def add_ipv6(self) -> None:
        """Give every host an IPv6 address, too: ``ipv6_addresses``."""
        prefix = f"fd00:213:{os.getpid() % 65536:x}"
        self.ipv6_addresses = {name: f"{prefix}::{i + 1:x}" for i, name in enumerate(self.names)}
        for name, address in self.ipv6_addresses.items():
            # Without nodad the address could be used only a second later.
            _ip("-n", self._space(name), "address", "add", f"{address}/64", "dev", "eth0", "nodad")

    def command(self, name: str, *command: str, own_file: bool = False) -> list[str]:
        """Return the command line that runs a command on a host.

        Args:
            name: of the host.
            command: with its arguments.
            own_file: give the host an ``/etc/hosts`` of its own, which the command may change.
        """
        hosts_file = self._hosts_file
        if own_file:
            hosts_file = hosts_file.with_name(f"hosts-{name}")
            hosts_file.write_text(self._hosts_file.read_text())
        inside = 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"'
        return [
            *("nsenter", f"--net=/run/netns/{self._space(name)}", "unshare", "--mount", "--uts"),
            *("sh", "-c", inside, "sh", str(hosts_file), name, *command),
        ]

    def cut_off(self, name: str) -> None:
        """Pull the plug: whatever the host sends or is sent is lost, and nobody is told."""
        _ip("link", "set", self._plug(name), "down")

    def connect(self, name: str) -> None:
        """Put the plug in again."""
        _ip("link", "set", self._plug(name), "up")

    def close(self) -> None:
        """End what still runs on the hosts, and remove the network."""
        for name in self.names:
            result = subprocess.run(
                ["ip", "netns", "pids", self._space(name)], capture_output=True, text=True, check=False
            )
            for pid in map(int, result.stdout.split()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", self._space(name)], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
