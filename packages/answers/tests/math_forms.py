"""Labels like those of MATH-500, right forms and wrong answers of each, made without the code under test.

Forms come from arithmetic by hand, from Python's integers, fractions and decimals, and from sympy's own printer.
Nothing here parses LaTeX.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal, getcontext
from fractions import Fraction
from math import isqrt

import sympy

getcontext().prec = 40
ROW_END = " \\\\ "


@dataclass(frozen=True)
class Answer:
    """A label with forms of the same answer and with other answers."""

    label: str
    right: list[str]
    wrong: list[str]


def integers(generator: random.Random) -> Iterator[Answer]:
    values = [0, 1, 2, 12, 42, 720, 2220, 13535, 58500, 11111111100, 10**30 + 1, 7**60]
    values += [generator.randint(-999, 99999) for _ in range(24)]
    for value in values:
        right = [
            str(value),
            f"{value}.0",
            f"\\frac{{{3 * value}}}{{3}}",
            f"x={value}",
            f"k = {value}",
            f"{value} \\cdot 1",
        ]
        right += [f"\\text{{{value}}}", f"{{{value}}}", f"{value}\\,", f"\\mathbf{{{value}}}", f"{value - 7} + 7"]
        if abs(value) >= 10000:
            right += [f"{value:,}", f"{value:,}".replace(",", "{,}"), f"{value:,}".replace(",", ",\\!")]
            right += [f"{value:,}".replace(",", "\\,"), f"{value:,}".replace(",", " ")]
        wrong = [
            str(value + 1),
            f"{value}.5",
            f"{value}, {value + 1}",
            f"{value + 1} = {value}",
            f"{value}_7",
            f"1{abs(value)}",
        ]
        wrong += [f"x={value + 1}", f"{value} or {value + 2}", f"({value}, {value})", f"{value or 1}x"]
        wrong += [str(-value), f"10^{{{value}}}"] if 0 < abs(value) < 100 else []
        yield Answer(str(value), right, wrong)


def fractions(generator: random.Random) -> Iterator[Answer]:
    pairs = [(1, 2), (3, 56), (14, 3), (243, 625), (9, 5), (-3, 2), (1, 7), (5, 8), (21, 16), (2, 3)]
    pairs += [(generator.randint(1, 80), generator.randint(2, 60)) for _ in range(24)]
    for numerator, denominator in pairs:
        value = Fraction(numerator, denominator)
        p, q = value.numerator, value.denominator
        if q == 1:
            continue
        size = abs(p)
        sign = "-" if p < 0 else ""
        right = [
            f"{sign}\\frac{{{size}}}{{{q}}}",
            f"\\dfrac{{{p}}}{{{q}}}",
            f"{p}/{q}",
            f"\\frac{{{5 * p}}}{{{5 * q}}}",
        ]
        right += [
            f"{sign}\\tfrac{{{size}}}{{{q}}}",
            f"{p} \\cdot {q}^{{-1}}",
            f"{p} \\div {q}",
            f"t = {p}/{q}",
            f"({p})/({q})",
        ]
        right += [f"\\frac{{{-p}}}{{{-q}}}"]
        if size < 10 and q < 10:
            right.append(f"{sign}\\frac{size}{q}")
        if size > q:
            whole, rest = divmod(size, q)
            right += [f"{sign}{whole}\\frac{{{rest}}}{{{q}}}", f"{sign}{whole} {rest}/{q}"]
        if set(sympy.factorint(q)) <= {2, 5}:
            exact = Decimal(p) / Decimal(q)
            right += [f"{exact:f}", f"{exact * 100:f}\\%"]
        else:
            right.append(f"{Decimal(p) / Decimal(q):.12f}")
        wrong = [
            f"\\frac{{{q}}}{{{p}}}" if size != 1 or q != 1 else "7",
            f"{p}/{q + 1}",
            f"\\frac{{{p + 1}}}{{{q}}}",
            f"{-p}/{q}",
        ]
        wrong += [str(p), f"{p},{q}", f"({p},{q})", f"{Decimal(p) / Decimal(q) + Decimal('.001'):.12f}"]
        wrong += [f"{Decimal(p) / Decimal(q):.3f}"] if value * 1000 % 1 else []
        yield Answer(f"{sign}\\frac{{{size}}}{{{q}}}", right, wrong)


def surds(generator: random.Random) -> Iterator[Answer]:
    for factor, radicand in [(3, 13), (11, 2), (1, 51), (2, 5), (5, 3), (4, 7), (6, 11), (1, 19), (10, 3), (12, 6)]:
        digits = Decimal(factor * factor * radicand).sqrt()
        lead = "" if factor == 1 else str(factor)
        label = f"{lead}\\sqrt{{{radicand}}}"
        right = [
            label,
            f"\\sqrt{{{factor * factor * radicand}}}",
            f"{factor}\\cdot\\sqrt{{{radicand}}}",
            f"{factor}*sqrt({radicand})",
        ]
        right += [
            f"\\frac{{{factor * radicand}}}{{\\sqrt{{{radicand}}}}}",
            f"{lead}{'*' if lead else ''}{radicand}^{{1/2}}",
        ]
        right += [
            f"{digits:.9f}",
            f"\\sqrt{{{radicand}}}\\cdot{factor}",
            f"{lead}\\sqrt {radicand}",
            f"d={label}",
            f"{lead}√{radicand}",
        ]
        wrong = [
            f"{lead}\\sqrt{{{radicand + 1}}}",
            f"-{label}",
            f"{factor}+\\sqrt{{{radicand}}}",
            f"{digits:.2f}",
            f"\\pm {label}",
        ]
        wrong += [
            str(factor * factor * radicand),
            f"{lead}\\sqrt[3]{{{radicand}}}",
            f"{isqrt(factor * factor * radicand)}",
        ]
        yield Answer(label, right, wrong)
        yield Answer(
            f"\\frac{{{label}}}{{7}}",
            [f"\\frac{{1}}{{7}}{label}" if lead else f"\\frac17{label}", f"{label}/7"],
            [label],
        )


def constants(generator: random.Random) -> Iterator[Answer]:
    """Multiples of pi, powers, tiny and huge numbers, logarithms, angles."""
    for p, q in [(1, 1), (2, 1), (3, 4), (5, 6), (7, 3), (25, 1)]:
        label = f"{p if p > 1 else ''}\\pi" if q == 1 else f"\\frac{{{p if p > 1 else ''}\\pi}}{{{q}}}"
        right = [
            label,
            f"\\frac{{{p}}}{{{q}}}\\pi",
            f"\\pi\\cdot\\frac{{{p}}}{{{q}}}",
            f"{p}π/{q}",
            f"{p}*pi/{q}",
            f"\\frac{{{3 * p}\\pi}}{{{3 * q}}}",
        ]
        wrong = [
            f"\\frac{{{p}}}{{{q}}}",
            f"\\frac{{{p + 1}\\pi}}{{{q}}}",
            f"-{label}",
            f"{3.14 * p / q:.4f}",
            f"{label}^2",
        ]
        yield Answer(label, right, wrong)
    for exponent in (5, 20, 98, 300, 1000):
        label = f"\\frac{{1}}{{2^{{{exponent}}}}}"
        right = [
            f"2^{{-{exponent}}}",
            f"\\left(\\frac12\\right)^{{{exponent}}}",
            f"1/2^{{{exponent}}}",
            f"\\frac{{1}}{{{2**exponent}}}",
            f"0.5^{{{exponent}}}",
        ]
        wrong = [
            f"2^{{-{exponent + 1}}}",
            f"\\frac{{1}}{{2^{{{exponent - 1}}}}}",
            "0",
            f"3^{{-{exponent}}}",
            f"-{label}",
            f"2^{{{exponent}}}",
        ]
        yield Answer(label, right, wrong)
    for number in (4, 6, 20, 2004):
        wrong = [f"1/{number + 1}!", f"\\frac{{2}}{{{number}!}}", f"{number}!", "0"]
        yield Answer(
            f"\\frac{{1}}{{{number}!}}",
            [f"1/{number}!", f"({number}!)^{{-1}}", f"\\frac{{{number + 1}}}{{{number + 1}!}}"],
            wrong,
        )
    for exponent in (3, 18, 100):
        right = [
            str(10**exponent),
            f"10^{{{exponent - 1}}} \\cdot 10",
            f"{10**exponent:,}",
            f"1\\times10^{{{exponent}}}",
        ]
        yield Answer(
            f"10^{{{exponent}}}",
            right,
            [str(10**exponent + 1), f"10^{{{exponent}}}+\\sqrt2", f"10^{{{exponent + 1}}}", str(10**exponent - 1)],
        )
    yield Answer(
        ".0000672",
        ["6.72\\times 10^{-5}", "0.0000672", "6.72 \\cdot 10^{-5}", "\\frac{672}{10^7}"],
        ["0", "0.0000673", "6.72", "0.000672"],
    )
    for degrees in (30, 45, 60, 90, 120, 135, 180):
        label = f"{degrees}^\\circ"
        angle = Fraction(degrees, 180)
        right = [
            label,
            f"{degrees}^{{\\circ}}",
            f"{degrees}°",
            f"{degrees}",
            f"{degrees} degrees",
            f"{degrees}\\text{{ degrees}}",
            f"{degrees} \\degree",
        ]
        right += [
            f"\\frac{{{angle.numerator}\\pi}}{{{angle.denominator}}}",
            f"\\angle A = {degrees}^\\circ",
            f"\\theta = {degrees}^\\circ",
        ]
        yield Answer(
            label,
            right,
            [
                f"{degrees + 1}^\\circ",
                f"{degrees + 1}",
                f"-{label}",
                f"\\frac{{{angle.numerator + 1}\\pi}}{{{angle.denominator}}}",
            ],
        )


def complex_numbers(generator: random.Random) -> Iterator[Answer]:
    for real, imaginary in [(6, -5), (6, 9), (-2, 7), (1, -12), (3, 1), (0, 4), (-9, -11)]:
        body = f"{abs(imaginary) if abs(imaginary) > 1 else ''}i"
        sign = "-" if imaginary < 0 else "+"
        label = f"{real} {sign} {body}" if real else f"{'-' if imaginary < 0 else ''}{body}"
        right = [
            label,
            label.replace(" ", ""),
            f"{imaginary}i + {real}",
            f"z = {label}",
            f"{real}+({imaginary})i",
            f"i({imaginary}-{real}i)" if real >= 0 else label,
        ]
        wrong = [
            f"{real} {'+' if sign == '-' else '-'} {body}",
            f"{real + 1} {sign} {body}",
            str(real),
            f"({real},{imaginary})",
            f"{imaginary} + {real + 1}i",
        ]
        yield Answer(label, right, wrong)


def polynomials(generator: random.Random) -> Iterator[Answer]:
    x = sympy.Symbol("x")
    tables = [[-6, 3, 0, 1], [1, 4, 8], [2, 2], [1, 2, 1], [-24, -4, 6], [-1, 0, 1], [0, 1, 0, -3], [5, -1, 2]]
    tables += [
        [generator.randint(-9, 9) for _ in range(generator.randint(2, 4))] + [generator.randint(1, 9)]
        for _ in range(16)
    ]
    for table in tables:
        terms = [f"({coefficient})x^{{{power}}}" for power, coefficient in enumerate(table)]
        polynomial = sum(coefficient * x**power for power, coefficient in enumerate(table))
        label = sympy.latex(polynomial)
        right = [
            label,
            " + ".join(terms),
            " + ".join(reversed(terms)),
            sympy.latex(sympy.factor(polynomial)),
            label.replace(" ", ""),
        ]
        right += [
            sympy.latex(sympy.horner(polynomial)),
            f"f(x) = {label}",
            f"y={label}",
            str(polynomial),
            f"\\frac{{{sympy.latex(2 * polynomial)}}}{{2}}",
        ]
        right += [f"{sympy.latex(polynomial + x)} - x"]
        wrong = [
            sympy.latex(polynomial + 1),
            sympy.latex(polynomial + x),
            sympy.latex(-polynomial),
            sympy.latex(polynomial.subs(x, sympy.Symbol("t"))),
        ]
        wrong += [sympy.latex(2 * polynomial), str(table[0] + 1000), f"{label} = {table[0]}"]
        yield Answer(label, right, wrong)


def lines(generator: random.Random) -> Iterator[Answer]:
    for slope, offset in [(2, 3), (3, -3), (-1, 5), (4, 1), (-5, 2), (1, -7), (7, 12), (-3, -8)]:
        s = {1: "", -1: "-"}.get(slope, str(slope))
        label = f"y = {s}x {'+' if offset > 0 else '-'} {abs(offset)}"
        right = [
            label,
            f"{slope}x - y + {offset} = 0".replace("+ -", "- "),
            f"y - ({slope})x = {offset}",
            f"{slope}x+{offset} = y".replace("+-", "-"),
        ]
        right += [
            f"2y = {2 * slope}x + ({2 * offset})",
            f"-y+({slope})x+({offset})=0",
            f"y-({slope + offset})={slope}(x-1)",
            f"\\frac{{y}}{{3}}=\\frac{{{slope}x+({offset})}}{{3}}",
        ]
        right += [
            f"{slope}x + {offset}".replace("+ -", "- "),
            f"x = \\frac{{y-({offset})}}{{{slope}}}",
            f"{-offset} = {slope}x - y",
        ]
        wrong = [
            f"y = {s}x + {offset + 1}",
            f"{slope}x - y + {offset + 1} = 0",
            f"y = {slope + 1}x + ({offset})",
            f"z = {s}x + ({offset})",
        ]
        wrong += [
            f"y > {s}x + ({offset})",
            f"{slope}x - y + {offset}".replace("+ -", "- "),
            f"x = {slope}y + ({offset})" if slope * slope != 1 else "y = 99",
            str(offset),
        ]
        yield Answer(label, right, wrong)
    circle = ["(x-1)^2+(y+2)^2=9", "x^2+y^2-2x+4y-4=0", "x^2-2x+y^2+4y=4", "9 = (y+2)^2 + (x-1)^2"]
    for label in circle[:2]:
        yield Answer(label, circle, ["(x-1)^2+(y+2)^2=3", "(x+1)^2+(y-2)^2=9", "x^2+y^2=9", "(x-1)^2+(y+2)^2=9+x", "9"])
    ellipse = ["\\frac{x^2}{9}+\\frac{y^2}{4}=1", "4x^2+9y^2=36", "4x^2 + 9y^2 - 36 = 0"]
    yield Answer(ellipse[0], ellipse, ["9x^2+4y^2=36", "\\frac{x^2}{3}+\\frac{y^2}{2}=1", "1", "36"])


def groups(generator: random.Random) -> Iterator[Answer]:
    """Tuples, lists, sets, intervals, matrices."""
    for items in [
        ("2", "-3"),
        ("6", "31", "-1"),
        ("3", "\\frac{\\pi}{2}"),
        ("\\frac{3}{2}", "-13"),
        ("0", "9", "4", "7"),
    ]:
        label = f"\\left( {', '.join(items)} \\right)"
        right = [
            label,
            f"({','.join(items)})",
            f"\\Big({', '.join(items)}\\Big)",
            ", ".join(items),
            f"\\langle {', '.join(items)} \\rangle",
        ]
        right += [f"\\begin{{pmatrix}} {ROW_END.join(items)} \\end{{pmatrix}}"]
        names = "xyzw"[: len(items)] if len(items) < 4 else "abcd"
        right += [
            f"({','.join(names)}) = ({','.join(items)})",
            ", ".join(f"{name}={item}" for name, item in zip(names, items, strict=True)),
        ]
        wrong = [
            f"({', '.join(reversed(items))})",
            f"({', '.join(items[:-1])}, 99)",
            items[0],
            f"({', '.join((*items, '1'))})",
            f"\\{{{', '.join(items)}\\}}",
        ]
        yield Answer(label, right, wrong)
    for items in [("1", "-2"), ("3", "5", "7"), ("-2", "1"), ("\\frac{1}{2}", "4", "-1"), ("\\sqrt{2}", "0")]:
        for label in (",".join(items), f"\\{{{', '.join(items)}\\}}"):
            orders = list(itertools.islice(itertools.permutations(items), 4))
            right = [", ".join(order) for order in orders] + [f"\\{{{','.join(order)}\\}}" for order in orders]
            right += [
                " \\text{ and } ".join(items),
                " or ".join(items),
                ", ".join(f"x={item}" for item in items),
                "; ".join(items),
            ]
            wrong = [
                items[0],
                ", ".join((*items, "99")),
                ", ".join((*items[:-1], "99")),
                f"({', '.join(reversed(items))})",
            ]
            yield Answer(label, right, wrong)
    for low, high in [("-2", "7"), ("2", "12"), ("0", "1"), ("\\frac{1}{2}", "3")]:
        for left, right_end, signs in (
            ("[", "]", ("\\le", "\\le")),
            ("(", "]", ("<", "\\le")),
            ("[", ")", ("\\leq", "<")),
        ):
            label = f"{left}{low},{high}{right_end}"
            chain = f"{low} {signs[0]} x {signs[1]} {high}"
            right = [
                label,
                f"x \\in \\left{left}{low}, {high}\\right{right_end}",
                chain,
                f"\\{{x : {chain}\\}}",
                f"x\\in{label}",
            ]
            wrong = [
                f"({low},{high})",
                f"{left}{low},{high}1{right_end}",
                f"{low}, {high}",
                low,
                f"{low} < x < {high}",
                f"x {signs[0]} {high}",
            ]
            yield Answer(label, right, wrong)
    label = "(-\\infty, 2) \\cup (3, \\infty)"
    right = [
        label,
        "(3,\\infty)\\cup(-\\infty,2)",
        "x<2 \\text{ or } x>3",
        "x > 3 or x < 2",
        "x\\in(-\\infty,2)\\cup(3,+\\infty)",
        "(-∞,2)∪(3,∞)",
    ]
    yield Answer(
        label,
        right,
        [
            "(-\\infty,2]\\cup(3,\\infty)",
            "(2,3)",
            "x<2",
            "(-\\infty,3)\\cup(2,\\infty)",
            "(-\\infty, 2) \\cap (3, \\infty)",
        ],
    )
    cells = [["-1/3", "2/3"], ["5/3", "4"]]
    for kind in ("pmatrix", "bmatrix"):
        body = ROW_END.join(" & ".join(row) for row in cells)
        fancy = "\\\\[3pt]".join(
            "&".join(cell.replace("1/3", "\\frac{1}{3}").replace("2/3", "\\frac23") for cell in row) for row in cells
        )
        right = [f"\\begin{{{each}}}{text}\\end{{{each}}}" for each in ("pmatrix", "bmatrix") for text in (body, fancy)]
        right += [
            f"\\left[\\begin{{array}}{{cc}}{body}\\end{{array}}\\right]",
            f"A = \\begin{{pmatrix}}{body}\\end{{pmatrix}}",
        ]
        wrong = [
            f"\\begin{{pmatrix}}{body.replace('4', '5')}\\end{{pmatrix}}",
            "(-1/3,2/3,5/3,4)",
            "\\begin{pmatrix}-1/3 & 5/3 \\\\ 2/3 & 4\\end{pmatrix}",
        ]
        yield Answer(f"\\begin{{{kind}}} {body} \\end{{{kind}}}", right, wrong)
    roots = [
        "1+\\sqrt{19}, 1-\\sqrt{19}",
        "1 \\pm \\sqrt{19}",
        "1-\\sqrt{19} \\text{ and } 1+\\sqrt{19}",
        "x = 1 \\pm \\sqrt{19}",
        "1\\mp\\sqrt{19}",
    ]
    yield Answer("1 \\pm \\sqrt{19}", roots, ["1+\\sqrt{19}", "1\\pm\\sqrt{18}", "-1\\pm\\sqrt{19}", "\\pm\\sqrt{19}"])


def units(generator: random.Random) -> Iterator[Answer]:
    for value, names, others in [
        (
            "15",
            ["\\mbox{ cm}^2", "\\text{ cm}^{2}", " \\text{ square centimeters}", " cm^2", "\\,\\mathrm{cm^2}"],
            ["\\text{ cm}", "\\text{ m}^2"],
        ),
        ("5.4", [" \\text{ cents}", "\\text{ cents}.", " cents", "¢"], [" \\text{ dollars}"]),
        ("60", [" mph", "\\text{ miles per hour}", " \\text{ mi/h}"], [" \\text{ km/h}", " \\text{ miles}"]),
        ("12", ["\\text{ inches}", " inches", "\\text{ in}", " \\text{ inch}"], ["\\text{ feet}", "\\text{ cm}"]),
        ("3", ["\\text{ hours}", " hours", "\\text{ hr}"], ["\\text{ minutes}", "\\text{ days}"]),
        ("36\\pi", ["\\text{ cubic meters}", "\\text{ m}^3"], ["\\text{ m}^2"]),
        ("7", ["\\text{ students}", " students"], ["\\text{ teachers}"]),
    ]:
        label = value + names[0]
        right = [value, *(value + name for name in names)]
        yield Answer(
            label, right, [*(value + other for other in others), "99", "99" + names[0], f"{value}+1{names[0]}"]
        )
        yield Answer(value, right, ["99" + name for name in names])
    for price in ("18.90", "32.00", "0.75"):
        cents = str(int(Decimal(price) * 100))
        right = [
            f"\\${price}",
            price,
            f"{price} \\text{{ dollars}}",
            f"{Decimal(price).normalize():f}",
            f"{cents} \\text{{ cents}}",
        ]
        yield Answer(f"\\${price}", right, [f"\\${price}1", f"{price} \\text{{ cents}}", f"\\$1{price}", cents])
    for percent in ("10", "12.5", "150"):
        share = f"{Decimal(percent) / 100:f}"
        right = [
            f"{percent}\\%",
            f"{percent}%",
            percent,
            f"{percent} percent",
            f"{percent} \\text{{ percent}}",
            share,
            f"p={percent}\\%",
        ]
        yield Answer(f"{percent}\\%", right, [f"2{percent}\\%", f"{share}\\%", f"1{percent}", f"-{percent}\\%"])
    for digits, base in [("52", 8), ("4343", 6), ("2516", 8), ("1101", 2), ("1A", 16)]:
        value = int(digits, base)
        right = [
            f"{digits}_{base}" if base < 10 else f"{digits}_{{{base}}}",
            f"{digits}_{{{base}}}",
            f"({digits})_{{{base}}}",
            f"0{digits}_{{{base}}}",
            f"n={digits}_{{{base}}}",
        ]
        yield Answer(
            right[0],
            right,
            [f"{digits}_{{{base + 1}}}", digits, f"{digits}1_{{{base}}}", str(value + 1), f"{digits}_{{10}}"],
        )


def words(generator: random.Random) -> Iterator[Answer]:
    names = ["Evelyn", "east", "Navin", "June 20", "even", "neither", "Yes"]
    for name in names:
        right = [
            f"\\text{{{name}}}",
            name,
            f"\\textbf{{{name}}}",
            f"\\text{{{name.lower()}}}",
            f"\\mathrm{{{name}}}",
            f"\\text{{ {name} }}",
            f"{name}.",
        ]
        wrong = [f"\\text{{{other}}}" for other in names if other != name] + [
            name[::-1],
            f"\\text{{not {name}}}",
            name[:-1],
        ]
        yield Answer(f"\\text{{{name}}}", right, wrong)
    for letter in "ABCDE":
        right = [
            f"\\text{{({letter})}}",
            letter,
            f"({letter})",
            f"\\textbf{{({letter})}}",
            f"\\text{{{letter}}}",
            f"\\mathrm{{({letter})}}",
        ]
        wrong = [f"\\text{{({other})}}" for other in "ABCDE" if other != letter] + [
            "A, B",
            letter.lower(),
            f"{letter}{letter}",
        ]
        yield Answer(f"\\text{{({letter})}}", right, wrong)


def formulas(generator: random.Random) -> Iterator[Answer]:
    table = [
        ("p - q", ["-(q-p)", "-q+p", "p+(-q)"], ["q-p", "p+q", "p", "P - Q"]),
        (
            "\\cot x",
            ["\\frac{1}{\\tan x}", "\\frac{\\cos x}{\\sin x}", "\\cot(x)", "\\tan^{-1}(x)\\cdot 0+\\cot x"],
            ["\\tan x", "\\cot y", "-\\cot x"],
        ),
        ("\\sin 2x", ["2\\sin x\\cos x", "\\sin(2x)", "2 \\cos(x)\\sin(x)"], ["\\sin^2 x", "2\\sin x", "\\sin x^2"]),
        ("n!", ["n(n-1)!", "n \\cdot (n-1)!", "\\frac{(n+1)!}{n+1}"], ["(n-1)!", "n", "(n+1)!"]),
        ("2^{n+1}", ["2\\cdot 2^n", "2^{1+n}", "4^{(n+1)/2}", "2^n+2^n"], ["2^n+1", "2^n", "2^{n-1}"]),
        (
            "\\frac{x+2}{7}",
            ["\\frac17x+\\frac27", "(x+2)/7", "\\frac{1}{7}(x+2)", "\\frac{2x+4}{14}"],
            ["x+2/7", "\\frac{x}{7}+2", "\\frac{7}{x+2}"],
        ),
        (
            "\\binom{n}{2}",
            ["\\frac{n(n-1)}{2}", "\\frac{n^2-n}{2}", "\\dbinom n2"],
            ["\\frac{n(n+1)}{2}", "n^2", "\\binom{n}{3}"],
        ),
        ("\\pi r^2", ["r^2\\pi", "\\pi\\cdot r\\cdot r", "A = \\pi r^2"], ["2\\pi r", "\\pi r", "\\pi R^2"]),
        ("|x|", ["\\sqrt{x^2}", "|-x|", "\\left|x\\right|", "\\lvert x \\rvert"], ["x", "-x", "|y|"]),
        ("\\ln 4", ["2\\ln 2", "\\ln(4)", "\\ln 8-\\ln 2"], ["\\ln 2", "4", "\\ln 5"]),
        ("\\log_2 x", ["\\frac{\\ln x}{\\ln 2}", "\\log_{2}(x)", "\\log_2{x}"], ["\\log_3 x", "\\ln x", "\\log_x 2"]),
        ("x_1+x_2", ["x_2+x_1", "x_{1}+x_{2}"], ["x_1+x_3", "2x", "x_1x_2"]),
        ("f'(x)", ["f'(x)", "f^{\\prime}(x)"], ["f(x)"]),
        (
            "\\frac{1}{1-x}",
            ["-\\frac{1}{x-1}", "(1-x)^{-1}", "\\frac{1+x}{1-x^2}"],
            ["\\frac{1}{x-1}", "1-x", "\\frac{1}{1+x}"],
        ),
    ]
    for label, right, wrong in table:
        yield Answer(label, [label, *right, *(f"y = {each}" for each in right[:1])], wrong)


GENERATORS: list[Callable[[random.Random], Iterator[Answer]]] = [
    integers,
    fractions,
    surds,
    constants,
    complex_numbers,
    polynomials,
    lines,
    groups,
    units,
    words,
    formulas,
]
BOXES = [
    "so \\boxed{%s}",
    "$\\boxed {%s}$",
    "\\boxed{%s.}",
    "\\fbox{%s}",
    "\\boxed{$%s$}",
    "\\boxed{\\displaystyle %s}",
    "**Answer**: $%s$",
    "**Final Answer:** \\(%s\\)",
    "Answer: %s",
    "\\boxed{ %s }. Put it in \\boxed{}.",
    "\\boxed{%s\\,.}",
    "<think>\\boxed{99}</think> \\[\\boxed{%s}\\]",
    "### Final answer: $%s$.",
    "\\boxed{\\boxed{%s}}",
    "\\boxed{\\boldsymbol{%s}}",
]
LABELS = ["%s", "$%s$", "%s.", "\\boxed{%s}", " %s ", "\\displaystyle %s"]


def pairs(seed: int = 0) -> list[tuple[str, str, float]]:
    """Return (completion, label, score): each form and each wrong answer in boxes and labels of several layouts."""
    generator = random.Random(seed)
    result = []
    for answers in GENERATORS:
        for answer in answers(generator):
            for score, forms in ((1.0, answer.right), (0.0, answer.wrong)):
                for form in forms:
                    for box in generator.sample(BOXES, 1):
                        result.append(
                            (box.replace("%s", form), generator.choice(LABELS).replace("%s", answer.label), score)
                        )
            # Both directions: the form as the label, the label as the answer.
            for form in answer.right:
                result.append((generator.choice(BOXES).replace("%s", answer.label), form, 1.0))
    return result
