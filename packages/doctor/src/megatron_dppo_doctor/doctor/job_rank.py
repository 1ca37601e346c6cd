"""This process as a rank of a job: started by torchrun or by srun, and how the ranks find each other."""

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_dppo.errors import ConfigError

_FIRST_PORT = 20000
_NUM_PORTS = 10000


@dataclass(frozen=True)
class JobRank:
    """Place of this process in a job of several processes."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    """Ranks on this machine."""
    address: str
    """Address of rank 0's machine."""
    port: int
    """Port of the store. Under torchrun its agent listens there, else rank 0 does."""
    launcher_has_store: bool


def read_job_rank(environ: Mapping[str, str]) -> JobRank | None:
    """Return this process's place in a job by the launcher's variables; None in a process that runs alone."""
    if int(environ.get("WORLD_SIZE", "1")) > 1:
        missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in environ]
        if missing:
            raise ConfigError(
                f"WORLD_SIZE = {environ['WORLD_SIZE']}, and no {', '.join(missing)} in the environment; torchrun sets "
                "all of them. Fix: start doctor by torchrun or srun, or unset WORLD_SIZE"
            )
        return JobRank(
            rank=int(environ["RANK"]),
            world_size=int(environ["WORLD_SIZE"]),
            local_rank=int(environ.get("LOCAL_RANK", "0")),
            local_world_size=int(environ.get("LOCAL_WORLD_SIZE", "1")),
            address=environ["MASTER_ADDR"],
            port=int(environ["MASTER_PORT"]),
            launcher_has_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )
    # srun sets this one for the tasks of a step; the batch script itself has only the job's variables.
    if int(environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        job = int(environ["SLURM_JOB_ID"])
        return JobRank(
            rank=int(environ["SLURM_PROCID"]),
            world_size=int(environ["SLURM_STEP_NUM_TASKS"]),
            local_rank=int(environ["SLURM_LOCALID"]),
            # "8(x2)" says 8 tasks on each of two nodes; the first number is that of the first nodes.
            local_world_size=int(re.findall(r"\d+", environ["SLURM_STEP_TASKS_PER_NODE"])[0]),
            address=environ.get("MASTER_ADDR") or _first_node(environ["SLURM_STEP_NODELIST"]),
            port=int(environ.get("MASTER_PORT") or _FIRST_PORT + job % _NUM_PORTS),
            launcher_has_store=False,
        )
    return None


def set_torch_variables(job: JobRank) -> None:
    """Set the variables that torch and the package read under torchrun, so that srun alone is enough."""
    os.environ |= {
        "RANK": str(job.rank),
        "WORLD_SIZE": str(job.world_size),
        "LOCAL_RANK": str(job.local_rank),
        "LOCAL_WORLD_SIZE": str(job.local_world_size),
        "MASTER_ADDR": job.address,
        "MASTER_PORT": str(job.port),
    }


def _first_node(nodes: str) -> str:
    """Return the first host of a list such as ``n[1-4]``."""
    try:
        result = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=30, check=True
        )
        return result.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        raise ConfigError(
            f"SLURM_STEP_NODELIST = {nodes}: `scontrol show hostnames` does not expand it ({error}). Fix: set "
            "MASTER_ADDR to the address of the first node"
        ) from error
