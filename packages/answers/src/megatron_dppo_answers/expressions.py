r"""Grammar of one mathematical expression, in LaTeX or plain text, to sympy.

latex2sympy2_extended 1.11, the grammar of math-verify, reads more LaTeX. But it reads wrong values without an error:
``3(2)`` and ``2 3`` as 5, ``A`` as ``a``, ``x'`` as ``x``, ``101_2`` as 101, decimals as 53-bit floats. A reward needs
the opposite: exact values, and ``CannotRead`` for everything else.
"""

import re

import sympy
from sympy import Expr, Integer, Rational, Symbol

from megatron_dppo_answers.arithmetic import CannotRead, binomial, divide, factorial, raise_to, read_number, repeating

_MAX_DEPTH = 60

_FUNCTIONS = {
    **{name: getattr(sympy, name) for name in ("sin", "cos", "tan", "cot", "sec", "csc", "exp")},
    **{name: getattr(sympy, name) for name in ("sinh", "cosh", "tanh", "coth", "sech", "csch")},
    **{f"arc{name}": getattr(sympy, f"a{name}") for name in ("sin", "cos", "tan", "cot", "sec", "csc")},
    **{name: getattr(sympy, name) for name in ("asin", "acos", "atan", "arg")},
    "ln": sympy.log,
    "Re": sympy.re,
    "Im": sympy.im,
}
# As in school mathematics, where only "ln" is natural.
_LOGARITHMS = {"log": 10, "lg": 10, "lb": 2}
_BINARY = {"gcd": sympy.gcd, "lcm": sympy.lcm, "max": sympy.Max, "min": sympy.Min}
_CONSTANTS = {"pi": sympy.pi, "infty": sympy.oo, "infinity": sympy.oo, "oo": sympy.oo, "inf": sympy.oo}
GREEK_LETTERS = frozenset((
    "alpha", "beta", "gamma", "delta", "epsilon", "varepsilon", "zeta", "eta", "theta", "vartheta", "iota", "kappa",
    "lambda", "mu", "nu", "xi", "rho", "sigma", "tau", "upsilon", "phi", "varphi", "chi", "psi", "omega", "Gamma",
    "Delta", "Theta", "Lambda", "Xi", "Sigma", "Upsilon", "Phi", "Psi", "Omega", "ell",
))  # fmt: skip
# Longest first, so that "sinh" is not read as "sin".
_NAMED = [*_FUNCTIONS, *_LOGARITHMS, *_BINARY, *_CONSTANTS, "sqrt", "abs", "theta", "alpha", "beta"]
_WORDS = sorted(_NAMED, key=len)[::-1]
_FACTORS = frozenset((
    *_FUNCTIONS, *_LOGARITHMS, *_BINARY, *_CONSTANTS, *GREEK_LETTERS,
    "frac", "sqrt", "binom", "{", "lfloor", "lceil", "overline", "bar", "vec",
))  # fmt: skip
"""Commands with which a factor begins."""
_NUMBER = re.compile(r"\d{1,3}(?:,\d{3})+(?![\d,])(?:\.\d+)?|\d+\.?\d*|\.\d+")
_COMMAND = re.compile(r"\\([A-Za-z]+|.)")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\overline\{(\d+)\}")
# What makes a whole number a mixed one: "\frac12" or " 1/2" behind it.
_MIXED_TAIL = re.compile(
    r"\s*\\frac\s*(?:\{\s*(\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))|\s+(\d+)\s*/\s*(\d+)(?![\d.])"
)
_TIMES = ("*", "\\cdot", "\\times", "\\ast")
_DIVIDED = ("/", "\\div")
_CLOSERS = {"(": ")", "[": "]", "\\{": "\\}", "{": "}", "|": "|", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil"}
_SPACE = re.compile(r"\s*")


def read_expression(text: str) -> Expr:
    """Return the exact value of one expression; decimals become fractions."""
    reader = _Reader(text)
    try:
        value = reader.sum()
    # Also what sympy raises on operands that it cannot combine.
    except (RecursionError, ArithmeticError, TypeError, AttributeError) as error:
        raise CannotRead(f"{text[:100]!r}: {error}") from error
    reader.skip_space()
    if reader.position != len(text):
        raise CannotRead(f"{text[:100]!r}: unexpected {text[reader.position :][:20]!r}")
    return value


class _Reader:
    r"""A recursive-descent parser that reads characters, because ``\frac12`` and ``12`` differ in their tokens."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self._depth = 0
        self._bars = 0

    def skip_space(self) -> None:
        match = _SPACE.match(self.text, self.position)
        assert match is not None
        self.position = match.end()

    def peek(self) -> str:
        """Return the next token without reading it: a command, a character, or an empty string at the end."""
        self.skip_space()
        if self.text.startswith("**", self.position):
            return "^"
        match = _COMMAND.match(self.text, self.position)
        return match[0] if match else self.text[self.position : self.position + 1]

    def take(self, token: str) -> bool:
        if self.peek() != token:
            return False
        # ``peek`` shows ** as ^.
        self.position += 2 if self.text.startswith("**", self.position) else len(token)
        return True

    def expect(self, token: str) -> None:
        if not self.take(token):
            raise CannotRead(f"{self.text[:100]!r}: expected {token!r} at {self.position}")

    def sum(self) -> Expr:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise CannotRead("nested too deep")
        value = self._signed_product()
        while (sign := self.peek()) in ("+", "-"):
            self.take(sign)
            term = self._signed_product()
            value = value + term if sign == "+" else value - term
        self._depth -= 1
        return value

    def _signed_product(self) -> Expr:
        if self.take("-"):
            return -self._signed_product()
        if self.take("+"):
            return self._signed_product()
        # The sign binds less than a power: -x^2 is -(x^2).
        value = self._power()
        while True:
            token = self.peek()
            if token in _TIMES:
                self.take(token)
                value = value * self._signed_power()
            elif token in _DIVIDED:
                self.take(token)
                value = divide(value, self._signed_power())
            elif self._starts_factor(token):
                # Two numbers side by side are no product.
                if token.isdigit() and self._follows_digit():
                    raise CannotRead(f"{self.text[:100]!r}: two numbers side by side")
                value = value * self._power()
            else:
                return value

    def _signed_power(self) -> Expr:
        return -self._signed_power() if self.take("-") else self._power()

    def _follows_digit(self) -> bool:
        before = self.text[: self.position].rstrip()
        return bool(before) and not before.endswith((")", "}", "]", "|", "!"))

    def _starts_factor(self, token: str) -> bool:
        if token == "|":
            # A bar opens unless one is open already.
            return not self._bars
        if token.isalnum() or token in ("(", "[", "{", "."):
            return token.isascii()
        return token.startswith("\\") and token[1:] in _FACTORS

    def _power(self) -> Expr:
        value = self._postfix(self._primary())
        return raise_to(value, self._exponent()) if self.take("^") else value

    def _postfix(self, value: Expr) -> Expr:
        while True:
            if self.take("!"):
                value = factorial(value)
            elif self.take("%"):
                value = value / 100
            elif self.peek() == "^" and self.text.startswith("^\\circ", self.position):
                self.position += len("^\\circ")
                value = value * sympy.pi / 180
            else:
                return value

    def _exponent(self) -> Expr:
        if self.peek() == "{":
            return self._group("{")
        if self.take("-"):
            return -self._exponent()
        value = self._postfix(self._primary())
        # From the right: 2^3^2 is 2^9.
        return raise_to(value, self._exponent()) if self.take("^") else value

    def _primary(self) -> Expr:
        token = self.peek()
        if token.isdigit() or token == ".":
            return self._number()
        if token in _CLOSERS:
            return self._group(token)
        if token.startswith("\\"):
            return self._command(token)
        if token.isalpha() and token.isascii():
            return self._letters()
        raise CannotRead(f"{self.text[:100]!r}: unexpected {token!r} at {self.position}")

    def _number(self) -> Expr:
        if match := _REPEATING.match(self.text, self.position):
            self.position = match.end()
            return repeating(*match.groups())
        match = _NUMBER.match(self.text, self.position)
        if match is None:
            raise CannotRead(f"{self.text[:100]!r}: no number at {self.position}")
        self.position = match.end()
        if self.text.startswith("_", self.position):
            raise CannotRead(f"{self.text[:100]!r}: a number with a subscript")
        value = read_number(match[0])
        mixed = _MIXED_TAIL.match(self.text, self.position)
        # Only a proper fraction makes a mixed number: "2 3/2" is none.
        if mixed and match[0].isdigit():
            numerator, denominator = (int(part) for part in mixed.groups() if part)
            if 0 < numerator < denominator:
                self.position = mixed.end()
                return value + Rational(numerator, denominator)
        return value

    def _group(self, token: str) -> Expr:
        self.take(token)
        if token == "|":
            self._bars += 1
        value = self.sum()
        if token == "|":
            self._bars -= 1
        self.expect(_CLOSERS[token])
        wrappers = {"|": sympy.Abs, "\\lfloor": sympy.floor, "\\lceil": sympy.ceiling}
        return wrappers[token](value) if token in wrappers else value

    def _argument(self) -> Expr:
        r"""Read an argument of ``\frac`` and its kin: a group, one digit, or one symbol."""
        token = self.peek()
        if token.isdigit():
            self.position += 1
            return Integer(int(token))
        if token.isalpha():
            self.position += 1
            return _symbol(token)
        return self._primary()

    def _command(self, token: str) -> Expr:
        name = token[1:]
        if name in ("frac", "binom"):
            self.take(token)
            upper = self._argument()
            lower = self._argument()
            return divide(upper, lower) if name == "frac" else binomial(upper, lower)
        if name == "sqrt":
            self.take(token)
            return self._root()
        if name in ("overline", "bar", "vec"):
            self.take(token)
            self.skip_space()
            match = re.compile(r"\{?([A-Za-z]+)\}?").match(self.text, self.position)
            if match is None:
                raise CannotRead(f"{self.text[:100]!r}: {token} without a name")
            self.position = match.end()
            return self._subscripted(f"{name}_{match[1]}")
        if name in _FUNCTIONS or name in _LOGARITHMS or name in _BINARY:
            self.take(token)
            return self._function(name)
        if name in _CONSTANTS:
            self.take(token)
            return _CONSTANTS[name]
        if name in GREEK_LETTERS:
            self.take(token)
            return self._subscripted(name)
        raise CannotRead(f"{self.text[:100]!r}: unknown command {token}")

    def _root(self) -> Expr:
        degree: Expr = Integer(2)
        if self.take("["):
            degree = self.sum()
            self.expect("]")
        self.skip_space()
        # \sqrt12 means the root of 12 in answers, although TeX would put only the 1 under the root.
        value = self._number() if self.peek().isdigit() else self._argument()
        # The real root: sympy's own cube root of a negative number is complex.
        if degree == 3 and value.is_number and value.is_negative:
            return -sympy.root(-value, 3)
        return sympy.root(value, degree)

    def _function(self, name: str) -> Expr:
        base: Expr | None = None
        exponent: Expr | None = None
        while self.peek() in ("^", "_"):
            if self.take("^"):
                exponent = self._exponent()
            else:
                self.expect("_")
                base = self._argument()
        if name in _BINARY:
            return self._binary(name)
        if name in _LOGARITHMS:
            argument = self._function_argument()
            value = sympy.log(argument) / sympy.log(base if base is not None else _LOGARITHMS[name])
        else:
            if base is not None:
                raise CannotRead(f"{self.text[:100]!r}: {name} with a subscript")
            # "\sin^{-1}" is the inverse function, not the reciprocal.
            if exponent == -1 and f"arc{name}" in _FUNCTIONS:
                return _FUNCTIONS[f"arc{name}"](self._function_argument())
            value = _FUNCTIONS[name](self._function_argument())
        return value if exponent is None else raise_to(value, exponent)

    def _binary(self, name: str) -> Expr:
        opening = self.peek()
        if opening not in ("(", "\\{"):
            raise CannotRead(f"{self.text[:100]!r}: {name} without arguments")
        self.take(opening)
        arguments = [self.sum()]
        while self.take(","):
            arguments.append(self.sum())
        self.expect(_CLOSERS[opening])
        return _BINARY[name](*arguments)

    def _function_argument(self) -> Expr:
        """Read what a function without its own brackets applies to: factors up to an operator or a function."""
        if self.peek() in ("(", "{", "["):
            return self._postfix(self._group(self.peek()))
        value = self._signed_power()
        while True:
            token = self.peek()
            is_function = token[1:] in _FUNCTIONS or token[1:] in _LOGARITHMS or self._word() in _FUNCTIONS
            if is_function or token in ("(", "[", "|") or not self._starts_factor(token):
                return value
            value = value * self._power()

    def _word(self) -> str:
        """Return the name of a function or constant that plain letters begin with, or an empty string."""
        self.skip_space()
        return next((word for word in _WORDS if self.text.startswith(word, self.position)), "")

    def _letters(self) -> Expr:
        word = self._word()
        if word in ("sqrt", "abs"):
            self.position += len(word)
            if self.peek() not in ("(", "{") and not self.peek().isdigit():
                raise CannotRead(f"{self.text[:100]!r}: {word} without an argument")
            return abs(self._argument()) if word == "abs" else self._root()
        if word in _FUNCTIONS or word in _LOGARITHMS or word in _BINARY:
            self.position += len(word)
            return self._function(word)
        if word in _CONSTANTS:
            self.position += len(word)
            return _CONSTANTS[word]
        name = word or self.text[self.position]
        self.position += len(name)
        return self._subscripted(name)

    def _subscripted(self, name: str) -> Expr:
        match = re.compile(r"_(?:\{([^{}]*)\}|([A-Za-z0-9]))").match(self.text, self.position)
        if match:
            self.position = match.end()
            name += "_" + re.sub(r"\s", "", match[1] or match[2] or "")
        while self.text.startswith("'", self.position):
            self.position += 1
            name += "'"
        return _symbol(name)


def _symbol(name: str) -> Expr:
    return {"e": sympy.E, "i": sympy.I}.get(name) or Symbol(name)
