"""Write tests/data/golden.json anew: the numbers of the example changed, and somebody means it.

python -m tools.write_golden_run "why they changed"
python -m tools.write_golden_run --add "why"      # keep the runs of other versions and processors
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from tests.e2e.golden import GOLDEN, key, read_golden, run_golden


def main() -> None:
    """Run it on one and on two processes and replace the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("why", help="is kept in the file")
    parser.add_argument("--add", action="store_true", help="keep what is there for other versions and processors")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = {str(n): run_golden(Path(folder) / str(n), n) for n in (1, 2)}
    before = read_golden()["runs"] if arguments.add and GOLDEN.is_file() else {}
    text = json.dumps({"why": arguments.why, "runs": {**before, key(): runs}}, indent=1)
    GOLDEN.write_text(text + "\n", encoding="utf-8")
    print(f"{GOLDEN}: {key()}")


if __name__ == "__main__":
    main()
