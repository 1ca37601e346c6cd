"""Fixtures of the commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.commands.main import train_main

CHAIN_SUM = Path(__file__).parents[3] / "examples/chain_sum/dppo.toml"


@pytest.fixture
def dry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Dry-run the example in an empty folder; returns the exit code, the output and the message."""
    monkeypatch.chdir(tmp_path)
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)

    def run(*overrides: str, config: Path = CHAIN_SUM) -> tuple[int, str, str]:
        code = train_main([str(config), "--dry-run", *overrides])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    return run
