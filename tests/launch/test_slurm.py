"""``sbatch launch/qwen3_moe_dppo.sh`` under a real Slurm: several nodes, real training of the tiny model."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.runs import ROOT, flags, records
from tests.engines.servers import free_port
from tests.launch.jobs import Job
from tests.launch.slurm import Slurm

pytestmark = pytest.mark.slurm

EXAMPLES = ROOT / "examples/chain_sum"
STUB = ROOT / "tests/unit/server_stub.py"
SMALL = flags(
    warmup__num_steps=5,
    rollout__prompts_per_step=4,
    rollout__samples_per_prompt=4,
    eval__max_prompts=8,
    run__num_steps=3,
)


ENGINE = "sglang.toml"
"""the example that ``test_servers_on_one_node...`` trains"""


def stub_servers(folder: Path, mode: str, port: int) -> list[str]:
    """Stand-ins for servers: the launching alone."""
    command = json.dumps([sys.executable, str(STUB), str(folder), mode])
    return flags(rollout__servers__command=command, rollout__servers__port=port)


def test_two_nodes_train_one_model_with_megatrons_flags_passed_through(slurm: Slurm, tmp_path: Path) -> None:
    job = Job(
        *(slurm, tmp_path, 2, "--nproc-per-node=2", str(EXAMPLES / "dppo.toml"), *SMALL),
        *("--tensor-model-parallel-size", "2", "--expert-model-parallel-size", "2", "--run.output_dir", "run"),
    )
    assert job.end() == "COMPLETED", job.output
    assert "training on 2 nodes (n1 n2) with 2 ranks each" in job.output
    assert "4 processes = tp2 pp1 cp1 dp2 ep2" in job.output
    assert steps(tmp_path / "run") == [1, 2, 3]


def test_servers_on_one_node_and_the_trainer_on_two(slurm: Slurm, tmp_path: Path) -> None:
    job = Job(
        *(slurm, tmp_path, 3, "--server-nodes", "1", "--shared", str(tmp_path / "shared"), str(EXAMPLES / ENGINE)),
        *(*SMALL, "--rollout.servers.port", str(free_port()), "--run.output_dir", "run"),
        *("--rollout.sglang.log-level", "info"),
    )
    assert job.end(400) == "COMPLETED", job.output
    (url,) = (tmp_path / "shared/urls-n1").read_text().split()
    assert f"serve: {url} is healthy" in job.output and f"serve: {url}: healthy, SGLang 0.5.23" in job.output
    assert job.output.index("healthy, SGLang") < job.output.index("training on 2 nodes (n2 n3) with 1 ranks each")
    assert steps(tmp_path / "run") == [1, 2, 3]
    log = tmp_path / "shared/servers-n1/server_0.log"
    text = log.read_text()
    assert "GET /health" in text and "POST /begin_weight_update" in text
    assert not processes_with(url.rpartition(":")[2]), "servers were left behind"


def test_it_saves_before_the_time_limit_and_at_preemption_and_goes_on(slurm: Slurm, tmp_path: Path) -> None:
    job = Job(
        *(slurm, tmp_path, 1, str(EXAMPLES / "dppo.toml"), "--run.output_dir", "run", "--eval.every", "100"),
        *("--warmup.num_steps", "5", "--run.num_steps", "40", "--parallel.expert_model_parallel_size", "1"),
        *("--checkpoint.save_every", "1"),  # Megatron's writer process is there when the step signal comes
    )
    until_step(job, tmp_path / "run", 2)
    job.signal()
    job.start_again(1)
    stopped = steps(tmp_path / "run")[-1]
    assert stopped < 38 and job.output.count("queueing the job again") == 1
    until_step(job, tmp_path / "run", stopped + 2)
    slurm.run("sbatch", "--partition=urgent", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=true")
    job.start_again(2)
    assert job.output.count("queueing the job again") == 2 and steps(tmp_path / "run")[-1] < 40
    assert job.end() == "COMPLETED", job.output
    assert steps(tmp_path / "run") == list(range(1, 41))


def test_the_death_of_a_server_ends_the_job_and_says_why(slurm: Slurm, tmp_path: Path) -> None:
    servers = stub_servers(tmp_path, "die-later", free_port())
    job = Job(*(slurm, tmp_path, 2, str(EXAMPLES / ENGINE), *SMALL, *servers, "--expert-model-parallel-size", "1"))
    job.until("training on 1 nodes (n2)")
    (tmp_path / "die").touch()
    assert job.end() == "FAILED" and job.exit_code == 1
    assert "the server has ended (exit code 7)" in job.output and "| out of memory" in job.output
    assert "the servers on n1 have ended (exit code 2), so the job ends" in job.output


def test_servers_that_do_not_start_end_the_job_before_training(slurm: Slurm, tmp_path: Path) -> None:
    job = Job(*(slurm, tmp_path, 2, str(EXAMPLES / ENGINE), *stub_servers(tmp_path, "die", free_port())))
    assert job.end() == "FAILED" and job.exit_code == 1
    assert "| no such model" in job.output and "the servers on n1 did not start" in job.output
    assert "training on" not in job.output


@pytest.mark.parametrize(
    ("nodes", "arguments", "message"),
    [
        (2, ["--server-nodes", "2", str(EXAMPLES / "sglang.toml")], "leaves no node to the trainer"),
        (2, ["--server-nodes", "0", str(EXAMPLES / "sglang.toml")], "--server-nodes 0 is for one node"),
        (1, ["--server-nodes", "x", str(EXAMPLES / "sglang.toml")], "expected a number of nodes"),
        (2, ["--server-nodes", "1", str(EXAMPLES / "dppo.toml")], "this configuration starts no servers"),
        (1, ["--nproc-per-node", "0", str(EXAMPLES / "dppo.toml")], "expected a number of ranks"),
        (1, ["nowhere.toml"], "configuration file 'nowhere.toml' does not exist"),
    ],
)
def test_arguments_that_cannot_work_are_named(
    slurm: Slurm, tmp_path: Path, nodes: int, arguments: list[str], message: str
) -> None:
    job = Job(slurm, tmp_path, nodes, *arguments)
    assert job.end() == "FAILED" and job.exit_code == 2, job.output
    assert message in job.output


def steps(folder: Path) -> list[int]:
    file = folder / "metrics.jsonl"
    return [r["step"] for r in records(folder) if "train/loss" in r] if file.exists() else []


def until_step(job: Job, folder: Path, step: int) -> None:
    end = time.monotonic() + 120
    while not (done := steps(folder)) or done[-1] < step:
        assert time.monotonic() < end, f"no step {step}:\n{job.output}"
        time.sleep(0.1)


def processes_with(word: str) -> list[str]:
    shown = (p.cmdline() for p in psutil.process_iter() if p.status() != psutil.STATUS_ZOMBIE)
    return [" ".join(line) for line in shown if word in line]
