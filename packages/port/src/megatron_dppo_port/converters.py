"""Parsers of values as hydra, YAML, TOML and argparse write them."""

import ast
import math
import re
from collections.abc import Sequence
from itertools import chain, count
from pathlib import PurePath
from typing import Any

from megatron_dppo.source_names import name_sources


def is_null(value: Any) -> bool:
    """Return True for hydra's and YAML's spellings of null."""
    return isinstance(value, str) and value.strip().strip("'\"") in ("null", "None", "~", "???")


def flag(value: Any) -> bool:
    """Parse a boolean of hydra, YAML or argparse. A flag without a value is true."""
    if value == []:
        return True
    return {"true": True, "false": False, "1": True, "0": False}[text(value).lower()]


def text(value: Any) -> str:
    """Return a string without hydra's inner quotes. A list must have one entry, and the string a character."""
    if isinstance(value, list):
        (value,) = value
    string = str(value).strip().strip("'\"")
    if not string:
        raise ValueError("an empty string")
    return string


def number(value: Any) -> float:
    """Parse a finite float."""
    parsed = float(text(value))
    if not math.isfinite(parsed):
        raise ValueError(value)
    return parsed


def nonzero(value: Any) -> float | None:
    """Parse a finite float. None for 0, which changes nothing."""
    return number(value) or None


def integer(value: Any) -> int:
    """Parse an integer, also ``1e3``."""
    parsed = number(value)
    if parsed != int(parsed):
        raise ValueError(value)
    return int(parsed)


def filter_size(value: Any) -> int:
    """Parse top-k. Other stacks have -1 for no filter, and this package 0."""
    return max(0, integer(value))


def items(value: Any) -> list[str]:
    """Parse hydra's lists ``[a,b]`` and ``['a','b']``. A string is a list of one."""
    if isinstance(value, list):
        return [text(part) for part in value]
    inside = str(value).strip()
    if not inside.startswith("["):
        return [text(inside)]
    try:
        return [text(part) for part in ast.literal_eval(inside)]
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return [text(part) for part in inside.strip("[]").split(",") if part.strip()]


def one_or_list(value: Any) -> str | list[str]:
    """Parse a string or a list, as for ``data.train``."""
    parsed = items(value)
    if not parsed:
        raise ValueError("an empty list")
    return parsed[0] if len(parsed) == 1 else parsed


def name_files(files: Sequence[str]) -> dict[str, str]:
    """Return files by names of sets: the name of the file without its ending, and folders where several share it.

    Example:
        >>> name_files(["/d/gsm8k/test.parquet", "/d/math/test.parquet", "/d/aime.parquet"])
        {'gsm8k_test': '/d/gsm8k/test.parquet', 'math_test': '/d/math/test.parquet', 'aime': '/d/aime.parquet'}
    """
    named: dict[str, str] = {}
    for file, ending in name_sources(files).items():
        *folders, last = PurePath(ending).parts or ("",)
        name = re.sub(r"[^A-Za-z0-9_.-]+", "_", "_".join((*folders, PurePath(last).stem))).strip("_") or "file"
        # A number is left for names that differ only in their ending or in characters that a set cannot have.
        numbered = (f"{name}_{i}" for i in count(2))
        named[next(each for each in chain([name], numbered) if each not in named)] = file
    return named


def literal(value: Any) -> Any:
    """Parse a number, a boolean or text."""
    string = text(value)
    for convert in (integer, number):
        try:
            return convert(string)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(string.lower(), string)
