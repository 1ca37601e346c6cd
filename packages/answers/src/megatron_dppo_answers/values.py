r"""Structure of an answer: numbers with units, tuples, sets, intervals, equations, matrices, words.

Each kind is read whole or not at all. Text that can mean two things (``1,234`` is a number or a list) has two readings.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from sympy import Expr

from megatron_dppo_answers.arithmetic import CannotRead
from megatron_dppo_answers.expressions import GREEK_LETTERS, read_expression
from megatron_dppo_answers.units import Unit, is_known_unit, read_unit

_MAX_LENGTH = 2000
"""Longest text in characters that is read; longer answers are equal by their text alone."""


@dataclass(frozen=True)
class Value:
    """An answer that has been read, with its text."""

    text: str


@dataclass(frozen=True)
class Quantity(Value):
    """An expression, with or without a unit."""

    expression: Expr
    unit: Unit | None = None
    digits: int | None = None
    """Significant digits of a decimal literal. None for anything else."""


@dataclass(frozen=True)
class Numeral(Value):
    """Digits in a base other than ten."""

    digits: str
    base: int


@dataclass(frozen=True)
class Words(Value):
    """Text that is no formula."""


@dataclass(frozen=True)
class Choice(Value):
    """The letter of a choice with its content, such as ``(B) 12``."""

    letter: str
    content: Value


@dataclass(frozen=True)
class Group(Value):
    """Several values: a bare list, a tuple, a vector, an interval or a set."""

    items: tuple[Value, ...]
    opening: str = ""
    closing: str = ""

    @property
    def is_ordered(self) -> bool:
        """True unless it is a set or a bare list."""
        return self.opening not in ("", "\\{")


@dataclass(frozen=True)
class Grid(Value):
    """A matrix."""

    rows: tuple[tuple[Value, ...], ...]


@dataclass(frozen=True)
class Ratio(Value):
    """Values with colons between them, such as ``3:4`` or ``6:30``."""

    items: tuple[Value, ...]


@dataclass(frozen=True)
class Chain(Value):
    """Sides with relation signs between them."""

    sides: tuple[Value, ...]
    signs: tuple[str, ...]


@dataclass(frozen=True)
class Union(Value):
    r"""Sets joined by ``\cup``, ``\cap`` or ``\setminus``."""

    parts: tuple[Value, ...]
    signs: tuple[str, ...] = field(default=())


@dataclass(frozen=True)
class NamedSet(Value):
    """The empty set, or the real or whole numbers."""

    name: str


_TOKEN = re.compile(r"\\begin\{|\\end\{|\\[A-Za-z]+|\\.|\\?$|.", re.DOTALL)
_OPENING = frozenset(("(", "[", "{", "\\{", "\\langle", "\\lfloor", "\\lceil", "\\begin{"))
_CLOSING = frozenset((")", "]", "}", "\\}", "\\rangle", "\\rfloor", "\\rceil", "\\end{"))
_RELATIONS = frozenset(("=", "<", ">", "\\le", "\\ge", "\\ne", "\\approx", "\\in", "\\subset", "\\equiv"))
_SET_SIGNS = frozenset(("\\cup", "\\cap", "\\setminus"))
_CONNECTIVE = re.compile(
    r"\\text\{[\s,]*(?:and|or|&)[\s,]*\}|(?<=[\s\d)}$])(?:and|or)(?=[\s\d({\\-])|\\(?:lor|land|vee|wedge)\b"
)
_THOUSANDS = re.compile(r"-?(?:\\\$\s*)?[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?(?![\d,]).*", re.DOTALL)
_MATRIX = re.compile(r"\s*\\begin\{([pbB]?matrix|smallmatrix|array)\}(?:\s*\{[clr|]*\})?(.*)\\end\{\1\}\s*", re.DOTALL)
_SCALED_MATRIX = re.compile(
    r"(?P<scale>.*?)\s*(?:\\cdot)?\s*(?P<matrix>\\begin\{(?:[pbB]?matrix|smallmatrix|array)\}.*)", re.DOTALL
)
_NUMERAL = re.compile(r"\(?(?:\\text\{)?([0-9A-F]+)\}?\)?_(?:\{?(\d{1,2})\}?|\{?\\?(?:text)?\{?(two|eight|sixteen)\}*)")
_BASE_WORDS = {"two": 2, "eight": 8, "sixteen": 16}
_TIME_OF_DAY = re.compile(r"\d{1,2}(?::\d\d)?\s*(?:\\text\{)?\s*[ap]\.?\s?m\.?\s*\}?", re.IGNORECASE)
_IN_BASE = re.compile(r"([0-9A-F]+)\s*\\?(?:text\{)?\s*\(?\s*(?:in )?base[\s-]*(\d{1,2})\s*\)?\s*\}?")
_TRIGONOMETRY = re.compile(r"(?<![a-z])(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_DECIMAL = re.compile(r"[-+]?(?:\\\$\s*)?(\d*\.\d+|\d[\d,]*\.\d+)\s*%?")
_CHOICE = re.compile(r"(?:\\text\{\s*)?(?:\(([A-Z])\)[.:]?|([A-Z])[.):])\s*\}?\s*(\S.*)", re.DOTALL)
_TEXT_LIST = re.compile(r"\\text\{([^{}\\]*[^\s{}\\]\s*(?:,|\band\b)\s*[^\s{}\\][^{}\\]*)\}")
_NAMED_SETS = {
    "\\emptyset": "empty", "\\{\\}": "empty", "no solution": "empty", "no solutions": "empty",
    "no real solutions": "empty",
    "no real solution": "empty", "empty set": "empty", "\\mathbb{R}": "reals", "all real numbers": "reals",
    "all reals": "reals", "\\mathbb{Z}": "integers", "all integers": "integers", "\\mathbb{N}": "naturals",
}  # fmt: skip


_GREEK = "|".join(sorted(GREEK_LETTERS))
_LETTER = rf"(?:[A-Za-z]|\\(?:{_GREEK})(?![A-Za-z]))(?:_(?:\w|\{{[^{{}}]*\}}))?'*"
_LETTERS = rf"{_LETTER}(?:\s*,\s*{_LETTER})*"
_NAME = re.compile(
    rf"(?:{_LETTER}|\({_LETTERS}\)|{_LETTER}(?:\^\{{-1\}})?\s*\({_LETTERS}\)|[A-Z]{{2,4}}|\[[A-Z]{{3,6}}\]"
    rf"|(?:m\s*)?\\(?:angle|triangle)\s*(?:{_LETTER}){{1,3}}|\\overline\{{[A-Z]{{1,3}}\}}|\|?\\vec\{{?[a-zA-Z]\}}?\|?"
    rf"|\\(?:sin|cos|tan|cot|sec|csc)\s*\(?(?:\\angle\s*)?{_LETTER}\)?|P\([^()=]*\)"
    rf"|\\text\{{[^{{}}]*[A-Za-z][^{{}}]*\}}(?:_\{{?\w+\}}?)?|[A-Za-z]{{3,}}(?: [A-Za-z]+)*)"
)


def is_name(text: str) -> bool:
    """Return True for what may stand before ``=`` without being a result: ``x``, ``f(x)``, ``(x,y)``, ``Area``."""
    return text not in ("e", "i", "\\pi", "pi") and _NAME.fullmatch(text.strip()) is not None


def read_values(text: str) -> list[Value]:
    """Return the readings of a normalized answer; an empty list if it cannot be read."""
    if not text or len(text) > _MAX_LENGTH:
        return []
    readings: list[Value] = []
    # "1,234" as one number; below it is read as a list, too.
    if _THOUSANDS.fullmatch(text):
        readings += _attempt(_read_single, text)
    if match := _CHOICE.fullmatch(text):
        letter = match[1] or match[2]
        readings += [Choice(text, letter, content) for content in _attempt(_read, match[3])]
    return readings + _attempt(_read, text)


def _attempt(read: Callable[[str], Value], text: str) -> list[Value]:
    try:
        return [read(text)]
    except (CannotRead, RecursionError):
        return []


def plain_words(text: str) -> str:
    """Return the words of a text without markup; one letter keeps its case."""
    words = re.sub(r"\\text\s*|[{}$~]|\\[ ,;!]", " ", text)
    words = re.sub(r"\s+", " ", words).strip(" .,;:")
    if re.fullmatch(r"\(\s*\w+\s*\)", words):
        words = words[1:-1].strip()
    words = re.sub(r"\s*\b([ap])\.?\s?m\b\.?", r" \1m", words, flags=re.IGNORECASE)
    return words if len(words) == 1 else words.casefold()


def split_top(text: str, separators: frozenset[str]) -> tuple[list[str], list[str]]:
    """Return the parts between separators outside all brackets, and the separators."""
    parts: list[str] = []
    signs: list[str] = []
    start = 0
    for index, token in _top_level(text):
        if token in separators:
            parts.append(text[start:index].strip())
            signs.append(token)
            start = index + len(token)
    return [*parts, text[start:].strip()], signs


def _top_level(text: str) -> Iterator[tuple[int, str]]:
    depth = 0
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token in _OPENING:
            depth += 1
        elif token in _CLOSING:
            depth -= 1
            if depth < 0:
                raise CannotRead(f"{text[:100]!r}: {token} closes nothing")
            if token == "\\end{":
                depth += 1  # the brace of its name
        elif depth == 0:
            yield match.start(), token
        if token == "\\begin{":
            depth += 1
    if depth:
        raise CannotRead(f"{text[:100]!r}: an open bracket")


def _read(text: str) -> Value:
    text = text.strip()
    if name := _NAMED_SETS.get(plain_words(text)) or _NAMED_SETS.get(text.replace(" ", "")):
        return NamedSet(text, name)
    if match := _TEXT_LIST.fullmatch(text):
        names = [name.strip() for name in re.split(r",|\band\b", match[1]) if name.strip()]
        return Group(text, tuple(Words(name) for name in names))
    pieces = []
    for piece in _split_connectives(text):
        pieces += split_top(piece, frozenset((",", ";")))[0]
    is_or = bool(_CONNECTIVE.search(text)) and not re.search(r"and|land|wedge", text)
    pieces = [piece for piece in pieces if piece] if len(pieces) > 1 else pieces
    if len(pieces) > 1:
        items = tuple(item for piece in pieces for item in _branches(piece))
        # "x < 1 or x > 3" is one set.
        if is_or and all(isinstance(item, Chain) and set(item.signs) <= {"<", ">", "\\le", "\\ge"} for item in items):
            return Union(text, items, ("\\cup",) * (len(items) - 1))
        return Group(text, items)
    branches = _branches(pieces[0])
    return branches[0] if len(branches) == 1 else Group(text, tuple(branches))


def _split_connectives(text: str) -> list[str]:
    depth_zero = {index for index, _ in _top_level(text)}
    parts = []
    start = 0
    for match in _CONNECTIVE.finditer(text):
        if match.start() in depth_zero:
            parts.append(text[start : match.start()])
            start = match.end()
    return [*parts, text[start:]]


def _branches(text: str) -> list[Value]:
    r"""Read a value; with ``\pm`` it is two."""
    is_set = text.startswith("\\{") and text.endswith("\\}")
    if is_set or ("\\pm" not in text and "\\mp" not in text):
        return [_read_single(text)]
    upper = text.replace("\\pm", "+").replace("\\mp", "-")
    lower = text.replace("\\pm", "-").replace("\\mp", "+")
    return [_read_single(re.sub(r"^\s*\+", "", each)) for each in (upper, lower)]


def _read_single(text: str) -> Value:
    text = text.strip()
    sides, signs = split_top(text, _RELATIONS)
    if signs:
        if "" in sides or "\\equiv" in signs or "\\subset" in signs:
            raise CannotRead(f"{text[:100]!r}: a relation without both sides")
        return Chain(text, tuple(map(_read_chain_side, sides)), tuple(signs))
    return _read_side(text)


def _read_chain_side(text: str) -> Value:
    r"""Read a side of a relation; a name such as ``\angle ABC`` is no value, but may stand there."""
    try:
        return _read_side(text)
    except CannotRead:
        if is_name(text):
            return Words(text)
        raise


def _read_side(text: str) -> Value:
    if name := _NAMED_SETS.get(text.replace(" ", "")):
        return NamedSet(text, name)
    parts, signs = split_top(text, _SET_SIGNS)
    if signs:
        return Union(text, tuple(_read(part) for part in parts), tuple(signs))
    bracketed = _read_bracketed(text)
    if bracketed is not None:
        return bracketed
    if match := _SCALED_MATRIX.fullmatch(text):
        return _read_grid(text, match["matrix"], read_expression(match["scale"]) if match["scale"] else None)
    if match := _NUMERAL.fullmatch(text) or _IN_BASE.fullmatch(text):
        base = int(match[2]) if match[2] else _BASE_WORDS[match[3]]
        if base != 10:
            return Numeral(text, match[1].lstrip("0") or "0", base)
        # In base ten, digits are a plain number.
        text = match[1]
    if _TIME_OF_DAY.fullmatch(text):
        return Words(text)
    parts, signs = split_top(text, frozenset((":",)))
    if signs and "" not in parts:
        return Ratio(text, tuple(_read_quantity(part) for part in parts))
    return _read_quantity(text)


def _read_grid(text: str, matrix: str, scale: Expr | None) -> Grid:
    match = _MATRIX.fullmatch(matrix)
    if match is None:
        raise CannotRead(f"{text[:100]!r}: no matrix")
    rows = [row for row in re.split(r"\\\\(?:\[[^\]]*\])?", match[2].replace("\\hline", "")) if row.strip()]
    cells = [[_read(cell) for cell in row.split("&")] for row in rows]
    if scale is not None:
        cells = [[_scaled(cell, scale) for cell in row] for row in cells]
    return Grid(text, tuple(map(tuple, cells)))


def _scaled(value: Value, scale: Expr) -> Value:
    if not isinstance(value, Quantity) or value.unit is not None:
        raise CannotRead(f"{value.text[:100]!r} cannot be multiplied")
    return Quantity(value.text, value.expression * scale)


def _read_bracketed(text: str) -> Value | None:
    """Return what one pair of brackets around all of the text holds, or None."""
    opening = next((each for each in ("(", "[", "\\{", "\\langle") if text.startswith(each)), None)
    if opening is None:
        return None
    closing = next((each for each in (")", "]", "\\}", "\\rangle") if text.endswith(each)), "")
    inner = text[len(opening) : len(text) - len(closing)]
    try:
        parts, signs = split_top(inner, frozenset((",", ";")))
    except CannotRead:
        return None
    if _MATRIX.fullmatch(inner) and opening in ("(", "["):
        return _read_grid(inner, inner, None)
    if opening == "\\{" and closing == "\\}":
        conditions, bars = split_top(inner, frozenset(("|", ":")))
        # In "\{x | x > 1\}" the condition is the set.
        if len(bars) == 1:
            return _read(conditions[1])
        return Group(text, tuple(item for part in parts for item in _branches(part)), opening, closing)
    if signs and "" not in parts:
        return Group(text, tuple(_read_side(part) for part in parts), opening, closing)
    is_vector = (opening, closing) == ("\\langle", "\\rangle")
    return Group(text, (_read_side(inner),), opening, closing) if is_vector else None


def _read_quantity(text: str) -> Value:
    """Read an expression with a unit, or words."""
    if match := re.fullmatch(r"(-?)\s*\\\$\s*(.*)", text, re.DOTALL):
        amount = _read_quantity(match[1] + match[2])
        if isinstance(amount, Quantity) and (amount.unit is None or amount.unit == read_unit("dollar")):
            return Quantity(text, amount.expression, read_unit("dollar"), amount.digits)
        raise CannotRead(f"{text[:100]!r}: a currency without a number")
    head, tail = _split_unit(text)
    if tail:
        if not head:
            return Words(text)
        if re.search(r"\d", re.sub(r"\^\s*\{?-?\d\}?", "", tail)):
            raise CannotRead(f"{text[:100]!r}: a unit with a number")
        return Quantity(text, read_expression(head), read_unit(tail), _digits(head))
    # Letters alone are a word, or a product of at most three symbols.
    if text != "infinity" and re.fullmatch(r"[A-Za-z]{4,}(?:[\s-][A-Za-z]+)*|[A-Za-z]{2,}(?:[\s-][A-Za-z]+)+", text):
        return Words(text)
    try:
        return Quantity(text, read_expression(text), None, _digits(text))
    except CannotRead:
        # "June 20" is no formula, and equal to itself alone.
        if "\\" in text or not re.search("[A-Za-z]{2}", text):
            raise
        return Words(text)


_UNIT_FRACTION = re.compile(r"\\frac\s*\{\s*\\text\{([^{}]*)\}\s*\}\s*\{\s*\\text\{([^{}]*)\}\s*\}")
_PLAIN_UNIT = re.compile(
    r"(?P<head>.*[\d.)}\]!])(?P<gap>\s*)(?P<unit>[A-Za-z]+(?:(?:\s+|\s*/\s*)[A-Za-z]+)*\.?(?:\s*\^\s*\{?[23]\}?)?)",
    re.DOTALL,
)


def _split_unit(text: str) -> tuple[str, str]:
    """Return the expression and its unit, which may be empty."""
    text = _UNIT_FRACTION.sub(r"\\text{\1}/\\text{\2}", text)
    if "\\text{" in text:
        start = text.index("\\text{")
        # "\frac{3 \text{ m}}{...}" keeps its braces together.
        if text[:start].count("{") != text[:start].count("}"):
            raise CannotRead(f"{text[:100]!r}: words inside a formula")
        head = text[:start].strip()
        degrees = head.endswith("^\\circ")
        return (head.removesuffix("^\\circ").strip(), "^\\circ " + text[start:]) if degrees else (head, text[start:])
    if _TRIGONOMETRY.search(text):  # the degrees of an angle inside the formula
        return text, ""
    if text.endswith("%"):
        return text[:-1].strip(), "%"
    if match := re.fullmatch(r"(.*?)\s*\^\\circ\s*([CFK]?)", text, re.DOTALL):
        return match[1], f"^\\circ {match[2]}"
    match = _PLAIN_UNIT.fullmatch(text)
    if match is None:
        return text, ""
    words = re.findall(r"[A-Za-z]+", match["unit"])
    # A single letter is a unit only behind a space, because "5m" may be a product.
    is_unit = is_known_unit(words[0]) and (len(words[0]) > 1 or (bool(match["gap"]) and words[0] in "mgshL"))
    is_word = bool(match["gap"]) and len(words[0]) > 3 and words[0].islower() and not is_known_unit(words[0])
    is_word = is_word and not words[0].startswith(("sqrt", "theta", "alpha", "beta", "sinh", "cosh", "infinity"))
    return (match["head"], match["unit"]) if is_unit or is_word else (text, "")


def _digits(text: str) -> int | None:
    match = _DECIMAL.fullmatch(text.strip())
    return len(match[1].replace(".", "").replace(",", "").lstrip("0")) if match else None
