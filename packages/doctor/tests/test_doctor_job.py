"""``doctor`` in a job: every fault that is injected is named, with its rank; a good job has none."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_dppo.errors import ConfigError
from megatron_dppo_doctor.doctor.job_rank import read_job_rank
from megatron_dppo_doctor.doctor.rank_facts import RankFacts, compare_facts, format_rows
from megatron_dppo_doctor.doctor.shared_files import is_locked
from tests.engines.servers import free_port

ROWS = {"python": "3.12", "torch": "2.13.0", "NCCL": "2.29.7", "driver": "580.95", "NCCL_CUMEM_ENABLE": "0"}
GOOD = RankFacts(
    rank=0,
    host="n1",
    rows=ROWS,
    host_addresses=["10.0.0.1"],
    interface="",
    max_open_files=1_048_576,
    locked_memory=-1,
    shared_memory_gib=64.0,
    num_gpus=8,
    bad_combinations=[],
)
OTHER = replace(GOOD, rank=1, host="n2", host_addresses=["10.0.0.2"])
FAULTS = {
    "NCCL": (replace(OTHER, rows=ROWS | {"NCCL": "2.30.7"}), "NCCL differs: 2.29.7 (rank 0 on n1); 2.30.7", True),
    "torch": (replace(OTHER, rows=ROWS | {"torch": "2.14.1"}), "torch differs: 2.13.0 (rank 0 on n1); 2.14.1", True),
    "driver": (replace(OTHER, rows=ROWS | {"driver": "570.1"}), "driver differs", False),
    "cumem": (replace(OTHER, rows=ROWS | {"NCCL_CUMEM_ENABLE": "1"}), "NCCL_CUMEM_ENABLE differs", True),
    "loopback": (replace(OTHER, host_addresses=["127.0.1.1"]), "resolves to 127.0.1.1 there (rank 1 on n2)", True),
    "loopback 6": (replace(OTHER, host_addresses=["::1", "127.0.0.1"]), "resolves to ::1, 127.0.0.1 there", True),
    "no address": (replace(OTHER, host_addresses=[]), "does not resolve there (rank 1 on n2)", True),
    "open files": (replace(OTHER, max_open_files=256), "the hard limit of open files is 256 (rank 1 on n2)", True),
    "memlock": (replace(OTHER, locked_memory=2**16), "locked memory is limited to 0 MiB (rank 1 on n2)", False),
    "shm": (replace(OTHER, shared_memory_gib=0.06), "/dev/shm has 0.06 GiB free (rank 1 on n2)", False),
    "combination": (
        replace(OTHER, bad_combinations=[("torch 2.5.1: too old", "install a newer one", True)]),
        "torch 2.5.1: too old (rank 1 on n2). Fix: install a newer one",
        True,
    ),
}


def test_the_limit_on_open_files_covers_the_mesh_and_the_store() -> None:
    # 1,023 sockets to the other ranks, 2 of each rank to the store, and 512 other files.
    for limit, is_enough in ((3583, True), (3582, False)):
        findings = list(compare_facts([replace(GOOD, rank=rank, max_open_files=limit) for rank in range(1024)], {}))
        assert not findings if is_enough else "1024 ranks need up to 3583" in str(findings[0]), findings


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_one_rank_is_named_alone(name: str) -> None:
    other, text, is_fatal = FAULTS[name]
    findings = list(compare_facts([GOOD, other], {}))
    assert len(findings) == 1 and text in str(findings[0]) and findings[0].is_fatal == is_fatal, findings
    assert findings[0].fix


def test_a_good_job_has_no_finding_and_equal_rows_are_one_line() -> None:
    assert list(compare_facts([GOOD, OTHER], {"n2": 0.3})) == []
    assert list(compare_facts([GOOD, replace(OTHER, host_addresses=["127.0.1.1"], interface="eth0")], {})) == []
    assert list(format_rows([GOOD, OTHER]))[2] == "NCCL: 2.29.7"
    skewed = list(compare_facts([GOOD, OTHER], {"n2": -7.25}))
    assert len(skewed) == 1 and "the clock of n2 is 7.2 s behind rank 0's" in str(skewed[0])


def test_many_ranks_are_counted() -> None:
    ranks = [replace(OTHER, rank=rank, host=f"n{rank // 8}", max_open_files=1024) for rank in range(1024)]
    text = str(next(compare_facts(ranks, {})))
    assert "(ranks 0, 1 and 1022 more on n0, n1, n2, n3 and 124 more); 1024 ranks need up to 3583" in text


def test_ranks_of_torchrun_and_srun_are_read_and_a_batch_script_is_none() -> None:
    torchrun = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
    job = read_job_rank(torchrun | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert job is not None and (job.rank, job.world_size, job.local_rank, job.port) == (3, 4, 1, 29500)
    assert job.launcher_has_store
    batch = {"SLURM_JOB_ID": "12345", "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    assert read_job_rank({}) is read_job_rank(batch) is read_job_rank({"WORLD_SIZE": "1", "RANK": "0"}) is None
    step = batch | {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_STEP_NODELIST": "n[1-2]",
        "MASTER_ADDR": "10.0.0.1",
    }
    job = read_job_rank(step)
    assert job is not None and (job.address, job.port, job.launcher_has_store) == ("10.0.0.1", 22345, False)
    assert job.local_world_size == 1
    with pytest.raises(ConfigError, match="MASTER_ADDR, MASTER_PORT"):
        read_job_rank({"WORLD_SIZE": "2", "RANK": "0"})


def start(
    rank: int, world_size: int, port: int, folder: Path, *more: str, prefix: str = "", limit: float = 60.0
) -> subprocess.Popen[str]:
    """Start one rank; ``prefix`` is a shell command before it."""
    script = (
        "import sys; from megatron_dppo_doctor.doctor import job, network, shared_files\n"
        f"network.LIMIT_SECONDS = job.LIMIT_SECONDS = shared_files.LIMIT_SECONDS = {limit}\n"
        "shared_files._VISIBLE_SECONDS = 3.0\n"
        "from megatron_dppo.commands.main import main; sys.exit(main(['doctor', *sys.argv[1:]]))"
    )
    ranks = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port)}
    command = [sys.executable, "-c", script, *more]
    if prefix:
        command = ["unshare", "--uts", "--mount", "bash", "-c", f'{prefix}; exec "$@"', "bash", *command]
    return subprocess.Popen(
        command,
        env=os.environ | ranks | {"MASTER_ADDR": "127.0.0.1"},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_two_real_processes_are_measured_and_have_no_problem(tmp_path: Path) -> None:
    port = free_port()
    other = start(1, 2, port, tmp_path)
    first = start(0, 2, port, tmp_path, "--json", "report.json")
    output = first.communicate(timeout=120)[0]
    assert first.returncode == 0 and other.wait(30) == 0, output + other.communicate()[0]
    for text in ("problems: none", "GB/s a link", "1 of 1 readers saw writes", "one bucket of 4 MiB arrived unchanged"):
        assert text in output, output
    report = json.loads((tmp_path / "report.json").read_text())
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1] and report["findings"] == []
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"], "what it wrote is removed"


def test_a_lock_of_another_process_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    script = (
        "import fcntl, sys; f = open(sys.argv[1], 'r+'); fcntl.lockf(f, fcntl.LOCK_EX); print(1, flush=True); input()"
    )
    command = [sys.executable, "-c", script, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "1\n"
        assert is_locked(path)
        holder.communicate("\n")
    assert not is_locked(path), "a file system on which the lock is not seen"


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="namespaces need root")
@pytest.mark.slow
def test_faults_of_one_real_rank_are_all_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 has another host name, folder, limit, variable and clock."""
    port = free_port()
    run, elsewhere, clock = tmp_path / "run", tmp_path / "elsewhere", tmp_path / "clock"
    for folder in (run, elsewhere, clock):
        folder.mkdir()
    (clock / "sitecustomize.py").write_text("import time\nreal = time.time\ntime.time = lambda: real() + 30\n")
    prefix = (
        f"hostname other-node; mount --bind {elsewhere} {run}; cd {run}; ulimit -n 300; "
        f"export NCCL_CUMEM_ENABLE=1 PYTHONPATH={clock}:$PYTHONPATH"
    )
    other = start(1, 2, port, run, prefix=prefix)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    first = start(0, 2, port, run)
    output = first.communicate(timeout=180)[0]
    assert first.returncode == 1 and other.wait(30) == 0, output + other.communicate()[0]
    for text in (
        "2 nodes:",
        "NCCL_CUMEM_ENABLE differs: - (rank 0 on",
        "the host's own name does not resolve there (rank 1 on other-node)",
        "the hard limit of open files is 300 (rank 1 on other-node)",
        "the clock of other-node is 30.0 s ahead of rank 0's",
        f"{run} on other-node: what rank 0 wrote does not appear",
        "warning  GLOO_SOCKET_IFNAME differs",
        "problems: 4",
    ):
        assert text in output, output
    assert list(run.iterdir()) == list(elsewhere.iterdir()) == []


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named_and_a_wrong_address_too(tmp_path: Path) -> None:
    port = free_port()
    alone = start(0, 3, port, tmp_path, limit=4.0)
    present = start(2, 3, port, tmp_path, limit=4.0)
    output = alone.communicate(timeout=60)[0]
    present.communicate(timeout=60)
    assert alone.returncode == 2 and present.returncode == 2
    assert "1 of 3 ranks did not report within 4 s: 1. Nodes that reported:" in output, output
    lost = start(1, 3, free_port(), tmp_path, limit=4.0)
    output = lost.communicate(timeout=60)[0]
    assert lost.returncode == 2 and "rank 1 on" in output and "within 4 s" in output, output
