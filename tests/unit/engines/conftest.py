"""A scripted engine for the tests of agents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.scripted import World, chat_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return chat_tokenizer()


@pytest.fixture
def world(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World(tokenizer, monkeypatch)
    yield made
    for part in made.open:
        part.close()
