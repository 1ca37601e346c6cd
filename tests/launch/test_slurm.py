"""``sbatch launch/qwen3_moe_dppo.sh`` under a real Slurm: several nodes, real training of the tiny model."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import source_folders
from megatron_dppo.setup.starts import read_starts
from tests.e2e.runs import ROOT, flags, step_records
from tests.engines.servers import free_port
from tests.launch.jobs import (
    SCRIPT,
    Job,
    is_launcher,
    is_serve,
    processes_with,
    python_with,
    ranks_of,
    steps,
    two_ports,
    until_step,
)
from tests.launch.slurm import Slurm

pytestmark = pytest.mark.slurm

EXAMPLES = ROOT / "examples/chain_sum"
STUB = ROOT / "tests/unit/server_stub.py"
SMALL = flags(
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

PAGES = [*source_folders.PAGES, *ROOT.glob("examples/*/README.md")]

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
        assert "NCCL_CUMEM_ENABLE" not in env, "no server joins its communicator"
        assert port < int(env["MASTER_PORT"]) < port + 50, "the port that is taken"
    until_step(job, tmp_path / "run", 2)
    saved = steps(tmp_path / "run")[-1] - 1  # the checkpoint of the last one may be under way
    ranks[3].kill()
    job.start_again(1)
    assert job.end() == "COMPLETED", job.output
    first, second = read_starts(tmp_path / "run")
    assert first["resumed_step"] is None and saved <= second["resumed_step"] < 5
    # The checkpoint's own step: the metrics of a step that is lost may be there, so that none would be missing.
    (resumed,) = re.findall(r"resumed  \S+/step_0*(\d+) \(step (\d+),", job.output)
    assert set(map(int, resumed)) == {second["resumed_step"]}, job.output
    assert steps(tmp_path / "run") == [1, 2, 3, 4, 5]
    logs = tmp_path / f"megatron_dppo-{job.id}/trainer"
    assert f"has crashed with exit code 137 of rank 3 (logs: {logs}); it resumes from" in job.output
    assert "attempt 2 from there" in job.output and "4 processes = tp2 pp1 cp1 dp2 ep2" in job.output
    assert sorted(file.name for file in logs.glob("rank_*")) == ["rank_1.log", "rank_2.log", "rank_3.log"]


GPU_REQUESTS = [
    "--gpus=4",
    "--gpus=4 --cpus-per-gpu=1",
    "--gpus=4 --ntasks-per-gpu=1",
    "--gpus-per-node=2",
    "--gpus-per-node=2 --mem-per-gpu=1",
    "--gpus-per-task=1 --ntasks-per-node=2",
    "--gpus-per-socket=2 --sockets-per-node=1",
    "--gres=gpu:2",
]


def test_however_a_job_asks_for_gpus_each_rank_sees_those_of_its_node(slurm: Slurm, tmp_path: Path) -> None:
    python = python_with(tmp_path, 'echo "$CUDA_VISIBLE_DEVICES" >"$FOLDER/rank_$RANK"')
    jobs = {}
    for i, options in enumerate(GPU_REQUESTS):
        folder = tmp_path / str(i)
        folder.mkdir()
        arguments = (slurm, folder, 2, str(EXAMPLES / "dppo.toml"), "--run.output_dir", "run")
        jobs[options] = Job(*arguments, sbatch=["--partition=gpu", *options.split()], PYTHON=python, FOLDER=str(folder))
    for (options, job), folder in zip(jobs.items(), map(str, range(len(jobs))), strict=True):
        assert job.end() == "COMPLETED", f"{options}: {job.output}"
        assert "training on 2 nodes (g1 g2) with 2 ranks each" in job.output, options
        ranks = {file.name: file.read_text() for file in (tmp_path / folder).glob("rank_*")}
        assert ranks == {f"rank_{i}": "0,1\n" for i in range(4)}, options
    job = Job(slurm, tmp_path, 2, str(EXAMPLES / "dppo.toml"), sbatch=["--partition=gpu", "--gpus=3"], PYTHON=python)
    assert job.end() == "FAILED" and job.exit_code == 2
    assert re.search(r"--gpus=3 does not give 2 nodes [12] GPUs each; use --gpus-per-node", job.output), job.output


@pytest.mark.long
def test_a_job_whose_first_node_is_cut_off_goes_on_on_the_others_and_ends_what_is_left_there(
    slurm: Slurm, tmp_path: Path
) -> None:
    job = Job(
        *(slurm, tmp_path, 2, str(EXAMPLES / "dppo.toml"), *SMALL, "--expert-model-parallel-size", "2"),
        *("--run.num_steps", "200", "--checkpoint.save_every", "1", "--run.output_dir", "run"),
    )
    job.until("training on 2 nodes (n1 n2)")
    first = ranks_of(job, 2)[0]
    until_step(job, tmp_path / "run", 2)
    slurm.hosts.cut_off("n1")
    try:
        job.start_again(1)
        until_step(job, tmp_path / "run", steps(tmp_path / "run")[-1] + 2)
        assert first.wait(1) is None, "rank 0 of the first attempt was still there"
        assert (
            "is held by an earlier attempt of this job, process" in job.output and "it is asked to exit" in job.output
        )
        second = read_starts(tmp_path / "run")[-1]
        done = steps(tmp_path / "run")
        assert second["resumed_step"] >= 1 and done == list(range(1, len(done) + 1))
        assert "training on 2 nodes (n2 n3)" in job.output
        slurm.run("scancel", job.id)
        job.end()
    finally:
        slurm.hosts.connect("n1")
        slurm.until_idle()


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
    assert f"{where}; 2 attempts in a row ended without anything newer than the beginning in run" in job.output
    assert "  | rank 1 breaks" in job.output and "\nrank 1 breaks" not in job.output
    (tmp_path / "code").write_text("3")
    job = Job(slurm, tmp_path, 1, *options, str(EXAMPLES / "dppo.toml"), "--run.output_dir", "run", PYTHON=python)
    assert job.end() == "FAILED" and job.exit_code == 3, job.output
    assert "the trainer exited with code 3: a restart would fail in the same way" in job.output


def test_a_step_that_is_longer_than_the_time_that_is_left_is_given_up(slurm: Slurm, tmp_path: Path) -> None:
    trainer = f"trap '' TERM; while [ ! -e {tmp_path}/end ]; do sleep 0.2; done"
    config = [str(EXAMPLES / "dppo.toml"), "--run.output_dir", "run"]
    env = {"PYTHON": python_with(tmp_path, trainer), "SBATCH_TIMELIMIT": "1", "SBATCH_SIGNAL": "B:TERM@1"}
    job = Job(slurm, tmp_path, 1, "--shared", str(tmp_path / "shared"), *config, **env)
    job.until("training on")
    (tmp_path / "run/checkpoints/step_000004").mkdir(parents=True)
    job.signal()
    job.until("queueing the job again")
    assert re.search(r"finishes its step and saves; the job has [1-6]\d seconds left", job.output)
    assert "the step does not finish in the remaining time; the job resumes from its last checkpoint" in job.output
    job.start_again(1)
    (tmp_path / "end").touch()
    assert job.end() == "COMPLETED", job.output
    assert "the job was stopped; it resumes from the checkpoint of step 4" in job.output


def test_a_trainer_that_stops_before_the_time_limit_by_itself_goes_on_in_the_next_start(
    slurm: Slurm, tmp_path: Path
) -> None:
    """One of the two ranks ends later: it is not killed.

    The job is longer than the lead of ``#SBATCH --signal``, which would otherwise arrive in the middle.
    """
    trainer = (
        f'echo "$MEGATRON_DPPO_END_TIME $(date +%s)" >>{tmp_path}/times; [ "$RANK" = 0 ] || sleep 4; '
        f"mkdir -p {tmp_path}/run/checkpoints/step_000004; echo end >>{tmp_path}/ends; exit $(cat {tmp_path}/code)"
    )
    (tmp_path / "code").write_text("6")
    config = [str(EXAMPLES / "dppo.toml"), "--run.output_dir", "run", "--nproc-per-node", "2"]
    env = {"PYTHON": python_with(tmp_path, trainer), "SBATCH_TIMELIMIT": "60"}
    job = Job(slurm, tmp_path, 1, "--shared", str(tmp_path / "shared"), *config, **env)
    job.until("queueing the job again")
    assert (tmp_path / "ends").read_text() == "end\n" * 2
    (tmp_path / "code").write_text("0")
    job.start_again(1)
    assert job.end() == "COMPLETED" and job.restarts == 1, job.output
    assert "the job was stopped; it resumes from the checkpoint of step 4" in job.output
    for line in (tmp_path / "times").read_text().splitlines():
        end, now = map(int, line.split())
        assert 3300 < end - now <= 3510, "90 s before the end of a job of an hour"


def test_a_killed_serve_is_started_again_and_one_that_gives_up_is_left_out(slurm: Slurm, tmp_path: Path) -> None:
    port = free_port()
    python = python_with(tmp_path, f"while [ ! -e {tmp_path}/end ]; do sleep 0.2; done")
    shared = ["--shared", str(tmp_path / "shared")]
    servers = stub_servers(tmp_path, "die-later", port)
    job = Job(slurm, tmp_path, 2, *shared, str(EXAMPLES / ENGINE), *servers, PYTHON=python)
    job.until("training on 1 nodes")
    (serve,) = (p for p in psutil.process_iter() if is_serve(p, port))
    serve.kill()
    job.until("exited with code 137; they are restarted")
    job.until(f":{port} is healthy", times=2)
    (tmp_path / "die").touch()
    job.until("exited with code 2 and are not restarted")
    assert (
        "the server exited (exit code 7); it did not become healthy in 3 restarts" in job.output
        and "| out of memory" in job.output
    )
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
    job.until(f"serve: {killed}: the server exited (signal SIGKILL); restarting it (attempt 1 of 3")
    job.until(f"serve: {killed} is healthy", 240, times=2)
    (tmp_path / "closed").unlink()
    slurm.hosts.cut_off("n1")  # all servers at once, for less than it takes Slurm to give up the node
    time.sleep(8)
    slurm.hosts.connect("n1")
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


def test_it_saves_at_the_time_limit_at_preemption_and_by_hand_and_goes_on(slurm: Slurm, tmp_path: Path) -> None:
    arguments = [
        *(str(EXAMPLES / "dppo.toml"), "--run.output_dir", "run", "--eval.every", "100"),
        *("--run.num_steps", "24", "--parallel.expert_model_parallel_size", "1"),
        *("--checkpoint.save_every", "1"),
    ]
    job = Job(slurm, tmp_path, 1, *arguments)
    until_step(job, tmp_path / "run", 2)
    job.signal()
    job.start_again(1)
    stopped = steps(tmp_path / "run")[-1]
    assert stopped < 22 and job.output.count("queueing the job again") == 1
    until_step(job, tmp_path / "run", stopped + 2)
    slurm.run("sbatch", "--partition=urgent", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=true")
    job.start_again(2)
    stopped = steps(tmp_path / "run")[-1]
    assert job.output.count("queueing the job again") == 2 and stopped < 22
    until_step(job, tmp_path / "run", stopped + 1)
    slurm.run("scancel", "--signal=USR1", "--batch", job.id)
    assert job.end() == "COMPLETED" and "the same sbatch line resumes the run" in job.output, job.output
    assert job.output.count("queueing the job again") == 2 and steps(tmp_path / "run")[-1] < 24
    job = Job(slurm, tmp_path, 1, *arguments)
    assert job.end() == "COMPLETED", job.output
    assert steps(tmp_path / "run") == list(range(1, 25))


def test_doctor_over_srun_compares_the_nodes_and_measures_what_is_between_them(slurm: Slurm, tmp_path: Path) -> None:
    doctor = (sys.executable, "-m", "megatron_dppo.commands.main", "doctor", "--json", str(tmp_path / "report.json"))
    step = ("srun", "--nodes=2", "--ntasks-per-node=1", f"--chdir={tmp_path}")
    output = slurm.run(*step, *doctor, env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    for text in ("2 ranks on 2 nodes: n1, n2", "gloo between nodes: median", "(gloo, n1 -> n2)", "problems: none"):
        assert text in output, output
    report = json.loads((tmp_path / "report.json").read_text())
    assert [(rank["host"], rank["host_addresses"]) for rank in report["ranks"]] == [
        (name, [slurm.hosts.addresses[name]]) for name in ("n1", "n2")
    ]


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
        # Those behind the configuration are its overrides and Megatron's flags.
        config = next(i for i, word in enumerate(words) if word.endswith((".toml", "CONFIG")) and i > script)
        options = [word for word in words[script + 1 : config] if word.startswith("--")]
        usage = slurm.run("bash", str(SCRIPT), "--help")
        assert all(f"{option.partition('=')[0]} " in usage for option in options), line


def sbatch_lines(page: Path) -> list[str]:
    """The commands of a page, those that go on after a backslash as one line."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    return [line.strip(" `|") for line in re.findall(r"sbatch --[^`\n]*qwen3_moe_dppo.sh[^`\n|]*", text)]
