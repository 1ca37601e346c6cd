"""Values without quotes have the type of their JSON schema, wherever the schema says it."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_dppo_conversations.formats import FORMATS

TREE = {"$ref": "#/$defs/Tree"}
DEFINITIONS = {
    "Zip": {"type": "string", "enum": ["03106", "12", "true"]},
    "Alias": {"$ref": "#/$defs/Zip"},
    "a/b~c": {"type": "string"},
    "Count": {"type": "integer"},
    "Loop": {"$ref": "#/$defs/Loop"},
    "Tree": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"$ref": "#/$defs/Tree"}}, TREE]},
    **{f"Deep{index}": {"$ref": f"#/$defs/Deep{index + 1}"} for index in range(5000)},
    **{f"Wide{index}": {"allOf": [{"$ref": f"#/$defs/Wide{index + 1}"}] * 8} for index in range(20)},
    "Wide20": {"type": "string"},
}  # fmt: skip
# Schema of a parameter, its text, and the value.
CASES: list[tuple[Any, str, Any]] = [
    ({"type": "string"}, "12", "12"),
    ({"$ref": "#/$defs/Zip"}, "12", "12"),
    ({"$ref": "#/$defs/Alias"}, "true", "true"),
    ({"$ref": "#/$defs/a~1b~0c"}, "12", "12"),
    ({"$ref": "#/$defs/Count"}, "12", 12),
    ({"allOf": [{"$ref": "#/$defs/Zip"}], "description": "x"}, "12", "12"),
    ({"allOf": [{"description": "x"}, {"type": ["string", "integer"]}, {"type": ["string", "null"]}]}, "12", "12"),
    ({"anyOf": [{"$ref": "#/$defs/Zip"}, {"type": "null"}]}, "12", "12"),
    ({"anyOf": [{"$ref": "#/$defs/Zip"}, {"type": "null"}]}, "null", None),
    ({"anyOf": [{"$ref": "#/$defs/Zip"}, {"type": "null"}]}, "None", None),
    ({"oneOf": [{"$ref": "#/$defs/Alias"}, {"type": "object"}]}, "12", "12"),
    ({"anyOf": [{"type": "array"}, {"type": "null"}]}, "[1]", [1]),
    ({"enum": ["12", "13"]}, "12", "12"),
    ({"enum": ["1", 2, None, True]}, "1", "1"),
    ({"enum": ["1", 2, None, True]}, "2", 2),
    ({"enum": ["1", 2, None, True]}, "null", None),
    ({"enum": ["1", 2, None, True]}, "true", True),
    ({"enum": ["a", "b"]}, "12", "12"),
    ({"enum": [1, 2]}, "3", 3),
    ({"const": "12"}, "12", "12"),
    ({"const": None}, "null", None),
    ({"const": 5}, "5", 5),
    ({"type": ["string", "object"]}, "12", "12"),
    ({"type": ["string", "object"]}, '{"a": 1}', {"a": 1}),
    ({"type": ["string", "integer"]}, "12", 12),
    ({"type": ["string", "null"]}, '"x"', '"x"'),
    ({"type": "integer"}, "2.0", 2.0),
    ({"type": "integer"}, "many", "many"),
    ({"type": "number"}, "2", 2),
    ({"type": "boolean"}, "True", True),
    ({"type": "string"}, "True", "True"),
    ({"$ref": "#/$defs/Tree"}, "12", "12"),
    ({"$ref": "#/$defs/Tree"}, "[1]", [1]),
    ({"$ref": "#/$defs/Loop"}, "12", 12),
    ({"$ref": "#/$defs/Missing"}, "12", 12),
    ({"$ref": "https://elsewhere/schema.json"}, "12", 12),
    ({"anyOf": [{"type": "string"}, {}]}, "12", 12),
    ({"$ref": "#/$defs/Deep0"}, "12", 12),
    ({"$ref": "#/$defs/Wide0"}, "12", "12"),
    ({"$defs": {"Own": {"type": "string"}}, "$ref": "#/$defs/Own"}, "12", "12"),
    ({"pattern": "^[0-9]{2}$"}, "12", "12"),
    ({"maxLength": 5}, "null", "null"),
    ({"anyOf": [{"minLength": 1}, {"type": "null"}]}, "12", "12"),
    ({"anyOf": [{"minLength": 1}, {"type": "null"}]}, "null", None),
    ({"anyOf": [{"pattern": "^a"}, {"minimum": 1}]}, "12", 12),
    ({"type": "integer", "maxLength": 5}, "12", 12),
    (True, "12", 12),
    ({}, "12", 12),
    ({"type": 7, "enum": "x", "anyOf": 3, "$ref": 5}, "12", 12),
]
FORMS = {
    "qwen3_xml": "<tool_call>\n<function=send>\n<parameter=v>\n{}\n</parameter>\n</function>\n</tool_call>",
    "glm": "<tool_call>send\n<arg_key>v</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
    "minimax": '<minimax:tool_call>\n<invoke name="send">\n<parameter name="v">{}</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
}


def read(form: str, text: str, parameters: Any) -> Any:
    tools = [{"type": "function", "function": {"name": "send", "parameters": parameters}}]
    (call,) = FORMATS[form].parse(FORMS[form].replace("{}", text), tools).tool_calls
    return call["function"]["arguments"]["v"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("schema", "text", "expected"), CASES, ids=range(len(CASES)))
def test_a_value_has_the_type_of_its_schema(form: str, schema: Any, text: str, expected: Any) -> None:
    value = read(form, text, {"type": "object", "$defs": DEFINITIONS, "properties": {"v": schema}})
    assert value == expected and type(value) is type(expected)


@pytest.mark.parametrize(
    ("text", "calls", "malformed"),
    [
        ("<function=send>\n<parameter=v>\nx\n</parameter>\n</function>", 1, 0),
        ("<function=send>\n<parameter=v>\nx", 0, 1),
        ("<tool_call>\n<function=send>\n<parameter=v>\nx", 0, 1),
        ("<tool_call><function=send></function>", 0, 1),
        ("<tool_call>\n<function=send>\n<parameter=v> and <function=send>\n<parameter=v>", 0, 2),
        ("<tool_call>\n<function=send>\n<tool_call>\n<function=send>", 0, 2),
        ("It is written <function=NAME>, or <function=send_all></function>", 0, 0),
    ],
)
def test_each_call_that_is_cut_off_counts_once(text: str, calls: int, malformed: int) -> None:
    tools = [{"type": "function", "function": {"name": "send", "parameters": {}}}]
    parsed = FORMATS["qwen3_xml"].parse(text, tools)
    assert (len(parsed.tool_calls), parsed.num_malformed) == (calls, malformed)


TEXT = {"v": {"type": "string"}}


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": TEXT},
        {"$ref": "#/$defs/Arguments", "$defs": {"Arguments": {"properties": TEXT}}},
        {"allOf": [{"properties": {"other": {}}}, {"properties": TEXT}]},
        {"anyOf": [{"$ref": "#/definitions/A"}], "definitions": {"A": {"properties": TEXT}}},
        {"additionalProperties": {"type": "string"}},
        {"additionalProperties": {"type": "integer"}, "allOf": [{"properties": TEXT}]},
    ],
)
def test_parameters_are_looked_up_wherever_the_schema_names_them(parameters: Any) -> None:
    assert read("qwen3_xml", "12", parameters) == "12"


@pytest.mark.parametrize("parameters", [None, {}, {"properties": 5}, {"properties": {"v": None}}, "x", {"$ref": "#"}])
def test_a_schema_that_says_nothing_leaves_json_or_text(parameters: Any) -> None:
    assert read("glm", "12", parameters) == 12
    assert read("glm", "twelve", parameters) == "twelve"
