"""A signature that another room uses says its types: none has ``Any``."""

from __future__ import annotations

import ast

import pytest

import measure_structure
from measure_structure import Room

_ROOM = """
def load(path: str) -> Any: ...
def keep(path: str) -> object: ...
def _private(path: Any): ...
class Row:
    values: dict[str, Any]
    def __init__(self, *parts: Any): ...
    def read(self, **fields: Any): ...
"""


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ("", []),
        ("from megatron_dppo.a.file import load, keep, _private", ["load"]),
        ("from megatron_dppo.b import load", []),
        ("from megatron_dppo.a import Row", ["Row.__init__"]),
        ("from megatron_dppo.a import Row\ndef f(row: Row): row.values", ["Row.values", "Row.__init__"]),
        ("from megatron_dppo.a import Row\ndef f(row: Row): row.read()", ["Row.__init__", "Row.read"]),
    ],
)
def test_any_counts_where_another_room_uses_it(other: str, expected: list[str]) -> None:
    files = {"a": _ROOM, "c": other}
    rooms = [Room(name, [(f"{name}/file.py", ast.parse(text))]) for name, text in files.items()]
    assert measure_structure.untyped_seams(rooms) == [f"a/file.py: {name}" for name in expected]
    # A room may use what it likes of its own.
    single = Room("a", [("a/file.py", ast.parse(_ROOM)), ("a/other.py", ast.parse(other))])
    assert measure_structure.untyped_seams([single]) == []


def test_no_signature_between_rooms_has_any() -> None:
    rooms = measure_structure.read_rooms(None)
    assert len(rooms) > 30 and {"losses", "megatron_dppo_agents"} <= {room.name for room in rooms}
    assert measure_structure.untyped_seams(rooms) == []
