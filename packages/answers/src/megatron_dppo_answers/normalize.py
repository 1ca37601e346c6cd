r"""One normal form for the text of answers and of labels: the same formula, however it is set.

Only what has no meaning goes away: math delimiters, fonts, sizes, spaces, Markdown, a full stop at the end. Signs and
words with a meaning stay, so that equal text means equal answers.
"""

import re

_MAX_LENGTH = 4000
"""Longest text in characters whose commands are read. In a longer one only delimiters and a full stop go away."""
_MAX_DEPTH = 40
"""Levels of nested commands that are read; responses are untrusted, and reading recurses."""

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_UNICODE = {
    **dict.fromkeys("−–—‒﹣－", "-"),
    **dict.fromkeys("×✕⨯", r"\times "),
    **dict.fromkeys("·⋅∙", r"\cdot "),
    **dict.fromkeys("\u00a0\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u3000", " "),
    **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff", ""),
    "÷": r"\div ", "∕": "/", "⁄": "/", "√": r"\sqrt ", "∛": r"\sqrt[3]", "∞": r"\infty ", "°": r"^\circ ",
    "º": r"^\circ ",
    "≤": r"\le ", "⩽": r"\le ", "≥": r"\ge ", "⩾": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "±": r"\pm ", "∓": r"\mp ",
    "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}",
    "＝": "=", "：": ":", "，": ",", "；": ";", "（": "(", "）": ")", "。": ".", "％": "%", "′": "'", "’": "'",
    "∣": "|",
    "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
    "⅕": r"\frac{1}{5}", "⅖": r"\frac{2}{5}", "⅗": r"\frac{3}{5}", "⅘": r"\frac{4}{5}", "⅙": r"\frac{1}{6}",
    "⅚": r"\frac{5}{6}", "⅛": r"\frac{1}{8}", "⅜": r"\frac{3}{8}", "⅝": r"\frac{5}{8}", "⅞": r"\frac{7}{8}",
    "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "δ": r"\delta ", "ε": r"\epsilon ", "θ": r"\theta ",
    "λ": r"\lambda ", "μ": r"\mu ", "π": r"\pi ", "ρ": r"\rho ", "σ": r"\sigma ", "τ": r"\tau ", "φ": r"\phi ",
    "ω": r"\omega ", "Δ": r"\Delta ", "Ω": r"\Omega ", "¢": r"\text{cent}", "€": r"\text{euro}", "£": r"\text{pound}",
    "¥": r"\text{yen}",
}  # fmt: skip
_SUPERSCRIPT_RUN = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ]+")
_SUBSCRIPT_RUN = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_UNICODE_SIGN = re.compile("|".join(map(re.escape, _UNICODE)))

