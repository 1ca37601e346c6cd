"""Units of measurement: the value and the dimension of words such as ``cm^2`` or ``miles per hour``."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import sympy
from sympy import Expr, Rational

_BASE_UNITS: Mapping[str, Mapping[str, Expr | str]] = {
    "length": {
        "m meter metre": "1", "km kilometer kilometre": "1000", "cm centimeter centimetre": "1/100",
        "mm millimeter millimetre": "1/1000", "dm decimeter decimetre": "1/10", "in inch inche": "127/5000",
        "ft foot feet": "381/1250", "yd yard": "1143/1250", "mi mile": "201168/125",
    },
    "mass": {"g gram": "1", "kg kilogram": "1000", "mg milligram": "1/1000", "lb pound": "453.59237",
             "oz ounce": "28.349523125"},
    "time": {"s sec second": "1", "min minute": "60", "h hr hour": "3600", "day": "86400", "week": "604800",
             # Mean lengths in the Gregorian calendar.
             "month": "2629746", "yr year": "31556952"},
    "money": {"$ dollar usd buck": "1", "cent penny pennie": "1/100"},
    "angle": {"rad radian": "1", "^\\circ deg degree": sympy.pi / 180},
    "percent": {"% percent pct": "1"},
    "volume": {"l liter litre": "1", "ml milliliter millilitre": "1/1000"},
}  # fmt: skip
_KNOWN = {
    name: (dimension, Rational(factor) if isinstance(factor, str) else factor)
    for dimension, names in _BASE_UNITS.items()
    for group, factor in names.items()
    for name in group.split()
}
_ABBREVIATIONS = {"mph": "mile per hour", "kmh": "km per hour", "kph": "km per hour", "kmph": "km per hour",
                  "cc": "cubic cm", "sqft": "square foot", "fps": "foot per second"}  # fmt: skip
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_SUFFIXES = {"squared": 2, "cubed": 3}
_FILLERS = frozenset(("of", "the", "a", "an", "in", "total", "about", "exactly"))
_TOKEN = re.compile(r"\^\\circ|\^\s*\{?\s*-?\d\s*\}?|[A-Za-z]+|[$%/]|\S")
ANGLE = ("angle", 1)
PERCENT = ("percent", 1)


@dataclass(frozen=True)
class Unit:
    """A product of dimensions, and the size of the unit in base units. Unknown words are dimensions themselves."""

    dimensions: frozenset[tuple[str, int]]
    factor: Expr

    @property
    def is_percent(self) -> bool:
        """True for percent."""
        return self.dimensions == {PERCENT}

    @property
    def is_angle(self) -> bool:
        """True for degrees and radians."""
        return self.dimensions == {ANGLE}


def is_known_unit(word: str) -> bool:
    """Return True for a word that names a unit by itself."""
    name = word.lower()
    return name in _ABBREVIATIONS or _singular(name) in _KNOWN or name in _POWERS


def read_unit(text: str) -> Unit:
    r"""Return the unit that words, signs and powers name, such as ``\text{cm}^2``."""
    plain = re.sub(r"\\(?:text|frac|cdot|times)\b|[{}()~*.\-]", " ", re.sub(r"\^\s*\{\s*(-?\d)\s*\}", r"^\1", text))
    plain = re.sub(r"[A-Za-z]+", lambda match: _ABBREVIATIONS.get(match[0].lower(), match[0]), plain)
    dimensions: dict[str, int] = {}
    factor: Expr = Rational(1)
    # -1 from "per" on.
    sign = 1
    # Power of a word such as "square", which stands before its unit.
    prefix = 1
    last: tuple[str, Expr, int] | None = None
    tokens = _TOKEN.findall(plain)
    for token in tokens:
        word = _singular(token.lower()) if token.isalpha() else token
        if token.lower() in ("per", "/", "each", "every"):
            sign = -1
        elif token.lower() in _POWERS:
            prefix = _POWERS[token.lower()]
        elif last and (power := _suffix(token)):
            dimension, size, already = last
            dimensions[dimension] += (power - 1) * already
            factor = factor * size ** ((power - 1) * already)
            last = None
        elif token.lower() not in _FILLERS or len(tokens) == 1:  # "in" alone is an inch
            dimension, size = _KNOWN.get(word, (word, Rational(1)))
            power = sign * prefix
            dimensions[dimension] = dimensions.get(dimension, 0) + power
            factor = factor * size**power
            last = (dimension, size, power)
            prefix = 1
    # As a cubic length, so that liters and cubic decimeters are equal.
    if "volume" in dimensions:
        power = dimensions.pop("volume")
        dimensions["length"] = dimensions.get("length", 0) + 3 * power
        factor = factor * Rational(1, 1000) ** power
    return Unit(frozenset((name, power) for name, power in dimensions.items() if power), factor)


def _suffix(token: str) -> int:
    match = re.fullmatch(r"\^\s*\{?\s*(-?\d)\s*\}?", token)
    return int(match[1]) if match else _SUFFIXES.get(token.lower(), 0)


def _singular(word: str) -> str:
    if word in _KNOWN or len(word) < 3 or word.endswith("ss"):
        return word
    if word.endswith("ies"):
        return f"{word[:-3]}y"
    return word[:-1] if word.endswith("s") else word
