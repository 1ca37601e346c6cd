"""Texts of models, data and servers as they may go to a terminal."""

_CONTROLS = [code for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"]
_BIDI = [0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
"""Marks that change the direction of the text after them, so that it reads as something else."""
_INVISIBLE = [0x00AD, 0x200B, 0x2028, 0x2029, 0x2060, 0xFEFF]
_ESCAPES = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in (*_CONTROLS, *_BIDI, *_INVISIBLE)}
_LINE_ESCAPES = {**_ESCAPES, ord("\n"): "\\n", ord("\t"): "\\t"}
_TOML_ESCAPES = {code: f"\\u{code:04x}" for code in _ESCAPES}


def printable(text: str) -> str:
    r"""Return a text whose control characters and marks of direction are shown as escapes; newline and tab stay.

    Example:
        >>> print(printable("\x1b[2Jred"))
        \x1b[2Jred
    """
    return text.translate(_ESCAPES)


def printable_line(text: str) -> str:
    r"""Return a text as one line: line breaks and tabs are escapes, too.

    Example:
        >>> print(printable_line("a\nb"))
        a\nb
    """
    return text.translate(_LINE_ESCAPES)


def printable_toml(text: str) -> str:
    r"""Return a TOML document that means the same, with TOML's own escapes. Such characters may be in strings alone."""
    return text.translate(_TOML_ESCAPES)