_RENAMED = {
    **dict.fromkeys(("dfrac", "tfrac", "cfrac", "nicefrac", "sfrac"), r"\frac"),
    **dict.fromkeys(("dbinom", "tbinom"), r"\binom"),
    **dict.fromkeys(("leq", "leqslant", "leqq"), r"\le"),
    **dict.fromkeys(("geq", "geqslant", "geqq"), r"\ge"),
    **dict.fromkeys(("textdegree", "degree", "degrees"), r"^\circ"),
    **dict.fromkeys(("varnothing",), r"\emptyset"),
    **dict.fromkeys(("lvert", "rvert", "vert", "mid"), "|"),
    **dict.fromkeys(("lbrace",), r"\{"), **dict.fromkeys(("rbrace",), r"\}"),
    "lt": "<", "gt": ">", "neq": r"\ne", "lbrack": "[", "rbrack": "]", "lparen": "(", "rparen": ")", "colon": ":",
    "backslash": r"\setminus", "smallsetminus": r"\setminus", "isin": r"\in", "prime": "'", "R": r"\mathbb{R}",
    "thickapprox": r"\approx", "simeq": r"\approx", "cong": r"\approx", "dots": r"\ldots", "cdots": r"\ldots",
    "epsilon": r"\epsilon", "coloneqq": ":=", "union": r"\cup", "bold": "",
    "euro": r"\text{euro}", "pounds": r"\text{pound}", "yen": r"\text{yen}",
}  # fmt: skip
_WITHOUT_MEANING = frozenset((
    "left", "right", "middle", "big", "Big", "bigg", "Bigg", "bigl", "bigr", "Bigl", "Bigr", "biggl", "biggr",
    "Biggl", "Biggr", "bigm", "displaystyle", "textstyle", "scriptstyle", "limits", "nolimits", "quad", "qquad",
    "thinspace", "space", "hfill", "enspace", "nonumber", "notag", "rm", "bf", "it", "boldmath", "large", "Large",
    "LARGE", "huge", "Huge", "small", "normalsize", "par", "newline", "noindent", "centering", "allowbreak", "strut",
    "negthinspace", "ensuremath",
))  # fmt: skip
_FONTS = frozenset((
    "boldsymbol", "mathbf", "bm", "mathit", "mathsf", "mathtt", "mathcal", "pmb", "mathnormal", "underline", "boxed",
    "fbox", "framebox", "emph", "cancel", "mathop", "operatorname", "operatorname*", "ensuremath", "overset",
))  # fmt: skip
_TEXTS = frozenset((
    "text", "textbf", "textrm", "textit", "texttt", "textsf", "textnormal", "mbox", "hbox", "mathrm", "textup",
    "textsc",
))  # fmt: skip
_DROPPED = frozenset((
    "phantom", "hphantom", "vphantom", "hspace", "vspace", "tag", "label", "hskip", "color",
))  # fmt: skip
_COLORED = frozenset(("textcolor", "colorbox"))
_COMMAND = re.compile(r"\\([A-Za-z]+\*?|.)", re.DOTALL)
_SPACES = frozenset("!,;:> ")
_DIGITS_APART = re.compile(r"(?<![\d.])(\d{1,3})((?:(?:\{,\}|,?\\!,?|\\[,; ]|~| )\d{3})+)(?![\d/])")
"""A number with signs between its thousands that are no plain comma."""
_MARKUP = " \t\r\n*_`#"
"""Spaces and Markdown around an answer."""
_LEAD = re.compile(r"^(?:(?:=|\\approx|\\therefore|\\text\{[^{}]*(?::|approximately|about)\s*\})\s*)+(?=\S)")
"""Introduction of an answer inside a box."""
_FORMULA_IN_TEXT = re.compile(r"\\(?:text|mbox|textbf)\{\s*\$([^${}]*)\$\s*\}")
_CHOOSE = re.compile(r"\{([^{}]*)\\choose\b([^{}]*)\}")
_SYSTEM = re.compile(r"\\begin\{(?:cases|aligned|gathered)\}([^&]*)\\end\{(?:cases|aligned|gathered)\}")
"""Equations among each other; with ``&`` it is a function by cases."""
_CURRENCY = re.compile(r"\\text\{(euro|pound|yen)\}\s*([-+]?\d[\d.,]*)")
"""A currency before its number, where no other currency but the dollar is read."""
_EXPONENT = re.compile(r"(?<![\w.\\])(\d+(?:\.\d*)?|\.\d+)[eE]\+?(-?\d{1,3})(?![\w.])")
"""A number as programs write it. Digits in another base have a base behind them."""
_CHOICE = re.compile(r"(?:\\text\{\s*)?([A-Za-z])\)(?:\s*\})?")
_BETWEEN_SIGNS = re.compile(r"(?<![0-9.])\s+|\s+(?![0-9.])")


def normalize_answer(text: str) -> str:
    """Return the normal form of an answer or a label; an empty string if nothing is left."""
    text = _from_unicode(re.sub(r"(?<!\\)\\$", "", text.strip().strip(_MARKUP)))
    if len(text) > _MAX_LENGTH:
        return _without_full_stop(text.replace("$", ""))
    text = _FORMULA_IN_TEXT.sub(r"\1", text)
    # Before the commands, among which ``\(`` would count.
    text = _without_delimiters(text)
    text = _DIGITS_APART.sub(lambda match: match[1] + re.sub(r"\D", "", match[2]), text)
    text = _plain_commands(text, 0)
    text = _CHOOSE.sub(r"\\binom{\1}{\2}", text)
    text = _SYSTEM.sub(lambda match: match[1].replace(r"\\", ", "), text)
    text = text.replace("{,}", ",").replace("{:}", ":").replace("^{\\circ}", "^\\circ").replace("{}^\\circ", "^\\circ")
    text = re.sub(r"\^\s*\\circ", r"^\\circ", text)
    text = re.sub(r"\^\s*(?:\{\s*('+)\s*\}|('+))", r"\1\2", text)
    text = _CURRENCY.sub(r"\2 \\text{\1}", text)
    if "base" not in text:
        text = _EXPONENT.sub(r"\1\\times 10^{\2}", text)
    text = _LEAD.sub("", _without_full_stop(re.sub(r"\s+", " ", text)))
    choice = _CHOICE.fullmatch(text)
    return text if choice is None else choice[1]


def comparison_text(normalized: str) -> str:
    """Return the text by which two normal forms are equal at once: spaces count only between numbers."""
    text = _BETWEEN_SIGNS.sub("", normalized)
    return re.sub(r"([_^]|\\pmod)\{(\w)\}", r"\1\2", text)


def _from_unicode(text: str) -> str:
    if text.isascii():
        return text
    text = _SUPERSCRIPT_RUN.sub(lambda match: f"^{{{match[0].translate(_SUPERSCRIPTS)}}}", text)
    text = _SUBSCRIPT_RUN.sub(lambda match: f"_{{{match[0].translate(_SUBSCRIPTS)}}}", text)
    return _UNICODE_SIGN.sub(lambda match: _UNICODE[match[0]], text)


