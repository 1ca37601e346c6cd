"""Simulated faults, and runs that are killed."""

import sys
from pathlib import Path

# The helpers of the engines' tests, for programs that no pytest starts.
sys.path.append(str(Path(__file__).parents[2] / "packages/engines/tests"))
