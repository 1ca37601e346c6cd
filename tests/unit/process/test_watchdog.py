"""The watchdog names the rank that the others wait for, and reports no hang of a run that makes progress."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.config.run import RunConfig
from megatron_dppo.errors import ConfigError
from megatron_dppo.process.watchdog import EXIT_CODE, Heartbeat, RankStatus, Watchdog, describe, find_behind
from megatron_dppo.report.clock import PROGRESS
from tests.engines.servers import free_port
from tests.unit import configs

PROGRAM = """
import os, signal, sys, time
from datetime import timedelta
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous
from megatron_dppo.report.clock import PROGRESS, Clock
from megatron_dppo.config.run import RunConfig
from megatron_dppo.process.watchdog import Watchdog

folder, who, how = sys.argv[1], int(sys.argv[2]), sys.argv[3]
store, rank, world = next(rendezvous("env://", timeout=timedelta(seconds=120)))
watchdog = Watchdog(RunConfig(output_dir=folder, num_steps=1, hang_minutes=0.1, timeout_minutes=2))
watchdog.start()  # a rank may hang while the first group connects
dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=120))
PROGRESS.enter("loop", 3)
mine = dist.get_rank() == who
if mine and how == "sleep":
    time.sleep(0.5)  # so that it begins when the others already wait
with Clock().part("reward"):
    if mine and how == "stop":
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "long" or (mine and how == "sleep"):
        time.sleep(15 if how == "long" else 600)
with Clock().part("waiting"):
    dist.barrier()
watchdog.close()
print("went on", flush=True)
"""


def start(folder: Path, world: int, who: int, how: str) -> list[subprocess.Popen[str]]:
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}
    return [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(folder), str(who), how],
            env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "who", "how", "message"),
    [
        (2, 1, "stop", "rank 1 (process {pid} on {host}) has been in step 3, phase 'reward', for"),
        pytest.param(
            2,
            0,
            "stop",
            "hosted by rank 0 (process {pid} on {host}) or the launcher, has not responded for",
            marks=pytest.mark.long,
        ),
        pytest.param(
            3,
            2,
            "sleep",
            "rank 2 (process {pid} on {host}) has been in step 3, phase 'reward', for",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_rank_that_stops_or_lags_is_named_by_another(
    tmp_path: Path, world: int, who: int, how: str, message: str
) -> None:
    ranks = start(tmp_path, world, who, how)
    try:
        for rank in set(range(world)) - {who}:
            assert ranks[rank].wait(90) == EXIT_CODE, ranks[rank].communicate()
            trace = (tmp_path / f"hang/rank_{rank:05d}.txt").read_text()
            assert "barrier" in trace and "<string>" in trace
        text = "".join(ranks[rank].communicate()[1] for rank in set(range(world)) - {who})
        assert message.format(pid=ranks[who].pid, host=os.uname().nodename) in text
        assert "minutes (run.hang_minutes)" in text and "step 3, phase 'waiting'" in text
        assert (f"it is stopped (kill -CONT {ranks[who].pid} resumes it)" in text) == (how == "stop")
        assert text.count("error: the run hangs") == 1, "one rank reports"
        if how == "sleep":
            assert ranks[who].wait(30) == EXIT_CODE
            assert 'File "<string>", line 22' in (tmp_path / f"hang/rank_{who:05d}.txt").read_text()
    finally:
        for process in ranks:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.communicate()


@pytest.mark.slow
def test_a_long_phase_of_all_ranks_is_no_hang(tmp_path: Path) -> None:
    ranks = start(tmp_path, 2, 0, "long")
    outputs = [process.communicate(timeout=90) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], outputs
    assert all("went on" in out for out, _ in outputs) and not (tmp_path / "hang").exists()


def status(step: int, phase: str, progressed_at: float, received_at: float = 100.0) -> RankStatus:
    return RankStatus(Heartbeat(9, 9, step, phase, progressed_at, 1234, "elsewhere"), received_at, progressed_at)


def test_ranks_that_are_behind() -> None:
    def behind(*ranks: RankStatus) -> list[int]:
        return find_behind(dict(enumerate(ranks)), now=100.0, limit=60.0, interval=3.0)

    assert behind(status(3, "rollout", 10), status(3, "waiting", 30)) == [0]
    assert behind(status(3, "rollout", 10), status(3, "waiting", 50)) == [], "one has moved within the limit"
    assert behind(status(3, "rollout", 10), status(3, "rollout", 30)) == [], "the same phase may be long"
    assert behind(status(3, "reward", 31), status(3, "waiting", 30)) == [0], "it began when the other already waited"
    assert behind(status(3, "waiting", 10), status(3, "optimizer", 30)) == [0], "the other waits for it no more"
    assert behind(status(2, "save", 30), status(3, "rollout", 10)) == [0], "fewer steps"
    assert behind(status(3, "rollout", 10), status(3, "rollout", 30, received_at=20)) == [1], "silent"
    text = describe({rank: status(3, "rollout", 10) for rank in range(9)}, list(range(8)), 100.0)
    assert text.count("process 1234 on elsewhere") == 4 and "and 4 more ranks: [4, 5, 6, 7]" in text


@pytest.mark.parametrize(("phase", "minutes"), [("forward_backward", 9), ("rollout", 108), ("save", 108), ("loop", 9)])
def test_the_limit_is_longer_while_a_rank_works_alone(phase: str, minutes: float, tmp_path: Path) -> None:
    """The phases of all ranks count: a rank that waits for a rollout is in another phase itself."""
    watchdog = Watchdog(RunConfig(output_dir=str(tmp_path), num_steps=1))
    with PROGRESS.part("loop"):
        watchdog.ranks = {0: status(3, phase, 10), 1: status(3, "waiting", 30)}
        assert watchdog.limit == pytest.approx(60 * minutes)


@pytest.mark.parametrize(
    ("run", "rollout", "message"),
    [
        ({"hang_minutes": 11}, {}, "hang_minutes = 11.0 must be below timeout_minutes = 10.0"),
        ({"wait_minutes": 5}, {}, "wait_minutes = 5.0 must"),
        ({"timeout_minutes": 4}, {"engine": "sglang"}, "Set run.timeout_minutes above 5"),
    ],
)
def test_limits_that_contradict_each_other_are_rejected(
    run: dict[str, Any], rollout: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        configs.config(run=run, rollout=rollout)
    assert configs.config(run={"timeout_minutes": 6}, rollout={"engine": "sglang"}).run.wait_minutes == 120
