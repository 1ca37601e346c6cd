"""``launch/qwen3_moe_dppo.sh`` with servers over several nodes; stand-ins for Slurm's programs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SCONTROL = r"""#!/bin/bash
case "$*" in
*"show hostnames"*) printf 'n0\nn1\nn2\nn3\nn4\n' ;;
*"show node"*) echo "NodeName=${!#} NodeAddr=10.0.0.${!##n} State=UP" ;;
*"show job"*) echo "JobId=1 JobState=RUNNING " ;;
esac
"""
# Runs what only prints. A server writes its URLs as ``serve`` does, and ends soon. The check of the servers fails.
SRUN = r"""#!/bin/bash
echo "$*" >>"$CALLS"
command=("$@")
while [[ ${command[0]} == -* ]]; do command=("${command[@]:1}"); done
case "$*" in
*"--print-"*) exec "${command[@]}" ;;
*"--urls-file"*)
    file=$(sed 's/.*--urls-file \([^ ]*\).*/\1/' <<<"$*")
    node=$(sed 's/.*--nodelist=\([^ ]*\).*/\1/' <<<"$*")
    case "$*" in *"--node-rank 1"*) : >"$file" ;; *) echo "http://$node:30000" >"$file" ;; esac
    sleep 1
    ;;
*"--job-name=check"*) exit 1 ;; # the job ends here, before its trainer starts
esac
"""


def run_job(
    folder: Path, server_nodes: int, *overrides: str, example: str = "qwen3_30b_a3b/dppo.toml"
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run the script on five nodes and return the calls of srun."""
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN), ("squeue", "#!/bin/sh\n"), ("scancel", "#!/bin/sh\n")):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[0-4]", "SLURM_CPUS_ON_NODE": "8", "SLURM_GPUS_ON_NODE": "8"}
    paths = {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHON": sys.executable, "CALLS": str(folder / "calls")}
    (folder / "calls").touch()
    (folder / "shared").mkdir()
    script = [str(ROOT / "launch/qwen3_moe_dppo.sh"), "--server-nodes", str(server_nodes), "--shared", "shared"]
    config = str(ROOT / "examples" / example)
    result = subprocess.run(
        ["bash", *script, config, "--rollout.servers.count", "1", *overrides],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **slurm, **paths},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return result, (folder / "calls").read_text().splitlines()


@pytest.mark.parametrize(
    ("engine", "size", "example"),
    [("sglang", "tp-size", "qwen3_30b_a3b/dppo.toml"), ("vllm", "tensor-parallel-size", "chain_sum/vllm.toml")],
)
def test_each_node_of_a_server_has_its_rank_and_the_address_of_the_first(
    engine: str, size: str, example: str, tmp_path: Path
) -> None:
    spanning = (f"--rollout.{engine}.{size}", "16", f"--rollout.{engine}.nnodes", "2")
    result, calls = run_job(tmp_path, 4, *spanning, example=example)
    started = {
        call.split("--nodelist=")[1].split()[0]: call.split("--node-rank ")[1].split(" --urls-file")[0]
        for call in calls
        if "--job-name=servers" in call
    }
    assert started == {
        "n0": "0 --dist-init-addr 10.0.0.0:28500",
        "n1": "1 --dist-init-addr 10.0.0.0:28500",
        "n2": "0 --dist-init-addr 10.0.0.2:28500",
        "n3": "1 --dist-init-addr 10.0.0.2:28500",
    }, result.stderr
    (check,) = [call for call in calls if "--job-name=check" in call]
    assert check.endswith('--rollout.servers.urls ["http://n0:30000","http://n2:30000"]')


def test_server_nodes_that_do_not_make_whole_servers_are_refused(tmp_path: Path) -> None:
    result, calls = run_job(tmp_path, 3, "--rollout.sglang.tp-size", "16", "--rollout.sglang.nnodes", "2")
    assert result.returncode == 2 and "--server-nodes 3 is no multiple of the 2 nodes of a server" in result.stderr
    assert not any("--job-name=servers" in call for call in calls)
