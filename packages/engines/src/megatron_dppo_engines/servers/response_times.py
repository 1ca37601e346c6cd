"""Time that servers take to respond, and the server that is slow."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_dppo_engines.sums import Sums

_SLOW_FACTOR = 3.0
"""Factor over the median of the other servers from which on a server is slow."""
_MIN_RESPONSES = 2.0
"""Fewest responses of a server that are compared."""


@dataclass(frozen=True, kw_only=True)
class ResponseTimes(Sums):
    """Sums over the responses of one server."""

    responses: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    """Seconds between each request and its response."""

    @property
    def token_seconds(self) -> float:
        """Seconds of a response for each of its tokens."""
        return self.seconds / max(self.tokens, 1.0)


@dataclass(frozen=True, kw_only=True)
class SlowestServer:
    """The server that took longest for a token."""

    url: str
    factor: float
    """Its seconds a token, divided by the median of the other servers; 1 without others."""
    text: str
    """Line for the user. Empty if the server is not slow."""


def find_slowest(times: Mapping[str, ResponseTimes]) -> SlowestServer | None:
    """Return the slowest server of those with enough responses, or None without any."""
    enough = {url: each for url, each in times.items() if each.responses >= _MIN_RESPONSES}
    if not enough:
        return None
    url, slowest = max(enough.items(), key=lambda item: item[1].token_seconds)
    peers = [each.token_seconds for name, each in enough.items() if name != url]
    if not peers:
        return SlowestServer(url=url, factor=1.0, text="")
    usual = statistics.median(peers)
    factor = slowest.token_seconds / usual if usual > 0 else 1.0
    if factor <= _SLOW_FACTOR:
        return SlowestServer(url=url, factor=factor, text="")
    text = (
        f"{url} is slow: {slowest.seconds / slowest.responses:.3g} s a response ({slowest.responses:g} responses of "
        f"{slowest.tokens / slowest.responses:.3g} tokens), for each token {factor:.3g} times as long as the median of "
        "the other servers. Each step waits for it (rollout/slowest_server)"
    )
    return SlowestServer(url=url, factor=factor, text=text)
