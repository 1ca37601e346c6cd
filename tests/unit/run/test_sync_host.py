"""``rollout.weight_sync.host``: servers on other machines must be able to reach it."""

from __future__ import annotations

import json
import socket

import pytest

from megatron_dppo.commands.serve import network_variables
from megatron_dppo.config.schema import Config
from megatron_dppo.engines.serving.nodes import ServerNode
from megatron_dppo.parallel import network
from megatron_dppo.setup.preflight import CHECKS, Start
from megatron_dppo.setup.server_checks import find_sync_host_problem
from tests.unit import configs

REMOTE = "http://198.51.100.7:30000"
"""an address that no machine has (RFC 5737)"""
LOCAL = "http://127.0.0.1:30000"
(SYNC_HOST,) = (check for check in CHECKS if check.name == "address of rank 0")


def config(host: str, *urls: str, method: str = "distributed") -> Config:
    servers, sync = {"urls": list(urls)}, {"host": host, "method": method}
    return configs.config(rollout={"engine": "sglang", "servers": servers, "weight_sync": sync})


@pytest.mark.parametrize(
    ("host", "resolved"),
    [("127.0.0.1", "is a"), ("::1", "is a"), ("localhost", "resolves to"), ("n1", "resolves to 127.0.1.1, which is a")],
)
def test_a_loopback_address_is_refused_for_servers_elsewhere(
    host: str, resolved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lookup = socket.getaddrinfo
    # As Ubuntu's /etc/hosts resolves a machine's own name.
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda name, *a, **k: lookup("127.0.1.1" if name == "n1" else name, *a, **k)
    )
    problem = find_sync_host_problem(config(host, LOCAL, REMOTE).rollout)
    assert problem is not None and problem.startswith(f"rollout.weight_sync.host = {host!r} {resolved}")
    assert f"loopback address, and {REMOTE} is on another machine. Set it to" in problem
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.7", 1))
        except OSError:
            return
        assert f"such as {probe.getsockname()[0]}, which is on the route there" in problem


def test_what_can_work_is_let_through() -> None:
    assert find_sync_host_problem(config("127.0.0.1", LOCAL).rollout) is None
    assert find_sync_host_problem(config("127.0.0.1", REMOTE, method="disk").rollout) is None
    assert find_sync_host_problem(config("198.51.100.8", REMOTE).rollout) is None
    assert "no address or known name" in str(find_sync_host_problem(config("no.such.host.invalid", LOCAL).rollout))


def test_a_dry_run_which_may_be_on_another_machine_only_notes_it() -> None:
    start = Start(config("127.0.0.1", REMOTE), 1, dry_run=True)
    assert list(SYNC_HOST.find(start)) == [] and REMOTE in start.notes[0]
    (error,) = SYNC_HOST.find(Start(config("127.0.0.1", REMOTE), 1))
    assert REMOTE in str(error)


def test_urls_of_servers_at_an_ipv6_address_have_brackets() -> None:
    servers = configs.config(rollout={"engine": "vllm", "servers": {"host": "fd00::1", "count": 2}}).rollout.servers
    assert json.dumps(servers.resolved_urls) == '["http://[fd00::1]:30000", "http://[fd00::1]:30001"]'


def test_servers_use_the_interface_of_their_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in network.INTERFACE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(network, "source_address", lambda host: {"n1": "10.0.0.1"}.get(host, host))
    monkeypatch.setattr(network, "find_interface", {"10.0.0.1": "ib0"}.get)

    def variables(host: str, method: str = "distributed", node: ServerNode | None = None) -> dict[str, str]:
        return network_variables(
            configs.config(
                rollout={"engine": "vllm", "servers": {"host": host}, "weight_sync": {"method": method}}
            ).rollout,
            node,
        )

    assert variables("n1") == {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "ib0"}
    assert variables("127.0.0.1") == variables("n1", "disk") == {}
    # The parts of a vLLM server over nodes meet at this address, also where the weights take another way.
    part = ServerNode(rank=1, address="n0:29500")
    assert variables("n1", "disk", part) == {"VLLM_HOST_IP": "10.0.0.1"}
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth1")
    assert variables("n1") == {"GLOO_SOCKET_IFNAME": "ib0"}
