"""Commands of the pages that need neither a run nor a large model are run."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.commands.main import main
from tests.unit.test_doc_blocks import ROOT, command_lines

pytestmark = pytest.mark.slow
EXAMPLE = "examples/chain_sum/"


def runnable() -> Iterator[Any]:
    """``--dry-run`` and ``--list`` of shipped configurations whose model is shipped, too; each once."""
    shown = set()
    for page, line, program in command_lines():
        # The reader's own configuration, with servers where the command starts some.
        mine = EXAMPLE + ("sglang.toml" if " serve " in line else "dppo.toml")
        words = line.partition("#")[0].replace("my.toml", mine).split()
        is_cheap = program == "megatron-dppo" and {"--dry-run", "--list"} & set(words)
        # test_recipes_start.py has the others, with the published model.
        needs_model = {"train", "serve"} & set(words) and not any(word.startswith(EXAMPLE) for word in words)
        if is_cheap and not needs_model and tuple(words) not in shown:
            shown.add(tuple(words))
            yield pytest.param(words, id=f"{page.stem}: {' '.join(words)}")


@pytest.mark.parametrize("words", runnable())
def test_the_command_succeeds(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    variables = [word for word in words if re.fullmatch(r"[A-Z_]+=.*", word)]
    for variable in variables:
        monkeypatch.setenv(*variable.split("=", 1))
    arguments = words[words.index("megatron-dppo") + 1 :]
    if "train" in arguments:
        arguments += ["--run.output_dir", str(tmp_path / "run")]
    assert main(arguments) == 0, capsys.readouterr().err
    assert capsys.readouterr().out and not os.listdir(tmp_path)