def _without_delimiters(text: str) -> str:
    r"""Remove ``$``, ``\(``, ``\[``. One ``$`` alone before a number is the currency."""
    text = re.sub(r"\\[()]|\\[\[\]]", lambda match: "" if _is_delimiter(match) else match[0], text)
    bare = re.findall(r"(?<!\\)\$", text)
    if len(bare) == 1 and re.match(r"-?\$\s*[\d.]", text):
        return text.replace("$", r"\$")
    return re.sub(r"(?<!\\)\$", " ", text)


def _is_delimiter(match: re.Match[str]) -> bool:
    # In "\\[4pt]" and "\\(" the backslash belongs to a line break.
    return not match.string[: match.start()].endswith("\\")


def _plain_commands(text: str, depth: int) -> str:
    """Return the text with commands of one meaning written in one way."""
    if depth > _MAX_DEPTH:
        return text
    parts: list[str] = []
    position = 0
    while match := _COMMAND.search(text, position):
        parts.append(text[position : match.start()])
        position = match.end()
        name = match[1]
        if name == "\\":
            parts.append(r"\\")
        elif name in _SPACES:
            parts.append(" ")
        # Escaped signs, such as "\%".
        elif name in "%#&_" and len(name) == 1:
            parts.append(name)
        elif name in _WITHOUT_MEANING:
            # "\left." and "\right." print nothing.
            position += name in ("left", "right", "middle") and text.startswith(".", position)
            parts.append(" ")
        elif name in _FONTS or name in _TEXTS or name in _DROPPED or name in _COLORED:
            content, position = _argument(text, position)
            if name in _COLORED:
                content, position = _argument(text, position)
            if name in _TEXTS:
                # An upright letter is a symbol, unless it is the unit m, g, s, h or L.
                is_symbol = (
                    name == "mathrm" and re.fullmatch(r"\s*[A-Za-z]\s*", content) and content.strip() not in "mgshL"
                )
                parts.append(content.strip() if is_symbol else _text(content, depth))
            elif name not in _DROPPED:
                inner = _plain_commands(content, depth + 1)
                parts.append(f"\\{inner}" if name.startswith("operatorname") else f" {inner} ")
        else:
            renamed = _RENAMED.get(name)
            parts.append(match[0] if renamed is None else renamed + (" " if renamed[-1:].isalpha() else ""))
    parts.append(text[position:])
    return "".join(parts).replace("~", " ")


def _text(content: str, depth: int) -> str:
    r"""Return words as ``\text{...}``, but formulas that were only set upright as themselves."""
    inner = _plain_commands(content, depth + 1).strip()
    if re.fullmatch(r"[-+]?[\d.,\s/]+|[-+]?\d+\s*%", inner):
        return inner
    if re.fullmatch(r"\\text\{[^{}]*\}", inner):
        return inner
    if inner.casefold() == "infinity":
        return r"\infty "
    # "5 cm" set upright: the number comes out, the unit stays inside.
    if match := re.fullmatch(r"([-+]?[\d.,/]*\d)\s*([^\d:]*[A-Za-z][^\d:]*)", inner):
        return f"{match[1]} \\text{{{match[2].strip()}}}"
    return f"\\text{{{inner}}}" if inner else " "


def _argument(text: str, position: int) -> tuple[str, int]:
    """Return the argument at a position, a group or one sign, and the position after it."""
    while position < len(text) and text[position].isspace():
        position += 1
    if not text.startswith("{", position):
        match = _COMMAND.match(text, position)
        end = match.end() if match else position + 1
        return text[position:end], end
    depth = 0
    for index in range(position, len(text)):
        escaped = text[index - 1] == "\\"
        depth += (text[index] == "{" and not escaped) - (text[index] == "}" and not escaped)
        if depth == 0:
            return text[position + 1 : index], index + 1
    return text[position + 1 :], len(text)


def _without_full_stop(text: str) -> str:
    text = text.strip(_MARKUP)
    while True:
        # Until nothing changes: a full stop may stand inside braces that stand inside bold text.
        shorter = _strip_punctuation(text).strip(_MARKUP)
        if shorter.endswith("}") and not shorter.endswith("\\}"):  # "\text{Evelyn.}"
            shorter = shorter[:-1].rstrip(" .,;:") + "}"
        is_group = len(shorter) <= _MAX_LENGTH and shorter.startswith("{") and shorter.endswith("}")
        if is_group and _argument(shorter, 0)[1] == len(shorter):
            shorter = shorter[1:-1].strip()
        if shorter == text:
            return text
        text = shorter


def _strip_punctuation(text: str) -> str:
    """Return the text without punctuation at its end, but with an ellipsis, which says that a decimal goes on."""
    shorter = text.rstrip(",;: \t\n")
    if shorter.endswith("\\"):  # what follows a backslash belongs to a command
        return text
    if shorter.endswith(".") and not shorter.endswith(("..", "\\.")):
        shorter = shorter[:-1]
    return shorter
