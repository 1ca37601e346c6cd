"""Print errors and CPU seconds of this library and of math-verify: ``python packages/answers/compare.py``.

The pairs are those of ``tests/math_forms.py``: labels like those of MATH-500, right forms and wrong answers of each,
made without either program. Needs ``pip install math-verify``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER / "src"), str(FOLDER / "tests")]

import math_verify  # noqa: E402

from math_forms import pairs  # noqa: E402
from megatron_dppo_answers.math import grade, load_parser  # noqa: E402


def grade_by_math_verify(completion: str, label: str) -> float:
    """Return the score of math-verify with its own way to read a label of LaTeX."""
    gold = math_verify.parse(f"${label.strip('$')}$")
    return float(math_verify.verify(gold, math_verify.parse(completion)))


def main() -> None:
    """Grade each pair by both."""
    table = pairs()
    load_parser()
    print(f"{len(table)} pairs, {sum(score == 0 for _, _, score in table)} of them wrong answers")
    graders: dict[str, Callable[[str, str], float]] = {
        "megatron_dppo_answers": grade,
        f"math-verify {version('math-verify')}": grade_by_math_verify,
    }
    print("| | right forms refused | wrong answers accepted | CPU s |\n|---|---|---|---|")
    for name, function in graders.items():
        before = time.process_time()
        scores = [function(completion, label) for completion, label, _ in table]
        seconds = time.process_time() - before
        refused = sum(score < wanted for score, (_, _, wanted) in zip(scores, table, strict=True))
        accepted = sum(score > wanted for score, (_, _, wanted) in zip(scores, table, strict=True))
        print(f"| {name} | {refused} | {accepted} | {seconds:.1f} |")


if __name__ == "__main__":
    main()
