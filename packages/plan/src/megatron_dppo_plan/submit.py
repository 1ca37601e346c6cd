"""The line that submits a planned run to Slurm, for ``plan`` and for all pages."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence

from megatron_dppo_plan.machine import GpuNode
from megatron_dppo_plan.step_time import StepPlan


def sbatch_line(file: str, overrides: Sequence[str], step: StepPlan, machine: GpuNode) -> str:
    """Return the sbatch line of a run with ``launch/qwen3_moe_dppo.sh``."""
    per_node = machine.gpus_per_node
    trainer_gpus = step.gpus - step.server_gpus
    server_nodes = math.ceil(step.server_gpus / per_node)
    nodes = math.ceil(trainer_gpus / per_node) + server_nodes
    servers = f"--server-nodes {server_nodes} " if server_nodes else ""
    return " ".join(
        [
            f"sbatch --nodes={nodes} --gpus-per-node={min(per_node, trainer_gpus)} --mem=0 --time=24:00:00",
            f"--signal=B:TERM@{step.signal_seconds} launch/qwen3_moe_dppo.sh {servers}{file}",
            *map(shlex.quote, overrides),
        ]
    )
