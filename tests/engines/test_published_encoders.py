"""Calls that the published encoders of DeepSeek V3.2 and Mistral write are read back as they were."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from megatron_dppo_conversations.formats import FORMATS
from odd_calls import ARGUMENTS, TOOLS
from tests.engines.servers import TOOLS as SCRIPTS


def test_calls_are_read_as_published_encoders_write_them() -> None:
    done = subprocess.run([SCRIPTS / "vllm.sh", "install"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    program = [f"{done.stdout.strip()}/bin/python", str(Path(__file__).with_name("published_encoders.py"))]
    given = json.dumps({"tools": TOOLS, "arguments": ARGUMENTS})
    ran = subprocess.run(program, input=given, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    names = set()
    for arguments, written in zip(ARGUMENTS, json.loads(ran.stdout), strict=True):
        for name, form, text in written:
            parsed = FORMATS[form].parse(text, TOOLS)
            made = [(call["function"]["name"], call["function"]["arguments"]) for call in parsed.tool_calls]
            # As JSON, in which 1, 1.0 and true differ.
            assert json.dumps(made) == json.dumps([("add", arguments)] * 2), text
            assert (parsed.content, parsed.num_malformed) == ("", 0), text
            names.add(name)
    assert names == {"chat", "thinking", "v3", "v7", "v11", "v13"}
