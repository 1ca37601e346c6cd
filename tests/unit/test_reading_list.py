"""The counts of lines on the architecture page are those of the files."""

from __future__ import annotations

import write_reading_list
from source_folders import ROOT


def test_the_page_has_the_counts_of_today() -> None:
    text = write_reading_list.PAGE.read_text(encoding="utf-8")
    assert write_reading_list.updated(text) == text, "run tools/write_reading_list.py"


def test_counts_and_sums_are_written() -> None:
    lines = {name: (ROOT / f"megatron_dppo/{name}").read_text().count("\n") for name in ("errors.py", "types/loss.py")}
    row = "| a | [x](../megatron_dppo/errors.py), [y](../megatron_dppo/types/loss.py) | 1 | 2 |"
    both = f"| {sum(lines.values()):,} |"
    read, total = write_reading_list.updated(f"{row}\n| **all** | | 0 | 0 |").split("\n")
    assert both in read and both in total
    choice = write_reading_list.updated("| 1 | [x](../megatron_dppo/errors.py) |  | reads | 9 |")
    assert choice.endswith(f"| reads | {lines['errors.py']} |")
