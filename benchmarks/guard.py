"""False alarms of the guard in simulated honest runs, and the step in which it stops each lie.

    python -m benchmarks.guard [--runs 10000] [--steps 20]

Simulated servers (``tests/unit/run/simulated_servers.py``): honest ones whose rounding has heavy tails, 1 to 64 of
them, and lies about log-probabilities that spare the probe. The tables are those of docs/probe.md.
"""

from __future__ import annotations

import argparse

import numpy as np

from tests.unit.run.simulated_servers import (
    BF16,
    FP32,
    HONEST,
    LIES,
    count_false_alarms,
    honest_pool,
    step_of_stop,
)

SERVERS = (1, 2, 5)
_SHARES = {1: 0.4, 2: 0.3, 5: 0.15, 16: 0.1, 64: 0.05}
"""Share of the honest runs by number of servers."""
_POOL = 1000
_SEEDS = 3


def print_false_alarms(runs: int, steps: int) -> None:
    """Print the false alarms by rounding and number of servers."""
    random = np.random.default_rng(0)
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
    print(f"\n{total} false alarms in {runs:,} runs of {steps} steps\n")


def print_lies() -> None:
    """Print the median step of the stop by lie, dtype and number of servers."""
    cases = [(rounding, servers) for rounding in (BF16, FP32) for servers in SERVERS]
    print("| lie | " + " | ".join(f"{rounding.dtype}, {servers} URLs" for rounding, servers in cases) + " |")
    print("|" + "---|" * (len(cases) + 1))
    for name, lie in LIES.items():
        row = []
        for rounding, servers in cases:
            steps = [step_of_stop(lie, rounding, servers, seed=seed) or 99 for seed in range(_SEEDS)]
            median = sorted(steps)[_SEEDS // 2]
            row.append(str(median) if median < 99 else "-")
        print(f"| {name} | " + " | ".join(row) + " |", flush=True)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--without-lies", action="store_true", help="count the false alarms alone")
    options = parser.parse_args()
    if not options.without_lies:
        print_lies()
    print_false_alarms(options.runs, options.steps)


if __name__ == "__main__":
    main()
