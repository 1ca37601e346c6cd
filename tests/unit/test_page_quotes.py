"""Messages and output that pages quote are those that the code prints."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from source_folders import PYTHON_FILES
from tests.unit.test_doc_blocks import PAGES, ROOT

FOREIGN = {
    "Fp8LinearMethod on CPU requires that CPU has AMX support",  # SGLang
    "Failed to initialize NumPy",  # torch
    "Unable to load rng state from checkpoint",  # Megatron-LM
    "could not find the metadata file",  # Megatron-LM
    "scontrol show node",
    "vllm serve runs/mine/hf",
}
"""Quoted words of other programs."""
FORMULA = re.compile(r"[_=*^{}\[\]<>\\|−→]|--|\w\(")
COMMAND = re.compile(r"\.?/?(megatron-dppo|make|python|torchrun|pip|uv|sbatch|git|tests?|tools|launch|-m)\b|[A-Z_]+=")
PLACEHOLDER = re.compile(r"…|\.\.\.|\S*://\S*|\S*/\S*|\b[A-Z]{3,}\b|\b[A-Zn]\b|[\d.]+|[,;:()'\"] ?| - ")
"""Stands on a page for a value: an ellipsis, a path, a name in capitals, N, M or n, any number.

Messages are also joined from parts at punctuation.
"""
VALUE = "\0"
"""Stands in a template for a value that the code fills in."""


@cache
def templates() -> str:
    """All string literals of the package, its tests' programs and the launch scripts, one a line; blanks are single."""
    texts = [path.read_text("utf-8") for path in ROOT.glob("launch/*.sh")]
    for path in (*PYTHON_FILES, *sorted((ROOT / "tests/faults").rglob("*.py"))):
        texts += _literals(path)
    return "\n".join(" ".join(text.split()) for text in texts)


def _literals(path: Path) -> list[str]:
    result = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.JoinedStr):
            result.append("".join(str(v.value) if isinstance(v, ast.Constant) else VALUE for v in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            result.append(node.value)
    return result


def quotes(text: str) -> list[str]:
    """Inline code of three words and more that is neither a command nor a setting nor a formula."""
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.S | re.M)
    result = [" ".join(quote.split()) for quote in re.findall(r"`([^`]+)`", text)]
    return [
        quote
        for quote in result
        if len(re.findall(r"[A-Za-z]{2,}", quote)) >= 3 and not FORMULA.search(quote) and not COMMAND.match(quote)
    ]


def is_printed(quote: str) -> bool:
    """Return True if the words between the values of a quoted message stand so in the code.

    A word of the quote may be one that the code fills in, and the first may be the label of a line, printed apart.
    """
    fragments = [part.split() for part in PLACEHOLDER.split(quote)]
    return all(_stands(words) or _stands(words[1:]) or _is_joined(words) for words in fragments if len(words) > 1)


def _is_joined(words: list[str]) -> bool:
    """Return True if two messages of three words and more, one put into the other, are the fragment."""
    return any(_stands(words[:i]) and _stands(words[i:]) for i in range(3, len(words) - 2))


def _stands(words: list[str]) -> bool:
    if len(words) < 2:
        return True
    pattern = " ".join(rf"(?:{re.escape(word)}|[^\s\w]*{VALUE}[^\s\w]*)" for word in words)
    matches = re.finditer(rf"(?<!\w){pattern}(?!\w)", templates())
    return any(match.group().count(VALUE) <= len(words) // 3 for match in matches)


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_quoted_messages_are_those_of_the_code(page: Path) -> None:
    wrong = [quote for quote in quotes(page.read_text("utf-8")) if quote not in FOREIGN and not is_printed(quote)]
    assert not wrong


def test_quotes_are_looked_at_and_a_wrong_one_shows() -> None:
    count = sum(len(quotes(page.read_text("utf-8"))) for page in PAGES)
    assert count > 60
    assert is_printed("URL is not used any more: it does not respond")
    assert not is_printed("URL is no longer used: it does not respond")
    assert not is_printed("rank n is stopped or stuck")
