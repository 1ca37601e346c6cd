"""Ranks on two hosts, network namespaces, connect whatever /etc/hosts says of the hosts' own names, also over IPv6."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.hosts import Hosts

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).parents[2]
# One process a host: it imports once, then forks the host's ranks for each case. ``hosts_file`` is this host's own.
PROGRAM = """
import json, os, socket, sys, time, traceback
from pathlib import Path
import torch
import torch.distributed as dist
from megatron_dppo.mcore.shims import apply_shims
from megatron_dppo.parallel import network
from megatron_dppo.parallel.platform import Platform
from megatron_dppo.parallel.rendezvous import join_ranks

index, cases, folder = int(sys.argv[1]), json.loads(sys.argv[2]), Path(sys.argv[3])
torch.set_num_threads(1)
platform = Platform.detect(force_cpu=True)
apply_shims(platform)
from megatron_dppo.mcore import setup

def rank_main(rank, case):
    os.environ.update(case["env"], RANK=str(rank), WORLD_SIZE="4", LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2")
    network._CONNECT_SECONDS = case["limit"]
    store = join_ranks(0.5)
    setup.start_process_group(platform, 1.0, store)
    total = torch.tensor([float(rank)])
    dist.all_reduce(total, group=setup.new_host_world(1.0))
    names = network.INTERFACE_VARIABLES
    (folder / f"{case['name']}_{rank}").write_text(json.dumps([total.item(), *(os.environ.get(n) for n in names)]))
    store.set(f"done{rank}", "")
    store.wait([f"done{i}" for i in range(4)])
    time.sleep(0.5 if rank == 0 else 0)

for number, case in enumerate(cases):
    # The store of the case before may still be there.
    os.environ["MASTER_PORT"] = str(29500 + number)
    Path("/etc/hosts").write_text(case["hosts"][index])
    ranks = {}
    for rank in (2 * index, 2 * index + 1):
        if (pid := os.fork()) == 0:
            try:
                rank_main(rank, case)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        ranks[pid] = rank
    codes = {ranks[pid]: os.waitstatus_to_exitcode(status) for pid, status in (os.wait() for _ in range(2))}
    (folder / f"{case['name']}_codes{index}").write_text(json.dumps(sorted(codes.values())))
"""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    try:
        hosts = Hosts(["n1", "n2"], tmp_path)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this user may not make network namespaces, or iproute2 is missing: {error}")
    try:
        yield hosts
    finally:
        hosts.close()


def case(name: str, hosts: list[str], master: str, *, limit: float = 90.0, **env: str) -> dict[str, object]:
    return {"name": name, "hosts": hosts, "limit": limit, "env": {"MASTER_ADDR": master, **env}}


def test_ranks_connect_whatever_the_hosts_own_names_resolve_to(hosts: Hosts, tmp_path: Path) -> None:
    hosts.add_ipv6()
    first = hosts.addresses["n1"]
    entries = {name: f"{address} {name}\n" for name, address in hosts.addresses.items()}
    real = ["127.0.0.1 localhost\n" + "".join(entries.values())] * 2
    # Ubuntu's default: a host's own name is 127.0.1.1; others find it by DNS.
    ubuntu = [f"127.0.0.1 localhost\n127.0.1.1 {own}\n{entries[other]}" for own, other in (("n1", "n2"), ("n2", "n1"))]
    nothing = ["127.0.0.1 localhost\n"] * 2
    cases = [
        case("real", real, "n1"),
        case("ubuntu", ubuntu, first),
        case("ubuntu_name", ubuntu, "n1"),
        case("nothing", nothing, first),
        case("ipv6", ubuntu, hosts.ipv6_addresses["n1"]),
        # The value of the user counts. It is wrong here, and the limit on connecting ends all ranks.
        case("user", ubuntu, first, limit=3.0, GLOO_SOCKET_IFNAME="lo"),
    ]
    folder = tmp_path / "results"
    folder.mkdir()
    processes = []
    for index, name in enumerate(hosts.names):
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            env.pop(variable, None)
        arguments = (sys.executable, "-c", PROGRAM, str(index), json.dumps(cases), str(folder))
        command = hosts.command(name, *arguments, own_file=True)
        processes.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True))
    errors = [process.communicate(timeout=240)[1] for process in processes]
    for each in cases[:-1]:
        results = [folder / f"{each['name']}_{rank}" for rank in range(4)]
        assert all(file.exists() for file in results), (each["name"], errors)
        assert [json.loads(file.read_text()) for file in results] == [[6.0, "eth0", "eth0"]] * 4, each["name"]
    for index in range(2):
        assert set(json.loads((folder / f"user_codes{index}").read_text())) <= {1, 4}, errors
    text = (
        "the ranks did not connect to each other within 0.05 minutes. The name of this host, {}, resolves to 127.0.1.1"
    )
    # The first host to give up says why; the other one may only see that its peers have gone.
    named = [error for name, error in zip(hosts.names, errors, strict=True) if text.format(name) in error]
    assert named and all("GLOO_SOCKET_IFNAME=lo, NCCL_SOCKET_IFNAME=eth0" in error for error in named), errors
