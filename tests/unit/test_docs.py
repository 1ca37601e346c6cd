"""What is generated is up to date."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_configuration_page_is_what_the_tool_writes() -> None:
    tool = runpy.run_path(str(ROOT / "tools/write_configuration_doc.py"))
    assert (ROOT / "docs/configuration.md").read_text(encoding="utf-8") == tool["document"]()
