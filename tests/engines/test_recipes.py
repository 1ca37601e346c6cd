"""The programs of the page of agents, as a reader copies them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.engines.servers import TOOLS
from tests.unit.scripted import CALL, World

PAGE = Path(__file__).parents[2] / "packages" / "agents" / "README.md"


@pytest.mark.parametrize(
    ("name", "environment"),
    [("openai_loop.py", "agents"), pytest.param("langgraph_agent.py", "clients", marks=pytest.mark.long)],
)
def test_a_program_of_the_page_plays_a_tool_loop_as_one_segment(
    world: World, tmp_path: Path, name: str, environment: str
) -> None:
    (source,) = re.findall(rf"^```python\n# {re.escape(name)}\n(.*?)^```", PAGE.read_text("utf-8"), re.S | re.M)
    (tmp_path / name).write_text(source)
    done = subprocess.run([TOOLS / "agents.sh", "install", environment], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ask = "<|im_end|>\n<|im_start|>assistant\n"
    world.script = {f"1+2{ask}": CALL, f"3</tool_response>{ask}": "It is 3"}
    result = world.play([f"{done.stdout.strip()}/bin/python", str(tmp_path / name)], 3000)
    assert not result.failure and len(result.segments) == 1
    assert world.trained(result) == [f"{part}<|im_end|>" for part in (CALL, "It is 3")]
    assert result.counts["agent/rejected_calls"] == result.counts["agent/ignored_settings"] == 0
