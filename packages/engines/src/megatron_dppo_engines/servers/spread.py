"""Even distribution of a step's requests over servers that many trainer ranks share."""

import math
from dataclasses import dataclass

MAX_LOAD_RATIO = 1.1
"""Accepted ratio of the fullest server's requests to the mean."""
_MIN_PER_SERVER = 64
"""Requests for each server that the ranks together may always have in flight: an evaluation may be larger than a
step."""
_MAX_PER_SERVER = 512
"""Requests for each server that one rank has in flight at most. Half of the connections of a client."""


@dataclass(frozen=True, kw_only=True)
class RequestSpread:
    """Share of one trainer rank in the requests to all servers."""

    first: int
    """Index of the server that gets the rank's first request."""
    siblings_per_server: int
    """Responses to one prompt that go to the same server, where its prefix cache has the prompt."""
    max_in_flight: int


def spread_requests(
    *, rank: int, ranks: int, servers: int, prompts: int, siblings: int, max_in_flight: int | None = None
) -> RequestSpread:
    """Return the share of a rank, so that the ranks together load all servers evenly.

    Each rank has its own pool over the same servers and sees only its own load: it fills them in order, beginning with
    ``first``. The first servers of the ranks are evenly spaced. So for any number k of servers that every rank has
    filled, each server was filled by ``k * ranks / servers`` ranks, rounded up or down.

    ``prompts`` are those of a step over all ranks, with oversampling, and ``siblings`` the responses to each.
    """
    samples = math.ceil(prompts * siblings / ranks)
    enough = max(samples, math.ceil(_MIN_PER_SERVER * servers / ranks))
    return RequestSpread(
        first=rank * servers // ranks,
        siblings_per_server=_siblings_per_server(servers, prompts, siblings),
        max_in_flight=max_in_flight or min(enough, _MAX_PER_SERVER * servers),
    )


def _siblings_per_server(servers: int, prompts: int, siblings: int) -> int:
    """Return the largest part of a group that still loads the servers evenly; 1 if there are too few requests."""
    for size in range(siblings, 1, -1):
        parts = prompts * (siblings // size)
        if siblings % size == 0 and math.ceil(parts / servers) * servers <= MAX_LOAD_RATIO * parts:
            return size
    return 1
