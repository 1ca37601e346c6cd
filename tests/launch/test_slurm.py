"""``sbatch launch/qwen3_moe_dppo.sh`` under a real Slurm: several nodes, real training of the tiny model."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_dppo.run.starts import read_starts
from tests.e2e.runs import ROOT, flags, records, step_records
from tests.engines.servers import free_port
from tests.launch.jobs import SCRIPT, Job
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


GATE = """
import os, time
def score(*, completion, **_):
    while os.path.exists(os.environ["FOLDER"] + "/closed"):
        time.sleep(0.1)
    return len(completion) % 2
"""

HOLD = "import socket, sys; socket.create_server(('', int(sys.argv[1]))).accept()"
"""holds a port"""

PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *ROOT.glob("examples/*/README.md")]

ENGINE = "sglang.toml"
"""the example that ``test_servers_on_one_node...`` trains"""


def stub_servers(folder: Path, mode: str, port: int) -> list[str]:
    """Stand-ins for servers: the launching alone."""
    command = json.dumps([sys.executable, str(STUB), str(folder), mode])
    return flags(rollout__servers__command=command, rollout__servers__port=port)


def test_a_killed_rank_costs_the_running_step_and_flags_settings_and_outputs_are_in_their_places(
    slurm: Slurm, tmp_path: Path
) -> None:
    job = Job(
        *(slurm, tmp_path, 2, "--nproc-per-node=2", "--srun-args=--export=ALL,FROM_SRUN_ARGS=here"),
        *(str(EXAMPLES / "dppo.toml"), *SMALL, "--run.num_steps", "5", "--checkpoint.save_every", "1"),
        *("--tensor-model-parallel-size", "2", "--expert-model-parallel-size", "2", "--run.output_dir", "run"),
    )
    port = 20000 + int(job.id) % 10000
    with subprocess.Popen(slurm.hosts.command("n1", sys.executable, "-c", HOLD, str(port))) as holder:
        job.until("training on 2 nodes (n1 n2) with 2 ranks each")
        ranks = ranks_of(job, 4)
        holder.kill()
    for rank, process in ranks.items():
        env = process.environ()
        assert env["LOCAL_RANK"] == str(rank % 2) and env["FROM_SRUN_ARGS"] == "here"
        assert env["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
        assert env["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
        assert port < int(env["MASTER_PORT"]) < port + 50, "the port that is taken"
    until_step(job, tmp_path / "run", 2)
    saved = steps(tmp_path / "run")[-1] - 1  # the checkpoint of the last one may be under way
    ranks[3].kill()
    job.start_again(1)
    assert job.end() == "COMPLETED", job.output
    first, second = read_starts(tmp_path / "run")
    assert first["resumed_step"] is None and saved <= second["resumed_step"] < 5
    assert steps(tmp_path / "run") == [1, 2, 3, 4, 5]
    logs = tmp_path / f"megatron_dppo-{job.id}/trainer"
    assert f"has crashed with exit code 137 of rank 3 (logs: {logs}); it goes on from" in job.output
    assert "try 2 from there" in job.output and "4 processes = tp2 pp1 cp1 dp2 ep2" in job.output
    assert sorted(file.name for file in logs.glob("rank_*")) == ["rank_1.log", "rank_2.log", "rank_3.log"]


def test_a_trainer_that_always_crashes_is_tried_as_often_as_allowed_and_one_that_cannot_go_on_is_not(
    slurm: Slurm, tmp_path: Path
) -> None:
    python = python_with(
        tmp_path, f'echo "rank $RANK breaks"; [ "$RANK" = 1 ] || sleep 30; exit "$(cat {tmp_path}/code)"'
    )
    options = ["--nproc-per-node", "2", "--max-restarts", "1", "--shared", str(tmp_path / "shared")]
    (tmp_path / "code").write_text("134")
    job = Job(slurm, tmp_path, 1, *options, str(EXAMPLES / "dppo.toml"), "--run.output_dir", "run", PYTHON=python)
    job.start_again(1)
    assert job.end() == "FAILED" and job.exit_code == 134, job.output
    where = f"has crashed with exit code 134 of rank 1 (logs: {tmp_path / 'shared/trainer'})"
    assert job.output.count(where) == 2 and job.output.count("queueing the job again") == 1
    assert f"{where}; 2 tries in a row ended without anything newer than the beginning in run" in job.output
    assert "  | rank 1 breaks" in job.output and "\nrank 1 breaks" not in job.output
    (tmp_path / "code").write_text("3")
    job = Job(slurm, tmp_path, 1, *options, str(EXAMPLES / "dppo.toml"), "--run.output_dir", "run", PYTHON=python)
    assert job.end() == "FAILED" and job.exit_code == 3, job.output
    assert "the trainer has ended with exit code 3, which another try would not change" in job.output


def test_a_step_that_is_longer_than_the_time_that_is_left_is_given_up(slurm: Slurm, tmp_path: Path) -> None:
    trainer = f"trap '' TERM; while [ ! -e {tmp_path}/end ]; do sleep 0.2; done"
    config = [str(EXAMPLES / "dppo.toml"), "--run.output_dir", "run"]
    env = {"PYTHON": python_with(tmp_path, trainer), "SBATCH_TIMELIMIT": "1", "SBATCH_SIGNAL": "B:TERM@1"}
    job = Job(slurm, tmp_path, 1, "--shared", str(tmp_path / "shared"), *config, **env)
    job.until("training on")
    (tmp_path / "run/checkpoints/step_000004").mkdir(parents=True)
    job.signal()
    job.until("queueing the job again")
    assert re.search(r"finishes its step and saves; [1-5]\d seconds are left to the job", job.output)
    assert "the step does not end in the time that is left; the job goes on from its last checkpoint" in job.output
    job.start_again(1)
    (tmp_path / "end").touch()
    assert job.end() == "COMPLETED", job.output
    assert "the job was stopped; it goes on from the checkpoint of step 4" in job.output


def test_a_killed_serve_is_started_again_and_one_that_gives_up_is_left_out(slurm: Slurm, tmp_path: Path) -> None:
    port = free_port()
    python = python_with(tmp_path, f"while [ ! -e {tmp_path}/end ]; do sleep 0.2; done")
    shared = ["--shared", str(tmp_path / "shared")]
    servers = stub_servers(tmp_path, "die-later", port)
    job = Job(slurm, tmp_path, 2, *shared, str(EXAMPLES / ENGINE), *servers, PYTHON=python)
    job.until("training on 1 nodes")
    (serve,) = (p for p in psutil.process_iter() if is_serve(p, port))
    serve.kill()
    job.until("have ended (exit code 137); they are started again")
    while job.output.count(f"serve: http://{slurm.hosts.addresses['n1']}:{port} is healthy") < 2:
        job.until("serve:")
        time.sleep(0.2)
    (tmp_path / "die").touch()
    job.until("have ended (exit code 2) and are left out")
    assert "the server has ended (exit code 7), as in 3 starts before" in job.output and "| out of memory" in job.output
    (tmp_path / "end").touch()
    assert job.end() == "COMPLETED" and job.restarts == 0, job.output


def test_servers_on_one_node_and_the_trainer_on_two_and_a_killed_server_works_again(
    slurm: Slurm, tmp_path: Path
) -> None:
    (tmp_path / "gate.py").write_text(GATE)
    port = two_ports()
    job = Job(
        *(slurm, tmp_path, 3, "--server-nodes", "1", "--shared", str(tmp_path / "shared"), str(EXAMPLES / ENGINE)),
        *(*SMALL, "--rollout.servers.port", str(port), "--rollout.servers.count", "2", "--run.output_dir", "run"),
        *("--rollout.sglang.log-level", "info", "--run.num_steps", "5"),
        *("--reward.function", f"{tmp_path / 'gate.py'}:score", "--reward.timeout_seconds", "300"),
        FOLDER=str(tmp_path),
    )
    until_step(job, tmp_path / "run", 1, 240)
    (tmp_path / "closed").touch()  # the steps wait in their rewards until the server is back
    servers = [f"http://{slurm.hosts.addresses['n1']}:{port + i}" for i in range(2)]
    killed = servers[1]
    (launcher,) = (p for p in psutil.process_iter() if is_launcher(p, port + 1))
    launcher.kill()
    job.until(f"serve: {killed}: the server has ended (signal SIGKILL); it is started again (try 1 of 3")
    while job.output.count(f"serve: {killed} is healthy") < 2:
        job.until("serve:")  # fails when the job ends
        time.sleep(0.5)
    (tmp_path / "closed").unlink()
    assert job.end(400) == "COMPLETED", job.output
    assert steps(tmp_path / "run") == list(range(1, 6)) and job.restarts == 0
    assert (tmp_path / "shared/urls-n1").read_text().split() == servers
    assert f"serve: {killed}: healthy, SGLang 0.5.23" in job.output
    assert job.output.index("healthy, SGLang") < job.output.index("training on 2 nodes (n2 n3) with 1 ranks each")
    assert all(record["train/abs_prob_diff_first"] < 1e-5 for record in step_records(tmp_path / "run"))
    lives = (tmp_path / "shared/servers-n1/server_1.log").read_text().split("The server is fired up")
    assert len(lives) == 3, "one log for both lives"
    for life in lives[1:]:
        assert "POST /begin_weight_update" in life and "POST /generate" in life.partition("POST /end_weight_update")[2]
    assert not processes_with(str(port)), "servers were left behind"


def test_it_saves_before_the_time_limit_and_at_preemption_and_goes_on(slurm: Slurm, tmp_path: Path) -> None:
    job = Job(
        *(slurm, tmp_path, 1, str(EXAMPLES / "dppo.toml"), "--run.output_dir", "run", "--eval.every", "100"),
        *("--warmup.num_steps", "5", "--run.num_steps", "40", "--parallel.expert_model_parallel_size", "1"),
        *("--checkpoint.save_every", "1"),
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
        (1, ["--max-restarts", "-1", str(EXAMPLES / "dppo.toml")], "--max-restarts = '-1': expected a number"),
        (1, ["nowhere.toml"], "configuration file 'nowhere.toml' does not exist"),
    ],
)
def test_arguments_that_cannot_work_are_named(
    slurm: Slurm, tmp_path: Path, nodes: int, arguments: list[str], message: str
) -> None:
    job = Job(slurm, tmp_path, nodes, *arguments)
    assert job.end() == "FAILED" and job.exit_code == 2, job.output
    assert message in job.output


def test_every_sbatch_line_of_the_documentation_is_one(slurm: Slurm, tmp_path: Path) -> None:
    lines = sorted({line for page in PAGES for line in sbatch_lines(page)})
    assert len(lines) >= 3
    for line in lines:
        # This cluster has fewer and smaller nodes: they are counted down, after the line itself has been read.
        words = [word for word in shlex.split(line)[1:] if not word.startswith(("--nodes", "--gpus-per-node"))]
        script = words.index("launch/qwen3_moe_dppo.sh")
        told = slurm.run("sbatch", "--test-only", "--nodes=1", f"--chdir={ROOT}", *words[:script], str(SCRIPT))
        assert told == "", line
        options = [word for word in words[script + 1 :] if word.startswith("--") and "." not in word]
        usage = slurm.run("bash", str(SCRIPT), "--help")
        assert all(f"{option.partition('=')[0]} " in usage for option in options), line


def sbatch_lines(page: Path) -> list[str]:
    """The commands of a page, those that go on after a backslash as one line."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    return [line.strip(" `|") for line in re.findall(r"sbatch --[^`\n]*qwen3_moe_dppo.sh[^`\n|]*", text)]


def ranks_of(job: Job, count: int) -> dict[int, psutil.Process]:
    """The trainer's processes themselves, not the shells around them."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        found = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                env, line = process.environ(), process.cmdline()
                if env.get("SLURM_JOB_ID") == job.id and "RANK" in env and line[1:3] == ["-m", "megatron_dppo.train"]:
                    found[int(env["RANK"])] = process
        if len(found) == count:
            return found
        time.sleep(0.2)
    raise AssertionError(f"{found} of {count} ranks:\n{job.output}")


def two_ports() -> int:
    """The first of two free ports; not among those that the kernel gives to outgoing connections."""
    while True:
        port = free_port()
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port + 1)):
            return port


def python_with(folder: Path, trainer: str) -> str:
    """An interpreter that runs a line of shell in the place of the trainer."""
    python = folder / "python"
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *megatron_dppo.train*) {trainer}; exit 0;; esac\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    return str(python)


def is_serve(process: psutil.Process, port: int) -> bool:
    """Whether it is the ``megatron-dppo serve`` of a port."""
    with contextlib.suppress(psutil.Error):
        line = process.cmdline()
        return line[1:4] == ["-m", "megatron_dppo.cli.main", "serve"] and str(port) in line
    return False


def is_launcher(process: psutil.Process, port: int) -> bool:
    """Whether it is what `serve` has started for a port: the leader of a session."""
    with contextlib.suppress(psutil.Error, OSError):
        line = process.cmdline()
        return str(port) in line and "--model-path" in line and os.getsid(process.pid) == process.pid
    return False


def steps(folder: Path) -> list[int]:
    file = folder / "metrics.jsonl"
    return [r["step"] for r in records(folder) if "train/loss" in r] if file.exists() else []


def until_step(job: Job, folder: Path, step: int, timeout: float = 120) -> None:
    end = time.monotonic() + timeout
    while not (done := steps(folder)) or done[-1] < step:
        assert time.monotonic() < end and job.state != "FAILED", f"no step {step}:\n{job.output}"
        time.sleep(0.1)


def processes_with(word: str) -> list[str]:
    shown = (p.cmdline() for p in psutil.process_iter() if p.status() != psutil.STATUS_ZOMBIE)
    return [" ".join(line) for line in shown if word in line]
