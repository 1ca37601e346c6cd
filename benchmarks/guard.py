"""False alarms of the guard in simulated honest runs, and the step in which it stops each lie.

    python -m benchmarks.guard [--runs 10000] [--steps 20] [--seed 0]

Simulated servers (``tests/unit/run/simulated_servers.py``): honest ones whose rounding has heavy tails, 1 to 64 of
them, and lies about log-probabilities that spare the probe. The tables are those of docs/results/lies.md.
"""

from __future__ import annotations

import argparse
import math

import numpy as np

from tests.unit.run.simulated_servers import (
    BF16,
    FP32,
    HONEST,
    LIES,
    count_false_alarms,
    honest_pool,
    run_lie,
)

SERVERS = (1, 2, 5)
_SHARES = {1: 0.4, 2: 0.3, 5: 0.15, 16: 0.1, 64: 0.05}
"""Share of the honest runs by number of servers."""
_POOL = 1000
_SEEDS = 3


def print_false_alarms(runs: int, steps: int, seed: int) -> None:
    """Print the false alarms by rounding and number of servers."""
    random = np.random.default_rng(seed)
    print("| honest servers | " + " | ".join(f"{n} URLs" for n in _SHARES) + " |\n|" + "---|" * (len(_SHARES) + 1))
    total = 0
    for rounding in HONEST:
        pool = honest_pool(random, rounding, _POOL)
        difference = sum(each.prob_diff for each in pool) / sum(each.tokens for each in pool)
        row = []
        for num_servers, share in _SHARES.items():
            count = round(runs * share / len(HONEST))
            alarms = count_false_alarms(random, rounding, num_servers, pool, runs=count, steps=steps)
            total += alarms
            row.append(f"{alarms} of {count}")
        heavy = f", {rounding.heavy_fraction:.3%} of the tokens {rounding.heavy_size:g} nats"
        name = f"{rounding.dtype}, logits {rounding.size:g}{heavy if rounding.heavy_fraction else ''}"
        print(f"| {name}: mean abs(pi - mu) {difference:.2g} | " + " | ".join(row) + " |", flush=True)
    print(f"\n{total} false alarms in {runs:,} runs of {steps} steps, seed {seed}\n")


def print_lies(first_seed: int) -> None:
    """Print the median step of the stop by lie, dtype and number of servers, and what is known where there is none."""
    not_stopped = []
    cases = [(rounding, servers) for rounding in (BF16, FP32) for servers in SERVERS]
    print("| lie | " + " | ".join(f"{rounding.dtype}, {servers} URLs" for rounding, servers in cases) + " |")
    print("|" + "---|" * (len(cases) + 1))
    for name, lie in LIES.items():
        row = []
        for rounding, servers in cases:
            seeds = range(first_seed, first_seed + _SEEDS)
            outcomes = [run_lie(lie, rounding, servers, seed=seed) for seed in seeds]
            outcome = sorted(outcomes, key=lambda each: each.step or math.inf)[_SEEDS // 2]
            row.append(str(outcome.step or "-"))
            if outcome.step is None:
                not_stopped.append(
                    f"not stopped: {name}, {rounding.dtype}, {servers} URLs: mean abs(pi - mu) of the last step "
                    f"{outcome.prob_diff:.2g}, largest evidence {outcome.evidence}"
                )
        print(f"| {name} | " + " | ".join(row) + " |", flush=True)
    print("\n" + "\n".join(not_stopped) + "\n")


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--without-lies", action="store_true", help="count the false alarms alone")
    parser.add_argument("--seed", type=int, default=0, help="the limits were chosen with seed 0")
    options = parser.parse_args()
    if not options.without_lies:
        print_lies(options.seed)
    print_false_alarms(options.runs, options.steps, options.seed)


if __name__ == "__main__":
    main()
