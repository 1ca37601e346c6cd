"""Formats against ``renderers`` (Apache-2.0), which writes and reads the same forms independently.

Without the package (extra ``[agents]``) these tests are skipped. They need neither torch nor transformers.
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest

from megatron_dppo_conversations.formats import FORMATS
from odd_calls import ARGUMENTS
from odd_calls import TOOLS as ODD_TOOLS

renderers = pytest.importorskip("renderers", reason="needs the extra [agents]: pip install renderers httpx")

CHATML = ["<|im_end|>", "<|im_start|>", "<|endoftext|>", "<tool_call>", "</tool_call>", "<think>", "</think>"]
VISION = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
RESULT = ["<tool_response>", "</tool_response>"]
# Name of the renderer and special tokens of its models, the end token first.
FAMILIES: dict[str, tuple[str, list[str]]] = {
    "hermes": ("qwen3", [*CHATML, *RESULT]),
    "qwen3_xml": ("qwen3.5", [*CHATML, *RESULT, *VISION]),
    "glm": (
        "glm-4.5",
        [
            *("<|endoftext|>", "<|user|>", "<|observation|>", "<|assistant|>", "<|system|>", "[gMASK]", "<sop>"),
            *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<think>"),
            *("</think>", "/nothink", *RESULT),
        ],
    ),
    "deepseek": (
        "deepseek-v3",
        [
            *("<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
            *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
            *("<｜tool▁sep｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<｜tool▁outputs▁begin｜>"),
            "<｜tool▁outputs▁end｜>",
        ],
    ),
    "kimi": (
        "kimi-k2",
        [
            *("<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "[BOS]", "[EOS]"),
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
            *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        ],
    ),
    "minimax": ("minimax-m2", ["[e~[", "]~b]", "]~!b[", "<minimax:tool_call>", "</minimax:tool_call>", *CHATML[-2:]]),
    "llama": (
        "llama-3",
        [
            *("<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>"),
            *("<|python_tag|>", "<|end_of_text|>"),
        ],
    ),
}
PROPERTIES = {
    "text": "string",
    "count": "integer",
    "share": "number",
    "flag": "boolean",
    "items": "array",
    "map": "object",
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A tool.",
            "parameters": {"type": "object", "properties": {key: {"type": kind} for key, kind in PROPERTIES.items()}},
        },
    }
    for name in ("add", "look_up", "write-file")
]
TOOL_NAMES = {tool["function"]["name"] for tool in TOOLS}
WORDS = ["a", "plan", "12", "true", "null", "über", "{", "}", '"', "\\", "<b>", "a\nb", "  ", "[1]", "x > y", "日本"]
NO_THOUGHTS = {"llama", "kimi"}
"""Families whose renderer writes no thoughts."""
ONE_CALL = {"llama"}


class ByteTokenizer:
    """One token a byte, and special tokens: what ``renderers`` needs of a tokenizer."""

    name_or_path = "tests/bytes"
    unk_token_id = None
    bos_token_id = None

    def __init__(self, special: list[str]) -> None:
        self._ids = {token: 256 + index for index, token in enumerate(special)}
        self._tokens = {index: token for token, index in self._ids.items()}
        self._pattern = re.compile("(" + "|".join(map(re.escape, sorted(special, key=len, reverse=True))) + ")")
        self.eos_token_id = 256

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        ids: list[int] = []
        for part in self._pattern.split(text):
            ids += [self._ids[part]] if part in self._ids else list(part.encode())
        return ids

    def decode(self, ids: list[int], skip_special_tokens: bool = False, **_: Any) -> str:
        special = {} if skip_special_tokens else self._tokens
        parts = [special.get(token, "").encode() if token > 255 else bytes([token]) for token in ids]
        return b"".join(parts).decode("utf-8", "replace")

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return self._ids.get(token)


def text(rng: random.Random, words: int = 4) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, words)))


def value(rng: random.Random, kind: str) -> Any:
    if kind == "string":
        # Line breaks and blanks at the edges of a value are read in different ways by the families' own parsers.
        return text(rng).strip() or "x"
    simple: dict[str, Any] = {
        "integer": rng.randint(-9, 9),
        "number": rng.choice([0.5, -1.25, 3, 1e-7]),
        "boolean": rng.random() < 0.5,
        "array": [text(rng), rng.randint(0, 9), None],
        "object": {text(rng): [True, {"deep": text(rng)}]},
    }
    return simple[kind]


def answer(rng: random.Random, family: str) -> dict[str, Any]:
    """Return a random message of the assistant."""
    message: dict[str, Any] = {"role": "assistant", "content": f"So {text(rng)}".strip()}
    if family not in NO_THOUGHTS and rng.random() < 0.7:
        message["reasoning_content"] = f"Hm, {text(rng)}".strip()
    if rng.random() < 0.6:
        calls = []
        for index in range(1 if family in ONE_CALL else rng.randint(1, 3)):
            names = rng.sample(list(PROPERTIES), rng.randint(0, len(PROPERTIES)))
            name = rng.choice(TOOLS)["function"]["name"]
            arguments = {key: value(rng, PROPERTIES[key]) for key in names}
            function = {"name": name, "arguments": arguments}
            calls.append({"id": f"functions.{name}:{index}", "type": "function", "function": function})
        message["tool_calls"] = calls
        if family in ONE_CALL or rng.random() < 0.5:
            message["content"] = ""
    return message


def calls_made(calls: Any) -> list[tuple[str, Any]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def their_calls(theirs: Any) -> list[tuple[str, Any]]:
    """Return the calls that ``renderers`` read. Constants of Python, as Qwen3.5's template writes them, stay text."""
    constants = {"True": True, "False": False}
    return [
        (call.name, {k: constants.get(v, v) if k == "flag" else v for k, v in call.arguments.items()})
        for call in theirs.tool_calls
    ]


