"""``rollout.servers.colocated`` under a real Slurm: every node trains and has a server."""

from __future__ import annotations

import json
import sys
from itertools import groupby
from pathlib import Path

import pytest

from tests.e2e.runs import flags, step_records
from tests.engines.servers import free_port
from tests.launch.jobs import Job, processes_with, steps
from tests.launch.slurm import Slurm
from tests.launch.test_slurm import EXAMPLES

pytestmark = pytest.mark.slurm

TURN = ["take", "weights", "take", "generate", "release"]
FIRST_LIFE = ["start", "release", *TURN]
"""Until the update of the first step."""
SECOND_LIFE = ["start", *TURN[1:2], *TURN[3:], *TURN]
"""The second step, and the evaluation after it; what has just started has its memory."""


def test_servers_on_the_nodes_that_train_take_turns_with_it_and_may_all_die_while_it_has_the_gpus(
    slurm: Slurm, tmp_path: Path
) -> None:
    port = free_port()
    command = json.dumps([sys.executable, "-m", "tests.launch.colocated_server", str(tmp_path), "2"])
    job = Job(
        *(slurm, tmp_path, 2, "--shared", str(tmp_path / "shared"), str(EXAMPLES / "sglang.toml")),
        *flags(
            rollout__prompts_per_step=2, rollout__samples_per_prompt=4, rollout__max_new_tokens=8, eval__max_prompts=2
        ),
        *flags(rollout__servers__client_processes=0, checkpoint__export_hf="false"),
        *flags(run__num_steps=2, run__output_dir="run", eval__every=100, train__router_replay="off"),
        *flags(rollout__servers__command=command, rollout__servers__port=port, rollout__servers__colocated="true"),
        *flags(rollout__weight_sync__method="disk", rollout__servers__unavailable_timeout_seconds=100),
    )
    assert job.end() == "COMPLETED", job.output
    assert steps(tmp_path / "run") == [1, 2] and job.restarts == 0
    assert "training on 2 nodes (n1 n2) with 1 ranks each" in job.output
    assert all(record["train/abs_prob_diff_first"] < 1e-5 for record in step_records(tmp_path / "run"))
    second_lives = []
    for node in ("n1", "n2"):
        url = f"http://{slurm.hosts.addresses[node]}:{port}"
        assert (tmp_path / f"shared/urls-{node}").read_text().split() == [url]
        assert job.output.count(f"serve: {url}: the server exited (signal SIGKILL); restarting it") == 1
        calls = [call for call, _ in groupby((tmp_path / f"calls-{slurm.hosts.addresses[node]}").read_text().split())]
        assert calls[: len(FIRST_LIFE)] == FIRST_LIFE and calls[-len(TURN) :] == TURN, calls
        second_lives.append(calls[len(FIRST_LIFE) :])
    assert SECOND_LIFE in second_lives, "one may come late to the second step; no step is possible without any"
    assert not processes_with(str(port)), "servers were left behind"
