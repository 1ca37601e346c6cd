"""An experiment of two tiny runs, as a program that a test can kill: ``python -m tests.e2e.tiny_experiment FOLDER``."""

from __future__ import annotations

import sys

from megatron_dppo_lab.experiment import Block, Claim, Experiment
from megatron_dppo_lab.report import Request, execute

TINY = {
    "run": {"num_steps": 2},
    "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4},
    "train": {"mini_batches": 2, "epochs": 1},
    "eval": {"every": 2, "max_prompts": 4},
}
EXPERIMENT = Experiment(
    "tiny",
    "Two runs",
    blocks=(Block("rare_words", ("dppo_binary_tv", "pg_is"), ("router_noise 1.0",), TINY),),
    quick=(),
    claims=(Claim("a mask is better than none", "dppo_binary_tv", "pg_is"),),
)

if __name__ == "__main__":
    execute(EXPERIMENT, Request(output=sys.argv[1], seeds=(3,), base_steps=2))
