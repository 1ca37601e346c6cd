"""A policy with a calculator: it writes ``<calc>12*(3+4)</calc>``, the result is put behind it, and it goes on.

[rollout]
generate = "examples/calculator/generate.py:generate"
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from typing import Any

MAX_CALLS = 4
_LARGEST = 10**12
_CALL = re.compile(r"<calc>([^<]{1,200})</calc>\s*$")
_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


async def generate(prompt: Any, turns: Any) -> Any:
    """Sample, append the result of each calculation, and stop after a turn without one."""
    close = _last_token(turns.tokenizer, "</calc>")
    for _ in range(MAX_CALLS):
        start = len(turns.token_ids)
        turn = await turns.sample(stop_token_ids=[close])
        # The closing token may also occur outside a call: then the same turn continues.
        while turn.finish_reason == "stop" and turn.token_ids[-1] == close and not _call(turns, start):
            turn = await turns.sample(stop_token_ids=[close])
        expression = _call(turns, start)
        if expression is None or turn.finish_reason == "length":
            return turns.finish()
        turns.append(f" = {answer(expression)}\n")
    await turns.sample()
    return turns.finish()


def answer(expression: str) -> str:
    """Return the value of an arithmetic expression, or ``error``. Nothing is executed as Python."""
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return "error"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _value(node: ast.AST) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value = node.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = -_value(node.operand)
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        value = _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    else:
        raise ValueError(f"not arithmetic: {type(node).__name__}")
    if not abs(value) <= _LARGEST:
        raise ValueError(f"above {_LARGEST}")
    return value


def _call(turns: Any, start: int) -> str | None:
    """Return the calculation that ends the tokens from ``start`` on, or None."""
    text = turns.tokenizer.decode(turns.token_ids[start:], skip_special_tokens=True)
    match = _CALL.search(text)
    return match[1] if match else None


def _last_token(tokenizer: Any, text: str) -> int:
    return int(tokenizer.encode(text, add_special_tokens=False)[-1])
