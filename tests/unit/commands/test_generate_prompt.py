"""``generate --prompt``: the chat template of the run is applied, and the command says so."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_dppo.commands import generate
from megatron_dppo.run import offline
from tests.unit.configs import config


@pytest.mark.parametrize("is_chat", [True, False])
def test_it_passes_the_decision_on_and_prints_it(
    is_chat: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "rows.jsonl"
    prompt: Any = [{"role": "user", "content": "1+1="}] if is_chat else "1+1="
    data.write_text(json.dumps({"prompt": prompt, "label": "2"}) + "\n")
    settings = config(data={"train": str(data)})
    seen: list[Sequence[str]] = []

    @contextmanager
    def opened(options: argparse.Namespace, overrides: Sequence[str], *, is_scored: bool) -> Iterator[Any]:
        seen.append(overrides)
        yield SimpleNamespace(config=settings)

    monkeypatch.setattr(generate, "open_weights", opened)
    monkeypatch.setattr(offline, "offline_config", lambda target, overrides: settings)
    monkeypatch.setattr(offline, "generate", lambda offline, source, scored: iter(()))
    options = argparse.Namespace(
        target=tmp_path, model=None, step=None, prompt="2+2=", prompts=None, output=None, score=False
    )
    assert generate.run(options, ["--run.seed", "1"]) == 0
    assert list(seen[0])[-2:] == ["--data.apply_chat_template", str(is_chat).lower()]
    expected = "with the chat template: the prompts of data.train are chat messages"
    expected = expected if is_chat else "as plain text: the prompts of data.train are plain text"
    assert capsys.readouterr().out == f"prompt   {expected}\n"
