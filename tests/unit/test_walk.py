"""The session's walk is short: few calls from the loop into other modules, and few returns to one."""

from __future__ import annotations

import ast

import measure_walk
from measure_walk import SESSION, Sources

_PART = """
class Part:
    child: Part | None
    def __init__(self, text: str): ...
    def act(self) -> Part: ...
PART = Part("")
"""
_LOOP = """
from megatron_dppo.part import PART, Part
from megatron_dppo.run.session import Session, open_session
def with_session(session: Session):
    session.part.act()
    session.part.child.act().act()
    helper(PART.act())
    with open_session() as other:
        other.begin()
def helper(part: Part):
    part.act()
def opens():
    part = Part("")
    with open_session() as other:
        part.act()
"""
_SESSION = """
from megatron_dppo.part import Part
class Session:
    part: Part
    def begin(self):
        self.part.act()
def open_session() -> Iterator[Session]: ...
"""


def test_calls_are_followed_to_the_class_of_the_object() -> None:
    sources = Sources()
    sources.functions, sources.definitions, sources.imports, sources.modules = [], {}, {}, set()
    loop = "megatron_dppo.run.loop"
    for module, text in (("megatron_dppo.part", _PART), (loop, _LOOP), (SESSION.module, _SESSION)):
        sources.read(module, ast.parse(text))
    session = SESSION.module
    part = "megatron_dppo.part"
    expected = [loop, part, loop, part, session, loop, part, session, part, session, part]
    assert measure_walk.walk(sources, "megatron_dppo") == expected


def test_the_session_walks_less_than_sixty_stays_with_twenty_returns() -> None:
    sources = Sources()
    stays = measure_walk.walk(sources, "megatron_dppo")
    assert {"megatron_dppo.run.loop", SESSION.module, "megatron_dppo.run.collector"} <= set(stays)
    assert len(stays) < 60 and len(stays) - len(set(stays)) < 20
    # Companions that open a session of their own.
    assert len(measure_walk.walk(sources, "megatron_dppo_doctor")) < 20
