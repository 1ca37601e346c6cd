"""Number of tokens that the sampling test needs to detect a lie, and the share of right runs that it stops.

    python -m benchmarks.sampling_test [--runs 10000] [--steps 300]

Simulated servers, with next-token distributions as of a language model (``tests/unit/run/test_sampling_test.py``).
The table is that of docs/results/lies.md. Honest runs draw their steps from a pool of simulated ones, with replacement:
10,000 runs of 300 steps have 3 million steps, which would take a day to draw token by token.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np

from megatron_dppo.run.sampling_test import SamplingTest, SelectionShares
from tests.unit.run.test_sampling_test import (
    distributions,
    draw,
    greedy,
    min_p,
    ranks_of,
    surprise_of,
    tempered,
    top_p,
)

LIES = {
    "greedy": greedy,
    "top-p .7": top_p(0.7),
    "top-p .9": top_p(0.9),
    "top-p .95": top_p(0.95),
    "min-p .3": min_p(0.3),
    "temperature .5": tempered(0.5),
    "temperature .8": tempered(0.8),
    "temperature .9": tempered(0.9),
    "temperature 1.1": tempered(1.1),
    "temperature 1.3": tempered(1.3),
}
STEP = 500
_MAX_STEPS = 200
_POOL = 4000
_POOL_STEP = 100


def steps_until_detected(sample: Callable[..., np.ndarray], seed: int, *, by_ranks: bool) -> int | None:
    """Return the number of steps until a server that samples so fails. None: not within ``_MAX_STEPS``."""
    random = np.random.default_rng(seed)
    test = SamplingTest(num_servers=1)
    for step in range(1, _MAX_STEPS + 1):
        p = distributions(random, STEP)
        tokens = sample(random, p)
        problems = (
            test.add_ranks({"": ranks_of(p, tokens)})
            if by_ranks
            else test.add_surprise({"": surprise_of(p, tokens)}, SelectionShares())
        )
        if problems:
            return step
    return None


def median_tokens(sample: Callable[..., np.ndarray], *, by_ranks: bool) -> str:
    """Return the median number of tokens until a lie is detected, over five seeds."""
    steps = [steps_until_detected(sample, seed, by_ranks=by_ranks) or _MAX_STEPS * 10 for seed in range(5)]
    median = sorted(steps)[2]
    return f"{median * STEP:,}" if median <= _MAX_STEPS else f"more than {_MAX_STEPS * STEP:,}"


def count_false_alarms(runs: int, steps: int) -> int:
    """Return how many of ``runs`` honest runs of ``steps`` steps the test stops."""
    random = np.random.default_rng(0)
    p = distributions(random, _POOL * _POOL_STEP)
    tokens = draw(random, p)
    parts = [slice(i * _POOL_STEP, (i + 1) * _POOL_STEP) for i in range(_POOL)]
    pool = [(ranks_of(p[part], tokens[part]), surprise_of(p[part], tokens[part])) for part in parts]
    alarms = 0
    for _ in range(runs):
        test = SamplingTest(num_servers=1)
        for i in random.integers(_POOL, size=steps):
            ranks, surprise = pool[i]
            if test.add_ranks({"": ranks}) or test.add_surprise({"": surprise}, SelectionShares()):
                alarms += 1
                break
    return alarms


def main() -> None:
    """Print the table and the false alarms."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    print("| server | tokens until detected, rank (most probable token alone) | surprise |\n|---|---|---|")
    for name, sample in LIES.items():
        print(f"| {name} | {median_tokens(sample, by_ranks=True)} | {median_tokens(sample, by_ranks=False)} |")
    alarms = count_false_alarms(options.runs, options.steps)
    print(f"\n{alarms} of {options.runs:,} honest runs of {options.steps} steps stopped")


if __name__ == "__main__":
    main()
