"""Ranks that cannot meet end within the time limit, and name the address or the ranks that are missing."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# Forks the ranks of all cases, which import torch once. ``joins`` are the ranks that join after they opened the store.
PROGRAM = """
import json, os, socket, sys, time
from megatron_dppo.errors import UserError
from megatron_dppo.parallel.rendezvous import join_ranks, open_store

def main(rank, case):
    os.environ.update(case["env"], RANK=str(rank), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
    store = open_store(case["seconds"])
    if rank not in case["joins"]:
        time.sleep(case["alive"])
        return "left"
    join_ranks(case["seconds"] / 60, store=store, start_seconds=case["seconds"])
    # The process that has the store leaves last.
    store.set(f"end/{rank}", "")
    if rank == 0:
        store.wait([f"end/{other}" for other in case["joins"]])
    return "joined"

pipes = {}
for case in json.loads(sys.argv[1]):
    for rank in case["ranks"]:
        reader, writer = os.pipe()
        if os.fork() == 0:
            try:
                said = main(rank, case)
            except UserError as error:
                said = f"{error.exit_code} {error}"
            except BaseException as error:
                said = f"{type(error).__name__} {error}"
            os.write(writer, said.encode())
            os._exit(0)
        os.close(writer)
        pipes[case["name"], rank] = os.fdopen(reader)
results = {}
for (name, rank), pipe in pipes.items():
    results.setdefault(name, {})[rank] = pipe.read()
print(json.dumps(results))
"""


def free_port() -> str:
    """Return a port that nothing uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def case(name: str, size: int, ranks: list[int], *, seconds: float = 3.0, **more: object) -> dict[str, object]:
    """Return a case; all ranks join unless ``joins`` says otherwise."""
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(size)} | dict(more.pop("env", {}))
    return {"name": name, "ranks": ranks, "joins": ranks, "seconds": seconds, "alive": 0.0, "env": env} | more


CASES = [
    case("all come", 3, [0, 1, 2], seconds=60.0),
    case("no such host", 2, [1], env={"MASTER_ADDR": "rank-zero.invalid"}),
    case("nothing listens", 2, [1]),
    case("torchrun's port", 2, [0], env={"TORCHELASTIC_USE_AGENT_STORE": "True"}),
    case("never started", 4, [0, 2]),
    case("never joins", 3, [0, 1, 2], joins=[0, 1], alive=20.0),
    case("rank 0 ends", 3, [0, 1], joins=[1], seconds=20.0, alive=2.0),
]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict[str, str]]:
    """Messages of the ranks, by case and rank."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "FATAL"}
    command = [sys.executable, "-c", PROGRAM, json.dumps(CASES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=True, cwd=ROOT)
    return json.loads(done.stdout.splitlines()[-1])


def test_ranks_that_all_come_join(outcomes: dict[str, dict[str, str]]) -> None:
    assert outcomes["all come"] == {"0": "joined", "1": "joined", "2": "joined"}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no such host", ["rank 1 could not reach", "rank-zero.invalid:", "cannot resolve that name"]),
        ("nothing listens", ["127.0.0.1:", "no process that listens on the port", "Fix: set MASTER_ADDR"]),
        ("torchrun's port", ["rank 0 could not reach", "no process that listens on the port"]),
        ("never started", ["2 of 4 ranks have not started", "rank 1, 3.", socket.gethostname(), "WORLD_SIZE"]),
        ("never joins", ["1 of 3 ranks have not finished their checks", "rank 2.", "run.wait_minutes"]),
        ("rank 0 ends", ["the process that has the store", "ended while this one waited"]),
    ],
)
def test_each_rank_names_what_is_missing(outcomes: dict[str, dict[str, str]], name: str, words: list[str]) -> None:
    messages = [text for text in outcomes[name].values() if text != "left"]
    assert messages
    for text in messages:
        assert text.startswith("4 ") and all(word in text for word in words), text
