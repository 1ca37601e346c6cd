"""Stop strings: texts that end a response. Tokens are cut behind the one that completes the first of them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_FIRST_REQUEST = 16
"""Tokens of the first request for a response with stop strings; see ``StopStrings.request_sizes``."""


class StopMatch(NamedTuple):
    """The first stop string in a response."""

    text: str
    start: int
    """Index of its first character in the text of the response."""
    num_tokens: int
    """Number of tokens up to and including the one that completes it."""


@dataclass(frozen=True)
class StopStrings:
    """Stop strings of one response, looked for in its decoded text.

    Servers are not told of them. They would decode each token, and may return tokens behind the match, or fewer tokens
    than they sampled. So a response is requested in parts, and what was sampled behind the match is dropped. That is
    the same distribution: no token before the match depends on a later one.
    """

    strings: tuple[str, ...]
    decode: Callable[[Sequence[int]], str]
    """Returns the text of tokens of the response."""

    def find(self, tokens: Sequence[int]) -> StopMatch | None:
        """Return the match that the fewest tokens complete; None if there is none.

        Of several in these tokens the one that starts first counts, as for a text.
        """
        if self._first(self.decode(tokens)) is None:
            return None
        # The text of more tokens contains that of fewer, but for an incomplete character at its end.
        low, high = 1, len(tokens)
        while low < high:
            middle = (low + high) // 2
            if self._first(self.decode(tokens[:middle])) is None:
                low = middle + 1
            else:
                high = middle
        match = self._first(self.decode(tokens[:low]))
        assert match is not None
        start, text = match
        return StopMatch(text, start, low)

    def _first(self, text: str) -> tuple[int, str] | None:
        starts = ((text.find(string), string) for string in self.strings)
        return min(((start, string) for start, string in starts if start >= 0), default=None)

    @staticmethod
    def request_sizes(limit: int) -> Iterator[int]:
        """Yield the numbers of tokens to request one after the other, ``limit`` in all.

        Each is as large as all before it together: fewer tokens are dropped than stay in the response, or at
        most as many as the first request has.
        """
        total = 0
        while total < limit:
            size = min(max(total, _FIRST_REQUEST), limit - total)
            yield size
            total += size