def conversations(family: str, count: int) -> Any:
    """Yield the tokenizer, the renderer, and the prompt and response tokens of each answer of random conversations."""
    name, special = FAMILIES[family]
    tokenizer = ByteTokenizer(special)
    renderer = renderers.create_renderer(tokenizer, renderers.config_from_name(name))
    for seed in range(count):
        rng = random.Random(f"{family} {seed}")
        messages: list[dict[str, Any]] = [{"role": "user", "content": text(rng)}]
        for _ in range(rng.randint(1, 3)):
            prompt = renderer.render_ids(messages, tools=TOOLS, add_generation_prompt=True)
            messages.append(answer(rng, family))
            complete = renderer.render_ids(messages, tools=TOOLS)
            if complete[: len(prompt)] == prompt:
                yield tokenizer, renderer, messages[-1], prompt, complete[len(prompt) :]
            results = messages[-1].get("tool_calls", [])
            for call in results:
                result = {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"]}
                messages.append({**result, "content": text(rng)})
            if not results:
                messages.append({"role": "user", "content": text(rng)})


def read_both(tokenizer: Any, renderer: Any, family: str, prompt: list[int], output: list[int]) -> tuple[Any, Any]:
    """Return what ``renderers`` and the format read in an output."""
    stops = set(renderer.get_stop_token_ids())
    end = next((index for index, token in enumerate(output) if token in stops), len(output))
    starts_in_thought = tokenizer.decode(prompt[-12:]).rstrip().endswith("<think>")
    ours = FORMATS[family].parse(tokenizer.decode(output[:end]), TOOLS, starts_in_thought=starts_in_thought)
    return renderer.parse_response(output, tools=TOOLS, prompt_ids=prompt), ours


@pytest.mark.parametrize("family", FAMILIES)
def test_odd_calls_are_read_as_renderers_writes_them(family: str) -> None:
    name, special = FAMILIES[family]
    tokenizer = ByteTokenizer(special)
    renderer = renderers.create_renderer(tokenizer, renderers.config_from_name(name))
    question: Any = {"role": "user", "content": "q"}
    prompt = renderer.render_ids([question], tools=ODD_TOOLS, add_generation_prompt=True)
    for arguments in ARGUMENTS:
        if special[0] in str(arguments):
            continue  # it ends the turn within the call
        call = {"id": "functions.add:0", "type": "function", "function": {"name": "add", "arguments": arguments}}
        message = {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]}
        complete = renderer.render_ids([question, message], tools=ODD_TOOLS)
        assert complete[: len(prompt)] == prompt
        output = tokenizer.decode(complete[len(prompt) :]).rstrip().removesuffix(special[0])
        parsed = FORMATS[family].parse(output, ODD_TOOLS)
        # As JSON, in which 1, 1.0 and true differ.
        assert json.dumps(calls_made(parsed.tool_calls)) == json.dumps([("add", arguments)]), output


def compare(family: str, count: int) -> tuple[int, int]:
    """Compare answers as they were written, and outputs that were cut off or changed; return the numbers of both."""
    whole = changed = 0
    for tokenizer, renderer, message, prompt, output in conversations(family, count):
        theirs, ours = read_both(tokenizer, renderer, family, prompt, output)
        said = tokenizer.decode(output)
        assert calls_made(ours.tool_calls) == their_calls(theirs), said
        assert calls_made(ours.tool_calls) == calls_made(message.get("tool_calls", [])), said
        assert ours.content.strip() == theirs.content.strip() == message["content"].strip(), said
        assert ours.reasoning.strip() == (theirs.reasoning_content or "").strip(), said
        assert ours.num_malformed == 0, said
        if family == "kimi":
            assert [call["id"] for call in ours.tool_calls] == [call.id for call in theirs.tool_calls]
        whole += 1
        rng = random.Random(said)
        cut = output[: rng.randrange(len(output))]
        theirs, ours = read_both(tokenizer, renderer, family, prompt, cut)
        statuses = [getattr(call.status, "value", call.status) for call in theirs.tool_calls]
        if ours.tool_calls:
            # The end of a section, behind complete calls, is all that may be missing there.
            assert calls_made(ours.tool_calls) == their_calls(theirs), tokenizer.decode(cut)
        elif any(status != "ok" for status in statuses):
            assert ours.num_malformed or family == "llama", tokenizer.decode(cut)
        # One token is lost: if both read calls, then as many. A lost letter of a name makes another tool.
        index = rng.randrange(len(output))
        theirs, ours = read_both(tokenizer, renderer, family, prompt, [*output[:index], *output[index + 1 :]])
        if ours.tool_calls and all(getattr(call.status, "value", call.status) == "ok" for call in theirs.tool_calls):
            names = [name for name, _ in calls_made(ours.tool_calls)]
            assert names == [name for name, _ in their_calls(theirs)] or set(names) - TOOL_NAMES, (index, said)
        changed += 2
    return whole, changed


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sample_is_read_as_renderers_reads_it(family: str) -> None:
    whole, changed = compare(family, 12)
    assert whole >= 12 and changed >= 12


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_400_conversations_are_read_as_renderers_reads_them(family: str) -> None:
    whole, changed = compare(family, 400)
    assert whole >= 400 and changed >= 400
