"""``python -m tests.faults.simulation --seed 12345 --verbose``: one schedule again; ``--count N``: many."""

from __future__ import annotations

import argparse
import os
import sys

if __name__ == "__main__" and os.environ.get("PYTHONHASHSEED") != "0":
    # Names are in sets, too: their order has to be that of every other run.
    os.environ |= {"PYTHONHASHSEED": "0", "PYTHONWARNINGS": "ignore"}
    os.execv(sys.executable, [sys.executable, "-m", "tests.faults.simulation", *sys.argv[1:]])


def main() -> int:
    """Exit code 1 when an invariant broke."""
    from tests.faults.simulation.run import run_many, run_one

    parser = argparse.ArgumentParser(prog="python -m tests.faults.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="run this schedule alone, and print what it finds")
    parser.add_argument("--verbose", action="store_true", help="with --seed: print every event")
    parser.add_argument("--shrink", action="store_true", help="with --seed: leave out faults while it still fails")
    parser.add_argument("--first", type=int, default=0, help="first seed of many")
    parser.add_argument("--count", type=int, default=1000, help="how many seeds")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--until-failure", action="store_true", help="end with the first seed that fails")
    options = parser.parse_args()
    if options.seed is not None:
        return run_one(options.seed, verbose=options.verbose, shrink=options.shrink)
    return run_many(options.first, options.count, options.processes, until_failure=options.until_failure)


if __name__ == "__main__":
    sys.exit(main())
