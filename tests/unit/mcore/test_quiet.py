"""Log records of Megatron that nobody can act on are dropped, and no others of the same logger."""

from __future__ import annotations

import logging

import pytest

from megatron_dppo_megatron_cpu.gloo import NOISY_LOGS, silence_megatron


@pytest.mark.parametrize("name", NOISY_LOGS)
def test_only_the_listed_log_records_are_filtered(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logger, records = logging.getLogger(name), list[str]()
    monkeypatch.setattr(logger, "filters", [])
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: records.append(record.getMessage()))
    monkeypatch.setattr(logger, "handlers", [handler])
    silence_megatron()
    logger.warning(f"{NOISY_LOGS[name]}, as Megatron says")
    logger.warning("rank %d is out of memory", 3)
    assert records == ["rank 3 is out of memory"]
