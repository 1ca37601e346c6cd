import sys
from pathlib import Path

# The helpers of the engines' tests, also for programs that no pytest starts.
sys.path.append(str(Path(__file__).parents[1] / "packages/engines/tests"))
