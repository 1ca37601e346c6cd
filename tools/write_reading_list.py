"""Write the counts of lines into docs/architecture.md: ``python tools/write_reading_list.py``.

A row of a table that links modules and ends in a count, or in a count and minutes, gets those of the files as they are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from source_folders import ROOT

PAGE = ROOT / "docs/architecture.md"
LINES_A_MINUTE = 25
_MODULE = re.compile(r"\]\(\.\./((?:megatron_dppo|packages)/[\w/]+\.py)\)")


def main() -> None:
    """Write the page."""
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def updated(text: str) -> str:
    """Return the page with the counts of today.

    The page ``| [`a.py`](../megatron_dppo/types/loss.py) | 1 |`` gets the number of lines of that file in place of 1.
    """
    result = []
    total = 0
    for line in text.split("\n"):
        cells = line.split(" | ")
        files = _MODULE.findall(line)
        if files and re.fullmatch(r"[\d,]+( or [\d,]+)?( \|)?", cells[-1]):
            counts = _count(files)
            # Two modules in one row without minutes are alternatives.
            is_timed = len(cells) > 1 and cells[-2].replace(",", "").isdigit()
            total += sum(counts) if is_timed else counts[0]
            tail = _timed(sum(counts)) if is_timed else [" or ".join(map(str, counts))]
            cells[-len(tail) :] = [*tail[:-1], f"{tail[-1]} |"]
            line = " | ".join(cells)
        elif line.startswith("| **all** |"):
            line = f"| **all** | | {' | '.join(_timed(total))} |"
            total = 0
        elif line.startswith("Together they have"):
            line = re.sub(r"about [\d,]+ lines", f"about {round(total, -2):,} lines", line)
            total = 0
        result.append(line)
    return "\n".join(result)


def _count(files: Sequence[str]) -> list[int]:
    return [len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in files]


def _timed(lines: int) -> list[str]:
    """Return the cells of lines and minutes, in steps of five minutes."""
    return [f"{lines:,}", str(max(5, 5 * round(lines / LINES_A_MINUTE / 5)))]


if __name__ == "__main__":
    main()
