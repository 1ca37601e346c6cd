"""Formats of files and of prompts: each is read, or refused by its name."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from megatron_dppo.data.chat import ChatOptions
from megatron_dppo.data.data_rows import DataRow, iter_rows
from megatron_dppo.data.prompts import PromptDataset
from megatron_dppo.errors import DataError
from tests.unit.data.test_data_chat import MODEL, load_tokenizer

CHAT = [{"role": "user", "content": "1+1="}]
ROW = {"problem": "1+1", "answer": "2"}
OTHER = {"problem": "2+2", "answer": "4"}
BEGUN = [*CHAT, {"role": "assistant", "content": "so "}]
SHAREGPT = [{"from": "human", "value": "1+1="}, {"from": "gpt", "value": "2"}]


def rows(folder: Path, content: str | bytes, name: str = "data.jsonl", **keys: Any) -> list[DataRow]:
    file = folder / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return list(iter_rows(str(file), "train", **keys))


ARRAYS = [
    json.dumps([ROW, OTHER]),
    json.dumps([ROW, OTHER], indent=2),
    "\ufeff" + json.dumps([ROW, OTHER], indent=1),
    "\n\n  " + json.dumps([ROW, OTHER], indent="\t") + "\n\n",
    "[\n" + json.dumps(ROW) + ",\n" + json.dumps(OTHER) + "\n]\n",
]


@pytest.mark.parametrize("text", ARRAYS, ids=range(len(ARRAYS)))
@pytest.mark.parametrize("name", ["list.json", "list.jsonl"])
def test_a_json_array_is_read_over_any_number_of_lines(tmp_path: Path, text: str, name: str) -> None:
    result = rows(tmp_path, text, name)
    assert [(row.location, row.prompt, row.label) for row in result] == [
        (f"{name}:1", "1+1", "2"),
        (f"{name}:2", "2+2", "4"),
    ]


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path: Path) -> None:
    assert rows(tmp_path, "\ufeff" + json.dumps(ROW) + "\n")[0].prompt == "1+1"


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
REFUSED_FILES: list[tuple[str, str | bytes, str]] = [
    ("data.jsonl", POINTER, "Git LFS pointer.*git lfs pull"),
    ("data.parquet", POINTER, "Git LFS pointer"),
    ("data.json", POINTER, "Git LFS pointer"),
    ("data.jsonl.gz", gzip.compress(json.dumps(ROW).encode(), mtime=0), "compressed with gzip"),
    ("data.jsonl", b"PK\x03\x04rest", "a zip archive"),
    ("data.arrow", b"ARROW1\x00\x00", "an Arrow file"),
    ("data.jsonl", "<!DOCTYPE html><html></html>", "a web page"),
    ("data.jsonl", json.dumps(ROW).encode("utf-16"), "UTF-16; convert it to UTF-8"),
    ("data.json", json.dumps(ROW, indent=2), "object that extends over several lines is no row"),
    ("data.json", '[{"problem": "1",}]', "not valid JSON.*read as one JSON array"),
    ("data.json", '[{"problem": "1"}, 3]', "entry 2 of the JSON array is 3, expected an object"),
    ("data.json", '[{"a": 1, "a": 2}]', "the key 'a' stands twice"),
    ("data.json", "[1, 2]\n[3, 4]\n", "read as one JSON array"),
]


@pytest.mark.parametrize(("name", "content", "message"), REFUSED_FILES)
def test_other_files_are_refused_by_their_name(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        rows(tmp_path, content, name)


@pytest.mark.parametrize(
    ("source", "hint"),
    [
        ("openai/gsm8k", "hf:openai/gsm8k"),
        ("https://huggingface.co/datasets/openai/gsm8k", "hf:openai/gsm8k"),
        ("hf://datasets/openai/gsm8k/main.parquet", "hf:openai/gsm8k"),
    ],
)
def test_names_of_the_hub_are_refused_with_the_spelling_that_works(source: str, hint: str) -> None:
    with pytest.raises(DataError, match=hint):
        list(iter_rows(source, "train"))


READ: list[dict[str, Any]] = [
    {"prompt": CHAT, "label": "2"},
    {"prompt": json.dumps(CHAT), "label": "2"},
    {"prompt": json.dumps(CHAT, indent=1), "label": "2"},
    {"messages": CHAT, "label": "2"},
    {"problem": json.dumps(CHAT), "label": "2"},
    {"prompt": [{"role": "user", "content": "1+1=", "name": None, "tool_calls": None}], "label": "2"},
]


@pytest.mark.parametrize("row", READ, ids=range(len(READ)))
def test_messages_are_read_as_lists_and_as_json_text(tmp_path: Path, row: dict[str, Any]) -> None:
    assert rows(tmp_path, json.dumps(row))[0].prompt == CHAT


def test_text_that_only_looks_like_a_list_stays_text(tmp_path: Path) -> None:
    for text in ("[1, 2, 3]", "[role]", '["role"]', "[a role", '[{"roles": 1}]'):
        assert rows(tmp_path, json.dumps({"prompt": text, "label": "2"}))[0].prompt == text


def test_parquet_messages_have_no_empty_fields(tmp_path: Path) -> None:
    """A struct column gives each message the fields of all; templates ask whether a field is there."""
    messages = [{"role": "system", "content": "7", "name": None}, {"role": "user", "content": "1+1=", "name": "me"}]
    file = tmp_path / "data.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"messages": messages, "label": "2"}]), file)
    (row,) = iter_rows(str(file), "train")
    assert row.prompt == [{"role": "system", "content": "7"}, {"role": "user", "content": "1+1=", "name": "me"}]


REFUSED_ROWS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": [{"role": "human", "content": "1"}]}, "message 0 has the role 'human'; expected one of system"),
    ({"prompt": [{"role": "user", "content": "1"}, {"role": "gpt", "content": ""}]}, "message 1 has the role 'gpt'"),
    ({"prompt": [{"role": None, "content": "1"}]}, "has the role None"),
    ({"prompt": SHAREGPT}, "ShareGPT rows"),
    ({"prompt": json.dumps(SHAREGPT)}, "ShareGPT rows"),
    ({"conversations": SHAREGPT}, "field 'prompt' is missing; 'conversations' holds ShareGPT rows"),
    ({"conversations": CHAT}, "data.prompt_key = 'conversations' reads its messages"),
    ({"prompt": str(CHAT)}, "as Python prints it"),
    ({"prompt": [{"role": "user", "content": [{"type": "text"}]}]}, "message 0 has a part that is no text"),
    (
        {"prompt": [{"role": "user", "content": [{"type": "text", "text": "1"}, {"type": "image_url"}]}]},
        "message 0 has a part that is no text .type 'image_url'.",
    ),
    ({"prompt": "<image>1", "images": ["a.png"]}, "field 'images' is not empty, and the model is trained on text"),
    ({"prompt": "1", "image": {"bytes": None, "path": "a.png"}}, "field 'image' is not empty"),
    ({"prompt": "1", "videos": [{"url": "a.mp4"}]}, "field 'videos' is not empty"),
    ({"prompt": [{"role": "user", "content": None}]}, "has the content None, expected text"),
    ({"prompt": [{"role": "user"}]}, "has the content None, expected text"),
    ({"prompt": ["1+1="]}, "entry 0 is '1\\+1=', expected a message"),
    ({"prompt": BEGUN[1:]}, "no message before the assistant's"),
    ({"messages": BEGUN}, "ends with an assistant message, as the answers of supervised data do"),
    ({"prompt": []}, "must be a non-empty string or a list of messages"),
]


@pytest.mark.parametrize(("row", "message"), REFUSED_ROWS, ids=range(len(REFUSED_ROWS)))
def test_other_rows_are_refused_by_their_name(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f"data.jsonl:1: .*{message}"):
        rows(tmp_path, json.dumps(row | {"label": "2"}))


def test_rows_without_images_may_have_their_columns(tmp_path: Path) -> None:
    row = {"prompt": "1", "label": "2", "images": [], "videos": None, "image": "python:3.12"}
    assert rows(tmp_path, json.dumps(row))[0].metadata["image"] == "python:3.12"


QWEN3 = (
    "{% for m in messages %}<|{{ m.role }}|>\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
OPENS_THOUGHT = QWEN3.replace("<|assistant|>\n{% endif %}", "<|assistant|>\n<think>\n{% endif %}")


def rendered(template: str, messages: list[dict[str, Any]]) -> str:
    tokenizer = load_tokenizer(MODEL)
    tokenizer.chat_template = template
    return ChatOptions().render(DataRow("a.jsonl:1", messages, "2"), tokenizer)[0]


@pytest.mark.parametrize("begun", ["<think>\nLet me see", "The answer is", "", " with spaces "])
def test_a_begun_answer_is_continued_and_never_closed(begun: str) -> None:
    text = rendered(QWEN3, [*CHAT, {"role": "assistant", "content": begun}])
    assert text == f"<|user|>\n1+1=<|end|>\n<|assistant|>\n{begun}"


def test_a_thought_that_the_template_opens_is_not_opened_twice() -> None:
    begun = [*CHAT, {"role": "assistant", "content": "<think>\nLet me see"}]
    assert rendered(OPENS_THOUGHT, begun) == "<|user|>\n1+1=<|end|>\n<|assistant|>\n<think>\nLet me see"
    plain = [*CHAT, {"role": "assistant", "content": "Let me see"}]
    assert rendered(OPENS_THOUGHT, plain).endswith("<|assistant|>\n<think>\nLet me see")


def test_an_agent_cannot_continue_an_answer() -> None:
    tokenizer = load_tokenizer(MODEL)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    limits: dict[str, Any] = {"max_prompt_tokens": 40, "max_new_tokens": 40, "context_length": 256}
    row = DataRow("a.jsonl:1", [*CHAT, {"role": "assistant", "content": "1"}], "2")
    assert PromptDataset([row], tokenizer, **limits)[0].text == "1+1=1"
    with pytest.raises(DataError, match=r"a\.jsonl:1: .*assistant message"):
        PromptDataset([row], tokenizer, **limits, are_tasks=True)


def test_variables_of_the_template_are_for_the_calls_of_an_agent_with_tasks_in_plain_text() -> None:
    tokenizer = load_tokenizer(MODEL)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ enable_thinking }}"
    limits: dict[str, Any] = {"max_prompt_tokens": 40, "max_new_tokens": 40, "context_length": 256}
    rows, chat = [DataRow("a.jsonl:1", "1+1=", "2")], ChatOptions(template_kwargs={"enable_thinking": False})
    assert PromptDataset(rows, tokenizer, **limits, chat=chat, are_tasks=True)[0].text == "1+1="
    with pytest.raises(DataError, match="plain string"):
        PromptDataset(rows, tokenizer, **limits, chat=chat)


def test_a_message_that_the_template_leaves_out_is_an_error() -> None:
    template = (
        "{% for m in messages %}{% if m.role in ('user', 'assistant') %}{{ m.content|trim }}{% endif %}{% endfor %}"
    )
    assert rendered(template, [{"role": "user", "content": " 1+1= "}]) == "1+1="
    for role in ("developer", "system"):
        with pytest.raises(DataError, match=f"0 .role '{role}'"):
            rendered(template, [{"role": role, "content": "be brief"}, *CHAT])
