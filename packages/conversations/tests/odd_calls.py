"""Arguments of calls that a reader may take for something else: other types, tags of every form, odd strings."""

from typing import Any

PROPERTIES = {
    **{"s": {"type": "string"}, "t": {"type": "string"}, "n": {"type": "integer"}, "f": {"type": "number"}},
    **{"b": {"type": "boolean"}, "l": {"type": "array"}, "o": {"type": "object"}, "z": {"type": ["string", "null"]}},
    **{"enum": {"enum": ["1", "2"]}, "ref": {"$ref": "#/$defs/Zip"}, "all": {"allOf": [{"$ref": "#/$defs/Zip"}]}},
    **{"const": {"const": "12"}, "optional": {"anyOf": [{"$ref": "#/$defs/Zip"}, {"type": "null"}]}},
}
SCHEMA = {"type": "object", "properties": PROPERTIES, "$defs": {"Zip": {"type": "string", "enum": ["12", "true"]}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "d", "parameters": SCHEMA}}]
STRINGS = [
    *(
        "",
        "x",
        "12",
        "true",
        "null",
        "None",
        "True",
        "[1]",
        '{"a": 1}',
        '"x"',
        "-0",
        "1e5",
        "1.0",
        "\\n",
        "'",
        "{",
        "}",
    ),
    *(" lead", "trail ", "\nlead", "trail\n", "\n", "\n\na\n\n", "a\r\nb", "\t", "\x00", "\u2028", "ü 日本", "\u00a0x"),
    *(
        "<think>",
        "</think>",
        "a <think> b </think> c",
        "<tool_call>",
        "</tool_call>",
        "<b>&amp;</b>",
        "```json\n{}\n```",
    ),
    *("<parameter=s>", "</parameter>", "</parameter> and <parameter=s>", "<parameter=other>", "</function>"),
    *("<function=add>", "<arg_key>s</arg_key>", "</arg_value>", "[TOOL_CALLS]", "<|python_tag|>", "</invoke>", "; "),
    *("<|im_end|>", '<tool_call>{"name": "add", "arguments": {}}</tool_call>', "def f():\n    return 1\n"),
]
ARGUMENTS: list[dict[str, Any]] = [
    *({"s": text} for text in STRINGS),
    *({}, {"n": -3}, {"f": 1e-7}, {"f": 3}, {"b": True}, {"b": False}, {"z": None}, {"z": "x"}, {"l": []}, {"o": {}}),
    *({"l": ["a", 1, None, {"b": True}]}, {"o": {"a": {"b": [1, "</think>"]}}}, {"s": "x\n", "t": "\ny"}),
    *({"enum": "1"}, {"ref": "12"}, {"all": "true"}, {"const": "12"}, {"optional": "12"}, {"optional": None}),
    {"s": "12", "n": 12, "b": True, "l": [1, 2], "o": {"q": "r"}, "z": None},
]
