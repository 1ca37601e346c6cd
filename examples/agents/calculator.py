"""An ordinary agent: a loop with a tool, written with the openai package. It contains no training code.

pip install openai
OPENAI_BASE_URL=... OPENAI_API_KEY=... python calculator.py < task.json
"""

from __future__ import annotations

import ast
import json
import operator
import sys
from typing import Any

from openai import OpenAI

MAX_TURNS = 6
_LARGEST = 10**12
_OPERATORS: dict[type, Any] = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "The value of an expression of whole numbers with +, - and *.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


def calculate(expression: str) -> str:
    """Return the value of the expression, or an error text. Nothing is executed as Python."""

    def value(node: ast.AST) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            result = node.value
        elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            result = _OPERATORS[type(node.op)](value(node.left), value(node.right))
        else:
            raise ValueError(f"not supported: {type(node).__name__}")
        if abs(result) > _LARGEST:
            raise ValueError(f"above {_LARGEST}")
        return result

    try:
        return str(value(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"error: {error}"


def main() -> None:
    """Play one episode; the reward function gets the text of the whole conversation."""
    task = json.load(sys.stdin)
    client = OpenAI()
    messages: list[Any] = [
        {"role": "system", "content": "Solve the problem with the tool. Put the final answer in \\boxed{}."},
        *task["messages"],
    ]
    for _ in range(MAX_TURNS):
        message = client.chat.completions.create(model="policy", messages=messages, tools=[TOOL]).choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return
        for call in message.tool_calls:
            result = calculate(str(json.loads(call.function.arguments).get("expression", "")))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


if __name__ == "__main__":
    main()
