"""JSON from agents and from the policy: inflated, parsed and checked within limits, because it may hold anything."""

import json
import math
import zlib
from collections import Counter
from typing import Any

_MAX_DEPTH = 64
"""Maximum number of nested arrays and objects. Templates and the JSON encoder recurse over them."""
_GZIP_OR_ZLIB = 47
"""``wbits`` of zlib by which it recognizes both formats by their headers."""


def inflate(content: bytes, encoding: str, max_bytes: int) -> bytes:
    """Return a request body without the compression that its header ``Content-Encoding`` names.

    A body that is larger than ``max_bytes`` raises ``OverflowError``, and any other problem ``ValueError``.
    """
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return content
    if name not in ("gzip", "deflate"):
        raise ValueError(f"Content-Encoding {encoding!r:.80}, expected gzip, deflate or none")
    inflater = zlib.decompressobj(_GZIP_OR_ZLIB)
    try:
        # One byte above the limit shows that there is more without inflating it.
        result = inflater.decompress(content, max_bytes + 1)
    except zlib.error as error:
        raise ValueError(f"the body is not {name}: {error}") from error
    if len(result) > max_bytes:
        raise OverflowError(f"the inflated body is larger than {max_bytes} bytes")
    if not inflater.eof:
        raise ValueError(f"the {name} body is incomplete")
    return result


def parse_json(text: str | bytes) -> object:
    """Return the value of a JSON text; ``ValueError`` if it is none, or holds a value that means different things.

    Those are NaN and infinities, values that are nested too deeply, and objects with a key twice.
    """
    return _DECODER.decode(text if isinstance(text, str) else text.decode())


def parse_json_prefix(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON value that starts at an index, and the index after it."""
    return _DECODER.raw_decode(text, start)


def _check_depth(value: Any) -> None:
    # By level instead of by recursion, which is what deep values would break.
    level = [value]
    for _ in range(_MAX_DEPTH + 1):
        parents = [each for each in level if isinstance(each, dict | list)]
        if not parents:
            return
        level = [child for each in parents for child in (each.values() if isinstance(each, dict) else each)]
    raise _too_deep()


def _too_deep() -> ValueError:
    return ValueError(f"nested more than {_MAX_DEPTH} levels deep")


def _reject_constant(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _parse_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text:.40} is too large")
    return value


def _object_without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        ((repeated, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"an object has the key {repeated!r:.80} twice; write it once")
    return value


class _Decoder(json.JSONDecoder):
    """Decoder that reports text that is nested too deeply as invalid."""

    def raw_decode(self, s: str, idx: int = 0) -> tuple[Any, int]:
        """See ``json.JSONDecoder``, whose ``decode`` calls this."""
        try:
            value, end = super().raw_decode(s, idx)
        except RecursionError as error:
            raise _too_deep() from error
        _check_depth(value)
        return value, end


# Python's decoder accepts NaN and Infinity, reads 1e999 as infinity, and takes the last of equal keys.
_DECODER = _Decoder(
    parse_constant=_reject_constant, parse_float=_parse_float, object_pairs_hook=_object_without_repetition
)
