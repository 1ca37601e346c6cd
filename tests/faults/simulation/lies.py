"""Changes of a right answer by a lying server, by name. Each returns None, or JSON that is sent in its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.faults.simulation import model
from tests.faults.simulation.answers import Columns
from tests.faults.simulation.server import SimServer


def shift_logprobs(c: Columns, server: SimServer, choice: int) -> None:
    c.logprobs = c.logprobs[1:] + c.logprobs[:1]


def nan_logprobs(c: Columns, server: SimServer, choice: int) -> None:
    c.logprobs = [float("nan") if i % (1 + choice % 3) == 0 else p for i, p in enumerate(c.logprobs)]


def positive_logprobs(c: Columns, server: SimServer, choice: int) -> None:
    c.logprobs = [-p for p in c.logprobs]


def null_logprob(c: Columns, server: SimServer, choice: int) -> None:
    c.logprobs = [None if i == 0 else p for i, p in enumerate(c.logprobs)]


def round_logprobs(c: Columns, server: SimServer, choice: int) -> None:
    c.logprobs = [round(p, 1) for p in c.logprobs]


def scale_logprobs(c: Columns, server: SimServer, choice: int) -> None:
    c.logprobs = [p * 0.7 for p in c.logprobs]


def swap_content(c: Columns, server: SimServer, choice: int) -> None:
    """The content of an answer to another prompt under this request's name."""
    others = [other for other in server.finished if other.prompt != c.prompt and other.tokens]
    if not others or not c.tokens:
        return
    other = others[choice % len(others)]
    start = 0 if c.routes is None else len(c.prompt) + len(c.tokens) - 1 - len(c.routes)
    c.tokens, c.logprobs, c.reason = list(other.tokens), list(other.logprobs), other.reason
    c.matched = other.matched
    c.spans = [(c.spans[0][0], 0, len(c.tokens))]
    c.topk_ids, c.topk_logprobs = other.topk_ids, other.topk_logprobs
    if c.routes is not None:
        c.routes = np.resize(c.routes, (len(c.prompt) + len(c.tokens) - 1 - start, *c.routes.shape[1:]))


def swap_answer(c: Columns, server: SimServer, choice: int) -> None:
    """A whole other answer, its name and all."""
    if server.finished:
        vars(c).update(vars(server.finished[choice % len(server.finished)]))


def repeat_answer(c: Columns, server: SimServer, choice: int) -> None:
    """An earlier answer to the same prompt, a sibling's, by the same weights."""
    alike = [o for o in server.finished if o.prompt == c.prompt and o.spans and c.spans and o.spans[-1][0] == c.label]
    if alike:
        vars(c).update(vars(alike[choice % len(alike)]))


def truncate(c: Columns, server: SimServer, choice: int) -> None:
    count = len(c.tokens) - 1 - choice % 2
    if count < 1:
        return
    lost = len(c.tokens) - count
    c.tokens, c.logprobs = c.tokens[:count], c.logprobs[:count]
    c.spans = [(v, s, min(e, count)) for v, s, e in c.spans if s < count]
    if c.topk_ids is not None and c.topk_logprobs is not None:
        c.topk_ids, c.topk_logprobs = c.topk_ids[:count], c.topk_logprobs[:count]
    if c.routes is not None:
        c.routes = c.routes[: len(c.routes) - lost]


def shift_routes(c: Columns, server: SimServer, choice: int) -> None:
    if c.routes is not None:
        c.routes = np.roll(c.routes, 1, axis=0)


def wrong_routes(c: Columns, server: SimServer, choice: int) -> None:
    if c.routes is not None and len(c.routes):
        c.routes = (c.routes + 1) % model.EXPERTS


def scale_topk(c: Columns, server: SimServer, choice: int) -> None:
    if c.topk_logprobs is not None:
        c.topk_logprobs = c.topk_logprobs * np.float32(0.7)


def shift_topk(c: Columns, server: SimServer, choice: int) -> None:
    if c.topk_logprobs is not None and c.topk_ids is not None:
        c.topk_logprobs, c.topk_ids = np.roll(c.topk_logprobs, 1, axis=0), np.roll(c.topk_ids, 1, axis=0)


def swap_topk_ids(c: Columns, server: SimServer, choice: int) -> None:
    if c.topk_ids is not None:
        c.topk_ids = c.topk_ids[:, ::-1]


def huge_token(c: Columns, server: SimServer, choice: int) -> None:
    c.tokens = [10**6, *c.tokens[1:]]


def negative_token(c: Columns, server: SimServer, choice: int) -> None:
    c.tokens = [-1, *c.tokens[1:]]


def string_token(c: Columns, server: SimServer, choice: int) -> None:
    c.tokens = ["x", *c.tokens[1:]]


def wrong_span(c: Columns, server: SimServer, choice: int) -> None:
    label = str(int(c.label) + choice % 3 - 1) if c.label.isdigit() else "0"
    c.spans = [(label, s, e) for _, s, e in c.spans]


def wrong_reason(c: Columns, server: SimServer, choice: int) -> None:
    c.reason = "stop" if c.reason == "length" else "length"


def too_long(c: Columns, server: SimServer, choice: int) -> None:
    """One token more than it was allowed, after the end."""
    if not c.tokens:
        return
    c.tokens, c.logprobs = [*c.tokens, c.tokens[-1]], [*c.logprobs, c.logprobs[-1]]
    c.spans = [*c.spans[:-1], (c.spans[-1][0], c.spans[-1][1], len(c.tokens))]
    if c.topk_ids is not None and c.topk_logprobs is not None:
        c.topk_ids = np.concatenate([c.topk_ids, c.topk_ids[-1:]])
        c.topk_logprobs = np.concatenate([c.topk_logprobs, c.topk_logprobs[-1:]])
    if c.routes is not None:
        c.routes = np.concatenate([c.routes, c.routes[-1:]])


def named(name: str) -> Callable[[Columns, SimServer, int], Any]:
    """The lie of a fault's kind, without ``lie:``."""
    return globals()[name]
