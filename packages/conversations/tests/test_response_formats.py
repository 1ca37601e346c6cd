"""Formats of model families: responses written by hand as each family's template writes them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatron_dppo_conversations.formats import FORMATS, choose_format, format_note

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "tags": {"type": "array"},
        "exact": {"type": "boolean"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("weather", "now")]
ARGUMENTS = {"city": "12", "days": 3, "tags": ["a", {"b": 1}], "exact": True, "note": None}
TEXT = json.dumps(ARGUMENTS)
VALUES = {"city": "12", "days": "3", "tags": '["a", {"b": 1}]', "exact": "true", "note": "null"}


def parameters(form: str) -> str:
    return "".join(form.format(key=key, value=value) for key, value in VALUES.items())


# Two calls, weather with arguments and now without, as the template of each family writes them.
CALLS = {
    "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {TEXT}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "qwen3_xml": "<tool_call>\n<function=weather>\n"
    + parameters("<parameter={key}>\n{value}\n</parameter>\n")
    + "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "glm": "<tool_call>weather\n"
    + parameters("<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n")
    + "</tool_call>\n<tool_call>now\n</tool_call>",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    + TEXT
    + "\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_xml": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
    + "".join(
        f'<｜DSML｜parameter name="{key}" string="{str(key == "city").lower()}">{value}</｜DSML｜parameter>\n'
        for key, value in VALUES.items()
    )
    + '</｜DSML｜invoke>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    + TEXT
    + "<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
    "<|tool_calls_section_end|>",
    "minimax": '<minimax:tool_call>\n<invoke name="weather">\n'
    + parameters('<parameter name="{key}">{value}</parameter>\n')
    + '</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
    "llama": f'{{"name": "weather", "parameters": {TEXT}}}; {{"name": "now", "parameters": {{}}}}',
    "mistral": f'[TOOL_CALLS][{{"name": "weather", "arguments": {TEXT}}}, {{"name": "now", "arguments": {{}}}}]',
    "gpt_oss": f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{TEXT}<|call|>"
    "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
}
# A call that is cut off, or broken in its middle.
BROKEN = {name: [text[: len(text) * 2 // 5], text[:-4]] for name, text in CALLS.items() if name != "llama"}
BROKEN["qwen3_xml"].append("<tool_call>\n<func")
BROKEN["hermes"].append("<tool_call>\n<func")
BROKEN["minimax"].append(CALLS["minimax"].replace("3</parameter>\n", "3</parameter>\nx", 1))
BROKEN["gpt_oss"] = [CALLS["gpt_oss"].replace("{}<|call|>", "{<|call|>"), CALLS["gpt_oss"].removesuffix("<|call|>")]
BROKEN["mistral"] = [CALLS["mistral"][:-20], CALLS["mistral"][:-1]]
BROKEN["llama"] = [f"<|python_tag|>{CALLS['llama'][:-4]}", CALLS["llama"][:-4]]
for each in ("hermes", "deepseek", "kimi", "mistral", "gpt_oss"):
    # One key twice: its reader would have to guess which value is meant.
    BROKEN[each].append(CALLS[each].replace(TEXT, TEXT.replace('"days": 3', '"days": 3, "city": "x"')))
TAGS = {name: ("<think>", "</think>") for name in CALLS} | {"mistral": ("[THINK]", "[/THINK]")}


def calls_made(calls: Any) -> list[tuple[str, Any]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def thought(name: str, text: str) -> str:
    if name == "gpt_oss":
        return f"<|channel|>analysis<|message|>{text}<|end|><|start|>assistant"
    return f"{TAGS[name][0]}\n{text}\n{TAGS[name][1]}\n\n"


def said(name: str, text: str) -> str:
    return f"<|channel|>final<|message|>{text}<|return|>" if name == "gpt_oss" else text


@pytest.mark.parametrize("name", CALLS)
def test_thoughts_content_and_typed_calls_of_each_form(name: str) -> None:
    form = FORMATS[name]
    parsed = form.parse(thought(name, "Hm.") + CALLS[name], TOOLS)
    assert calls_made(parsed.tool_calls) == [("weather", ARGUMENTS), ("now", {})], parsed
    assert (parsed.reasoning, parsed.content, parsed.num_malformed) == ("Hm.", "", 0)
    ids = [call["id"] for call in parsed.tool_calls]
    assert ids == (["functions.weather:0", "functions.now:1"] if name == "kimi" else ["", ""])
    # Only given tools are read, and text alone is text.
    assert form.parse(thought(name, "Hm.") + CALLS[name], []).tool_calls == ()
    parsed = form.parse(thought(name, "Hm.") + said(name, "It is 3."), TOOLS)
    assert (parsed.reasoning, parsed.content, parsed.tool_calls) == ("Hm.", "It is 3.", ())
    assert form.parse(said(name, "It is 3."), TOOLS).content == "It is 3."


@pytest.mark.parametrize("name", CALLS)
def test_a_malformed_call_stays_text_and_is_counted(name: str) -> None:
    for broken in BROKEN[name]:
        parsed = FORMATS[name].parse(broken, TOOLS)
        assert parsed.tool_calls == () and parsed.num_malformed >= 1, broken
        assert parsed.text == broken and parsed.content == broken


@pytest.mark.parametrize("name", CALLS)
def test_a_call_in_a_thought_is_not_made(name: str) -> None:
    form = FORMATS[name]
    inside = thought(name, "x" if name == "gpt_oss" else f"I may {CALLS[name]}") + said(name, "No.")
    assert form.parse(inside, TOOLS).tool_calls == () and form.parse(inside, TOOLS).content == "No."
    if name == "gpt_oss":
        return
    opening, closing = TAGS[name]
    # A thought that is cut off, that the prompt has opened, or both.
    for text, opened in ((f"{opening}{CALLS[name]}", False), (CALLS[name], True), (f"{CALLS[name]}{closing}", True)):
        parsed = form.parse(text, TOOLS, starts_in_thought=opened)
        assert parsed.tool_calls == () and parsed.content == "" and parsed.reasoning, text
        assert parsed.num_malformed == 0
    parsed = form.parse(f"{CALLS[name]}{closing}{CALLS[name]}", TOOLS, starts_in_thought=True)
    assert len(parsed.tool_calls) == 2


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("plain ", "", "plain "),
        ("<think>a</think>b", "a", "b"),
        ("<think>\n\na\n</think>\n\nb\n", "a", "b"),
        ("a</think>b", "a", "b"),
        ("<think>a", "a", ""),
        ("<think></think>b", "", "b"),
        ("<think>a</think>b<think>c</think>d", "a\nc", "bd"),
        ("b is <think> here", "", "b is <think> here"),
        ("<think>a</think>b is <think> here", "a", "b is <think> here"),
        ("<think>a</think>b</think>c", "a\nb", "c"),
        ("<think>a <think> b</think>c", "a <think> b", "c"),
        ("", "", ""),
    ],
)
def test_thoughts_are_split_and_splitting_again_changes_nothing(text: str, reasoning: str, content: str) -> None:
    parsed = FORMATS["none"].parse(text, [])
    assert (parsed.reasoning, parsed.content, parsed.text) == (reasoning, content, text)
    # What the program sends back is compared without thoughts, wherever they are.
    for back in (text, parsed.content, parsed.content.strip()):
        assert FORMATS["none"].visible_text(back) == content.strip()


def test_values_without_a_type_in_the_schema_are_json_or_text() -> None:
    free = [{"function": {"name": "f"}}]
    for value, expected in {"3": 3, "x": "x", "[1]": [1], "1e999": "1e999", "True": "True", " a ": " a "}.items():
        text = f"<tool_call><function=f><parameter=v>\n{value}\n</parameter></function></tool_call>"
        assert calls_made(FORMATS["qwen3_xml"].parse(text, free).tool_calls) == [("f", {"v": expected})]
    boolean = [{"function": {"name": "f", "parameters": {"properties": {"v": {"type": "boolean"}}}}}]
    for value, typed in {"True": True, "false": False, "maybe": "maybe"}.items():
        text = f"<tool_call>f<arg_key>v</arg_key><arg_value>{value}</arg_value></tool_call>"
        assert calls_made(FORMATS["glm"].parse(text, boolean).tool_calls) == [("f", {"v": typed})]


def test_a_string_stays_text_whatever_it_looks_like() -> None:
    for value in ("12", "true", "null", "[1]", '{"a": 1}', '"x"'):
        text = f"<tool_call><function=weather><parameter=city>\n{value}\n</parameter></function></tool_call>"
        assert calls_made(FORMATS["qwen3_xml"].parse(text, TOOLS).tool_calls) == [("weather", {"city": value})]


HARMONY_HEADERS = [
    " to=functions.now<|channel|>commentary json",
    "<|channel|>analysis to=functions.now code",
    "<|channel|>analysis to=functions.now <|constrain|>json",
    "<|channel|>commentary to=now <|constrain|>json",
    "<|channel|>final to=now",
    "<|channel|>plan to=functions.now",
    " to=now",
]


NEXT = "<|end|><|start|>assistant"
FINAL = f"{NEXT}<|channel|>final<|message|>5"


@pytest.mark.parametrize("header", HARMONY_HEADERS)
@pytest.mark.parametrize("before", ["", f"<|channel|>analysis<|message|>Hm.{NEXT}", f"Hm.{NEXT}"])
def test_the_recipient_makes_a_call_whatever_the_channel(header: str, before: str) -> None:
    form = FORMATS["gpt_oss"]
    parsed = form.parse(f"{before}{header}<|message|>{{}}<|call|>", TOOLS)
    assert calls_made(parsed.tool_calls) == [("now", {})] and parsed.num_malformed == 0, parsed
    assert (parsed.content, parsed.reasoning) == ("", "Hm." if before else "")
    # A recipient that is no tool is counted, and so is a body that is no object or cut off.
    unknown = header.replace("functions.", "").replace("now", "now.x")
    for text in (f"{unknown}<|message|>{{}}<|call|>", f"{header}<|message|>[]<|call|>", f"{header}<|message|>{{}}"):
        parsed = form.parse(before + text, TOOLS)
        assert (parsed.tool_calls, parsed.num_malformed) == ((), 1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|channel|>final<|message|>5<|return|>", "5"),
        (f"<|channel|>analysis<|message|>4{FINAL}<|return|>", "<think>4</think>5"),
        (f"<|channel|>analysis<|message|>4{NEXT}<|channel|>commentary<|message|>3{FINAL}", "<think>4\n3</think>5"),
        ("<|channel|>analysis<|message|>4", "<think>4</think>"),
        ("<|channel|>plan<|message|>4<|end|>", "<think>4</think>"),
        ("<|channel|>analysis<|message|>4<|channel|>final<|message|>5", "<think>4</think>5"),
        (f"<|channel|>commentary to=functions.now<|message|>{{}}<|call|>{FINAL[7:]}", "<think>{}</think>5"),
        (f" to=now<|channel|>final<|message|>{{}}<|call|>{FINAL[7:]}", "<think>{}</think>5"),
        (f"<|start|>now to=assistant<|channel|>final<|message|>4{FINAL}", "<think>4</think>5"),
        (f"<|channel|>final<|message|>4<|end|><|start|>user<|message|>No.{FINAL}<|return|>", "4<think>No.</think>5"),
        (f"4{FINAL}", "<think>4</think>5"),
        ("5<|return|>", "5"),
        ("5", "5"),
        ("", ""),
    ],
)
def test_rewards_read_the_final_channel_of_gpt_oss(text: str, expected: str) -> None:
    assert FORMATS["gpt_oss"].answer_text(text) == expected
    assert FORMATS["hermes"].answer_text(text) == text


STRINGS = ["a <think> b </think> c", "only </think>", "<|python_tag|>", "}; {", "\n", "</tool_call>"]
THOUGHTS = ["", "<think>\nHm {1}\n</think>\n", "Hm {1}</think>", "<|python_tag|>", "So: <|python_tag|>"]


@pytest.mark.parametrize("string", STRINGS)
@pytest.mark.parametrize("before", THOUGHTS)
def test_strings_in_the_json_of_llama_keep_every_character(string: str, before: str) -> None:
    arguments = {"city": string}
    parsed = FORMATS["llama"].parse(before + json.dumps({"name": "weather", "parameters": arguments}), TOOLS)
    assert calls_made(parsed.tool_calls) == [("weather", arguments)] and parsed.num_malformed == 0
    assert parsed.content == ("So:" if "So" in before else "")


@pytest.mark.parametrize("name", ["qwen3_xml", "glm", "minimax", "deepseek_xml"])
@pytest.mark.parametrize("string", ["\na\n", "\n", " a ", "", "a\n\n", "\r\n"])
def test_line_breaks_at_the_edges_of_a_string_stay(name: str, string: str) -> None:
    before, _, after = CALLS[name].partition("12")
    assert calls_made(FORMATS[name].parse(before + string + after, TOOLS).tool_calls)[0][1]["city"] == string


def test_a_call_of_qwen_without_its_outer_tag_is_made_or_counted() -> None:
    form = FORMATS["qwen3_xml"]
    bare = "<function=now>\n</function>"
    for text in (bare, f"{bare}\n</tool_call>", f"So: {bare}", f"<think>{bare}</think>{bare}"):
        assert calls_made(form.parse(text, TOOLS).tool_calls) == [("now", {})], text
    assert form.parse(bare[:-3], TOOLS).num_malformed == 1
    # Only mentioned: a thought, or no tool of the request.
    for text in (f"<think>{bare}</think>", bare.replace("now", "other")):
        assert (form.parse(text, TOOLS).tool_calls, form.parse(text, TOOLS).num_malformed) == ((), 0)


@pytest.mark.parametrize("key", ["arguments", "parameters", "args"])
@pytest.mark.parametrize("name", ["hermes", "mistral"])
def test_arguments_under_another_name_are_read_or_counted(name: str, key: str) -> None:
    text = CALLS[name].replace('"arguments"', f'"{key}"')
    parsed = FORMATS[name].parse(text, TOOLS)
    if key == "args":
        assert (parsed.tool_calls, parsed.num_malformed > 0) == ((), True)
    else:
        assert calls_made(parsed.tool_calls) == [("weather", ARGUMENTS), ("now", {})]


def test_a_value_may_contain_the_tags_of_its_form() -> None:
    value = "</function> <tool_call> </parameter> </tool_call> <think>"
    text = f"<tool_call><function=weather><parameter=city>\n{value}\n</parameter></function></tool_call>"
    assert calls_made(FORMATS["qwen3_xml"].parse(text, TOOLS).tool_calls) == [("weather", {"city": value})]
    body = json.dumps({"city": CALLS["kimi"]})
    text = CALLS["kimi"].replace(TEXT, body)
    assert calls_made(FORMATS["kimi"].parse(text, TOOLS).tool_calls)[0] == ("weather", {"city": CALLS["kimi"]})


ENDS = {
    "qwen3_xml": "</parameter>\n</function>\n</tool_call>",
    "glm": "</arg_value>\n</tool_call>",
    "minimax": "</parameter>\n</invoke>\n</minimax:tool_call>",
    "deepseek_xml": "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
}
"""The tags with which a call ends, in the forms whose values have no quotes."""


@pytest.mark.parametrize("rest", ["", "x", " <think> y", "a <think>b</think> c", "TAG", "TAG y", "\n\nEND\n"])
@pytest.mark.parametrize("name", ENDS)
def test_a_string_with_the_end_of_its_call_is_counted_and_never_cut(name: str, rest: str) -> None:
    """Nothing escapes the tags in such a string, so that it cannot be told from text behind a call."""
    form = FORMATS[name]
    opening = CALLS[name][: CALLS[name].index(">") + 1]
    for end in (ENDS[name], ENDS[name].replace("\n", "")):
        value = f"12{end}{rest}".replace("TAG", opening).replace("END", end)
        parsed = form.parse(CALLS[name].replace("12", value, 1), TOOLS)
        assert parsed.tool_calls == () and parsed.num_malformed >= 1, value
    # Text behind a call, and further calls, are no such string.
    for behind, num_calls in (("\nDone: <think>", 2), ("\n</tool_call> </parameter>", 2), (f"\n{CALLS[name]}", 4)):
        parsed = form.parse(CALLS[name] + behind, TOOLS)
        assert (len(parsed.tool_calls), parsed.num_malformed) == (num_calls, 0), behind


def test_a_call_of_qwen_without_its_outer_tag_is_not_cut_either() -> None:
    call = CALLS["qwen3_xml"].split("<tool_call>\n")[1].replace("\n</tool_call>\n", "")
    for name in ("qwen3_xml", "hermes"):
        text = call if name == "qwen3_xml" else f"<tool_call>{call}</tool_call>"
        assert calls_made(FORMATS[name].parse(text, TOOLS).tool_calls) == [("weather", ARGUMENTS)]
        parsed = FORMATS[name].parse(text.replace("12", "1</parameter></function></tool_call>2"), TOOLS)
        assert (parsed.tool_calls, parsed.num_malformed) == ((), 1)


def test_ids_are_those_that_the_model_wrote() -> None:
    newer = '[TOOL_CALLS]weather[CALL_ID]abcdefgh9[ARGS]{"city": "x"}[TOOL_CALLS]now[ARGS]{}'
    parsed = FORMATS["mistral"].parse(newer, TOOLS)
    assert calls_made(parsed.tool_calls) == [("weather", {"city": "x"}), ("now", {})]
    assert [call["id"] for call in parsed.tool_calls] == ["abcdefgh9", ""]


def test_an_object_that_is_no_call_stays_an_answer_of_llama() -> None:
    for text in ('{"name": "Bob", "parameters": {}}', '{"a": 1}', '{"a": 1} {"b": 2}', "{", "{x}"):
        parsed = FORMATS["llama"].parse(text, TOOLS)
        assert (parsed.content, parsed.tool_calls, parsed.num_malformed) == (text, (), 0)


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("<tool_call>\n<function=example>", "qwen3_xml"),
        ("<tool_call>{name}<arg_key>k</arg_key>", "glm"),
        ("'<｜tool▁calls▁begin｜>'", "deepseek"),
        ("set dsml_token = '｜DSML｜'", "deepseek_xml"),
        ("<|tool_calls_section_begin|>", "kimi"),
        ("<minimax:tool_call>", "minimax"),
        ("{{- '<|python_tag|>' }}", "llama"),
        ("[TOOL_CALLS]", "mistral"),
        ("<|start|>assistant<|channel|>final", "gpt_oss"),
        ("<|im_start|>", "none"),
        (None, "none"),
        ([{"name": "tool_use", "template": "<tool_call>"}], "hermes"),
    ],
)
def test_the_chat_template_names_the_form(part: Any, name: str) -> None:
    assert choose_format(part).name == name
    assert choose_format(part, "kimi").name == "kimi"
    note = format_note(part, "auto")
    assert "the model's chat template" in note and ("refused" in note if name == "none" else f"'{name}'" in note)
