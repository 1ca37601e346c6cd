"""Chat templates, system prompts, and prompts that are too long."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.data.chat import ChatOptions, load_tokenizer
from megatron_dppo.data.data_rows import DataRow
from megatron_dppo.data.prompts import PromptDataset
from megatron_dppo.errors import DataError

MODEL = Path(__file__).parents[3] / "examples/chain_sum/model"
# Like Qwen3's: thinking that is switched off is an empty block at the start of the answer.
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}({{ m.content }}){% else %}{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}={% if enable_thinking is defined and not enable_thinking %}\\boxed"
    "{% endif %}{% endif %}"
)
TEXT = DataRow("a.jsonl:1", "1+1", "2")
PROBLEM = DataRow("a.jsonl:2", "1+1", "2", is_problem=True)
CHAT = DataRow("a.jsonl:3", [{"role": "user", "content": "1+1"}], "2")
OWN_SYSTEM = DataRow("a.jsonl:4", [{"role": "system", "content": "7"}, {"role": "user", "content": "1+1"}], "2")


@pytest.fixture(scope="module")
def plain() -> Any:
    return load_tokenizer(MODEL)


@pytest.fixture(scope="module")
def templated() -> Any:
    tokenizer = load_tokenizer(MODEL)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def dataset(tokenizer: Any, rows: list[DataRow], chat: ChatOptions | None = None, **changes: Any) -> PromptDataset:
    limits: dict[str, Any] = {"max_prompt_tokens": 40, "max_new_tokens": 40, "context_length": 256}
    return PromptDataset(rows, tokenizer, **(limits | changes), chat=chat)


def texts(tokenizer: Any, rows: list[DataRow], **options: Any) -> list[str]:
    data = dataset(tokenizer, rows, ChatOptions(**options))
    return [data[i].text for i in range(len(data))]


def test_prompts_that_go_through_the_template(plain: Any, templated: Any) -> None:
    assert texts(templated, [TEXT, PROBLEM, CHAT]) == ["1+1", "1+1=", "1+1="]
    assert texts(templated, [TEXT, PROBLEM, CHAT], apply=True) == ["1+1="] * 3
    assert texts(templated, [TEXT, PROBLEM], apply=False) == ["1+1", "1+1"]
    assert texts(plain, [TEXT, PROBLEM]) == ["1+1", "1+1"]


def test_only_text_without_a_template_gets_special_tokens(templated: Any) -> None:
    data = dataset(templated, [TEXT, PROBLEM])
    assert data[0].token_ids[0] == templated.bos_token_id
    assert data[1].token_ids == tuple(templated("1+1=", add_special_tokens=False).input_ids)


def test_template_variables_change_the_text(templated: Any) -> None:
    assert texts(templated, [CHAT], template_kwargs={"enable_thinking": False}) == ["1+1=\\boxed"]
    assert texts(templated, [CHAT], template_kwargs={"enable_thinking": True}) == ["1+1="]


def test_a_system_prompt_is_added_unless_the_row_has_one(templated: Any) -> None:
    result = texts(templated, [CHAT, PROBLEM, OWN_SYSTEM], system_prompt="9")
    assert result == ["(9)1+1=", "(9)1+1=", "(7)1+1="]
    assert CHAT.prompt == [{"role": "user", "content": "1+1"}], "the row itself stays as it was"


@pytest.mark.parametrize(
    ("options", "row", "parts"),
    [
        ({"template_kwargs": {"enable_thinkin": False}}, CHAT, ["no variable 'enable_thinkin'", "spelling"]),
        ({"template_kwargs": {"tokenize": True}}, CHAT, ["'tokenize' is set by the trainer"]),
        ({"system_prompt": "9"}, TEXT, ["a.jsonl:1", "data.system_prompt is set", "apply_chat_template = true"]),
        (
            {"template_kwargs": {"enable_thinking": False}},
            TEXT,
            ["a.jsonl:1", "data.chat_template_kwargs is set", "apply_chat_template = true"],
        ),
        ({"apply": False}, CHAT, ["a.jsonl:3", "list of messages", "data.apply_chat_template = false"]),
    ],
)
def test_options_without_effect_are_rejected(
    templated: Any, options: dict[str, Any], row: DataRow, parts: list[str]
) -> None:
    with pytest.raises(DataError) as error:
        texts(templated, [row], **options)
    assert all(part in str(error.value) for part in parts), error.value


def test_a_missing_template_is_an_error_with_the_key_that_needs_it(plain: Any) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl:3: .* no chat template"):
        texts(plain, [CHAT])
    with pytest.raises(DataError, match=r"a\.jsonl:1: data\.apply_chat_template"):
        texts(plain, [TEXT], apply=True)


def test_prompts_that_are_too_long_are_rejected_or_dropped_and_counted(plain: Any) -> None:
    rows = [DataRow(f"a.jsonl:{n}", "1+" * n + "1=", str(n + 1)) for n in (1, 2, 3, 4)]  # 5, 7, 9, 11 tokens with <bos>
    with pytest.raises(DataError, match=r"a\.jsonl:4: .*11 tokens.*= 9\. .*data\.overlong_prompts = 'drop'"):
        dataset(plain, rows, max_prompt_tokens=9)
    kept = dataset(plain, rows, max_prompt_tokens=9, overlong="drop")
    assert [p.prompt_id for p in (kept[0], kept[1], kept[2])] == ["a.jsonl:1", "a.jsonl:2", "a.jsonl:3"]
    assert (len(kept), kept.num_dropped) == (3, 1)
    small = dataset(plain, rows, context_length=47, overlong="drop")
    assert (len(small), small.num_dropped) == (2, 2), "the context counts as well"
    with pytest.raises(DataError, match="all 4 prompts"):
        dataset(plain, rows, max_prompt_tokens=4, overlong="drop")
    with pytest.raises(DataError, match=r"lower rollout\.max_new_tokens"):
        dataset(plain, rows, context_length=40, overlong="drop")
