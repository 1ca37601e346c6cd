"""Closed and ASCII streams, low limits on open files, and texts that would change a terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dppo.commands.reported import report_error
from megatron_dppo.errors import UserError
from megatron_dppo.report.console import Console
from megatron_dppo.report.printable import printable

ROOT = Path(__file__).parents[3]
PRINTS = """
import os, sys
from megatron_dppo.commands.streams import prepare_streams
prepare_streams()
with open(sys.argv[1], "w") as file:
    assert file.fileno() > 2, file.fileno()
    print("out \\u00fc \\ud800", flush=True)
    print("error \\u202e", file=sys.stderr, flush=True)
    assert sys.stdout.isatty() is False
    os.write(1, b"")
    file.write("the file's own text")
"""
FOLDER_TEXT = "the file's own text"


def shell(command: str, *arguments: object, **variables: str) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    words = ["bash", "-c", command, "bash", sys.executable, *map(str, arguments)]
    return subprocess.run(words, capture_output=True, env=environment, check=False)


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_no_reason_to_fail_and_no_file_gets_its_output(closed: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    result = shell(f'exec "$@" {closed}', "-c", PRINTS, file)
    assert result.returncode == 0, result.stderr
    assert file.read_text() == FOLDER_TEXT


def test_characters_that_the_encoding_lacks_are_written_as_escapes(tmp_path: Path) -> None:
    result = shell('exec "$@"', "-c", PRINTS, tmp_path / "file", PYTHONIOENCODING="ascii")
    assert (result.returncode, result.stdout, result.stderr) == (0, b"out \\xfc \\ud800\n", b"error \\u202e\n")


LIMITS = """
import resource, subprocess, sys
from megatron_dppo.files import raise_file_limit
from megatron_dppo_agents.connections import reserve_descriptors
print(raise_file_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE), raise_file_limit(), reserve_descriptors())
files = [open("/dev/null") for _ in range(1500)] if sys.argv[1:] else []
"""


def test_the_soft_limit_on_open_files_is_raised_to_the_hard_one() -> None:
    cases = {
        "ulimit -Sn 100; ulimit -Hn 2000": b"2000 2000 2000 2000 1000\n",
        "ulimit -Sn 2000; ulimit -Hn 2000": b"2000 2000 2000 2000 1000\n",
    }
    for limits, expected in cases.items():
        result = shell(f'{limits}; exec "$@"', "-c", LIMITS, "open")
        assert (result.returncode, result.stdout) == (0, expected), result.stderr


@pytest.mark.slow
def test_a_low_limit_on_open_files_is_raised_or_named() -> None:
    command = "-m", "megatron_dppo.train", "missing.toml"
    refused = shell('ulimit -n 100; exec "$@"', *command)
    assert refused.returncode == 2 and b"may open 100 files (ulimit -n, hard limit), and a run needs" in refused.stderr
    assert b"Traceback" not in refused.stderr
    raised = shell('ulimit -Sn 100; exec "$@"', *command)
    assert raised.returncode == 2 and b"missing.toml" in raised.stderr and b"ulimit" not in raised.stderr


HOSTILE = "\x1b]0;title\x07\x1b[2J\x1b[31mred\r\x9b1m\u202eevil\u2066\u200b\x00\x7f tab\tstays\n\u0645\u00fc stay"


def test_no_text_reaches_a_terminal_with_controls_or_marks_of_direction(capsys: pytest.CaptureFixture[str]) -> None:
    shown = printable(HOSTILE)
    assert shown == (
        "\\x1b]0;title\\x07\\x1b[2J\\x1b[31mred\\x0d\\x9b1m"
        "\\u202eevil\\u2066\\u200b\\x00\\x7f tab\tstays\n\u0645\u00fc stay"
    )
    Console(enabled=True).print(HOSTILE)
    assert report_error(UserError(HOSTILE)) == 2
    output = capsys.readouterr()
    assert output.out == f"{shown}\n" and output.err == f"\nerror: {shown}\n"
