from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dppo.data.chat import load_tokenizer
from megatron_dppo.data.data_rows import DataRow
from megatron_dppo.data.prompts import PromptDataset, load_rows
from megatron_dppo.data.training_samples import to_training_sample
from megatron_dppo.errors import CheckpointError, DataError
from megatron_dppo_lab.embedded_tasks import problems
from megatron_dppo_lab.supervised import SupervisedDataset

MODEL = Path(__file__).parents[3] / "examples/chain_sum/model"
GOOD = {"prompt": "1+1=", "label": "2"}
TEMPLATE = (
    "{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('only user speaks') }}{% endif %}"
    "{{ m.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(MODEL)


@pytest.fixture(scope="module")
def chat_tokenizer() -> Any:
    tokenizer = load_tokenizer(MODEL)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def write(tmp_path: Path, *records: Any) -> str:
    """A JSONL file of objects, or of raw lines."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records), encoding="utf-8")
    return str(path)


def dataset(rows: list[DataRow], tokenizer: Any, **changes: Any) -> PromptDataset:
    return PromptDataset(
        rows, tokenizer, **({"max_prompt_tokens": 16, "max_new_tokens": 40, "context_length": 256} | changes)
    )


def test_the_embedded_task_gives_its_split_with_labels() -> None:
    for split in ("train", "eval"):
        rows = load_rows("task:chain_sum", split).rows
        assert [(r.prompt, int(r.label)) for r in rows] == [(p.question, p.answer) for p in problems(split)]


def test_a_jsonl_row_keeps_its_index_label_and_other_columns(tmp_path: Path) -> None:
    path = write(tmp_path, {"q": "1+1=", "a": 2, "level": 3}, "", {"q": "2+2=", "a": "04"})
    assert load_rows(path, "train", prompt_key="q", label_key="a").rows == [
        DataRow("rows.jsonl:1", "1+1=", "2", {"level": 3}, source="rows.jsonl"),
        DataRow("rows.jsonl:3", "2+2=", "04", {}, source="rows.jsonl"),
    ]


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("{oops", ["rows.jsonl:2", "not valid JSON"]),
        ("[1]", ["rows.jsonl:2", "JSON object", "list"]),
        (
            {"prompt": "1+1=", "value": 2},
            ["rows.jsonl:2", "'label'", "missing", "['prompt', 'value']", "data.label_key"],
        ),
        ({"prompt": 7, "label": "2"}, ["rows.jsonl:2", "'prompt'", "7"]),
        ({"prompt": "", "label": "2"}, ["rows.jsonl:2", "'prompt'", "non-empty"]),
        ({"prompt": [{"role": "user"}], "label": "2"}, ["rows.jsonl:2", "messages"]),
        ({"prompt": "1+1=", "label": [2]}, ["rows.jsonl:2", "'label'", "[2]"]),
        ({"prompt": "1+1=", "label": True}, ["rows.jsonl:2", "'label'", "True"]),
    ],
)
def test_the_error_of_a_bad_row_has_line_field_and_content(tmp_path: Path, line: Any, parts: list[str]) -> None:
    with pytest.raises(DataError) as error:
        load_rows(write(tmp_path, GOOD, line), "train")
    assert all(part in str(error.value) for part in parts), error.value


def test_a_source_without_data_is_rejected_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xff", "label": "1"}\n')
    for source, part in (
        (str(tmp_path / "nowhere.jsonl"), "does not exist"),
        (str(tmp_path), "is a folder"),
        ("/proc/self/mem", "cannot be read: .*Errno 5"),  # what a failing disk says
        (write(tmp_path), "has no rows"),
        (str(tmp_path / "latin.jsonl"), "latin.jsonl:1: not UTF-8"),
        ("task:count_sheep", "task:chain_sum"),
    ):
        with pytest.raises(DataError, match=part):
            load_rows(source, "train")
        with pytest.raises(DataError, match=part):
            SupervisedDataset(source, None, seed=0)


def test_a_truncated_prompt_keeps_its_last_tokens(tokenizer: Any) -> None:
    rows = [DataRow("a:1", "1+2+3+4=", "10"), DataRow("a:2", "1+1=", "2")]
    whole = dataset(rows, tokenizer)
    for limit, changes in ((5, {"max_prompt_tokens": 5}), (6, {"context_length": 46})):
        cut = dataset(rows, tokenizer, overlong="truncate_left", **changes)
        assert [cut[i].token_ids for i in (0, 1)] == [whole[0].token_ids[-limit:], whole[1].token_ids]
        assert (cut.num_truncated, cut.num_dropped, cut.longest, cut[0].text) == (1, 0, limit, "1+2+3+4=")
    with pytest.raises(DataError, match="context of 40"):
        dataset(rows, tokenizer, overlong="truncate_left", context_length=40)


def test_each_epoch_is_a_different_permutation_of_all_rows(tokenizer: Any) -> None:
    rows = load_rows("task:chain_sum", "eval").rows
    data = dataset(rows, tokenizer, seed=5)
    n = len(data)
    epochs = [[data[e * n + i].prompt_id for i in range(n)] for e in range(3)]
    expected = Counter(r.location for r in rows)
    assert n == len(rows) and all(Counter(epoch) == expected for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_a_prompt_depends_on_seed_and_index_alone(tokenizer: Any) -> None:
    rows = load_rows("task:chain_sum", "eval").rows
    walked, jumped = dataset(rows, tokenizer, seed=5), dataset(rows, tokenizer, seed=5)
    stream = [walked[i] for i in range(2 * len(rows) + 3)]
    for i in (2 * len(rows) + 2, 0, len(rows), 7, len(rows) - 1):
        assert jumped[i] == stream[i]
    other = dataset(rows, tokenizer, seed=6)
    assert [other[i] for i in range(20)] != stream[:20]


def test_without_a_seed_the_rows_keep_their_order_and_there_is_no_index_below_zero(tokenizer: Any) -> None:
    rows = load_rows("task:chain_sum", "eval").rows[:5]
    data = dataset(rows, tokenizer)
    assert [data[i].prompt_id for i in range(10)] == [r.location for r in rows] * 2
    with pytest.raises(IndexError):
        data[-1]


def test_a_prompt_carries_its_tokens_label_and_metadata(tokenizer: Any) -> None:
    prompt = dataset([DataRow("a.jsonl:1", "1+1=", "2", {"level": 3})], tokenizer)[0]
    assert prompt.text == "1+1=" and prompt.label == "2" and prompt.metadata == {"level": 3}
    assert prompt.token_ids == tuple(tokenizer("1+1=").input_ids) and prompt.token_ids[0] == tokenizer.bos_token_id


def test_a_prompt_that_does_not_fit_is_rejected_when_it_is_loaded(tokenizer: Any) -> None:
    rows = [DataRow("a.jsonl:1", "1+1=", "2"), DataRow("a.jsonl:2", "1+1+1+1=", "4")]  # 5 and 9 tokens with <bos>
    dataset(rows, tokenizer, max_prompt_tokens=9, max_new_tokens=40, context_length=49)
    with pytest.raises(DataError, match=r"a\.jsonl:2: .* 9 tokens, .*data\.max_prompt_tokens = 8\. .*raise"):
        dataset(rows, tokenizer, max_prompt_tokens=8)
    with pytest.raises(DataError, match=r"a\.jsonl:2: .* 9 tokens.* = 40 .*48\. .*lower"):
        dataset(rows, tokenizer, context_length=48)
    with pytest.raises(DataError, match="no rows"):
        dataset([], tokenizer)


def test_chat_messages_go_through_the_template_once(tokenizer: Any, chat_tokenizer: Any) -> None:
    row = DataRow("a.jsonl:1", [{"role": "user", "content": "1+1"}], "2")
    prompt = dataset([row], chat_tokenizer)[0]
    assert prompt.text == "1+1="
    assert prompt.token_ids == tuple(tokenizer("1+1=", add_special_tokens=False).input_ids)
    with pytest.raises(DataError, match=r"a\.jsonl:1: .*no chat template"):
        dataset([row], tokenizer)
    with pytest.raises(DataError, match=r"a\.jsonl:1: .*only user speaks"):
        dataset([DataRow("a.jsonl:1", [{"role": "bot", "content": "1"}], "2")], chat_tokenizer)


def test_supervised_samples_are_demonstrations_of_training_problems(tokenizer: Any) -> None:
    data, questions = SupervisedDataset("task:chain_sum", tokenizer, seed=0), {p.question for p in problems("train")}
    for i in range(200):
        sample = data[i]
        response = sample.labels[sample.loss_mask].tolist()
        question = sample.tokens[: len(sample.tokens) - len(response) + 1].tolist()
        assert tokenizer.decode(question, skip_special_tokens=True) in questions
        assert response[-1] == tokenizer.eos_token_id and response.count(tokenizer.eos_token_id) == 1
        assert tokenizer.decode(response, skip_special_tokens=True).endswith("}")
        assert sample.rollout_logprobs is None


def test_a_supervised_sample_depends_on_seed_and_index_alone(tokenizer: Any) -> None:
    first, second = (SupervisedDataset("task:chain_sum", tokenizer, seed=4) for _ in range(2))
    walked = [first[i].labels.tolist() for i in range(30)]
    assert [second[i].labels.tolist() for i in reversed(range(30))] == walked[::-1]
    other = SupervisedDataset("task:chain_sum", tokenizer, seed=5)
    assert [other[i].labels.tolist() for i in range(30)] != walked


def test_supervised_pairs_come_from_a_file_too(tmp_path: Path, tokenizer: Any) -> None:
    sample = SupervisedDataset(write(tmp_path, {"prompt": "1+1=", "response": "2"}), tokenizer, seed=0)[0]
    assert sample.labels[sample.loss_mask].tolist() == [*tokenizer("2", add_special_tokens=False).input_ids, 2]
    for record, part in (
        ({"prompt": "1+1="}, "'response' is missing"),
        ({"prompt": "1+1=", "response": 2}, "strings|string, got"),
        ({"prompt": "", "response": "2"}, "non-empty"),
        ({"prompt": "1", "response": "2", "images": ["a.png"]}, "trained on text alone"),
    ):
        with pytest.raises(DataError, match=rf"rows\.jsonl:1: .*({part})"):
            SupervisedDataset(write(tmp_path, record), tokenizer, seed=0)


def test_position_t_predicts_token_t_plus_one() -> None:
    sample = to_training_sample([5, 6], [7, 2], [-0.5, -0.25], advantage=1.5)
    assert sample.tokens.tolist() == [5, 6, 7] and sample.labels.tolist() == [6, 7, 2]
    assert sample.loss_mask.tolist() == [False, True, True]
    assert sample.rollout_logprobs is not None
    assert sample.rollout_logprobs.tolist() == [0.0, -0.5, -0.25]
    assert sample.advantages.tolist() == [0.0, 1.5, 1.5] and sample.advantages.dtype == torch.float32


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_token_without_a_finite_rollout_logprob_leaves_the_loss_mask(bad: float) -> None:
    sample = to_training_sample([5], [7, 8, 2], [-0.5, bad, -0.25], advantage=1.0)
    assert sample.loss_mask.tolist() == [True, False, True]
    assert sample.rollout_logprobs is not None
    assert sample.rollout_logprobs.tolist() == [-0.5, 0.0, -0.25]
    assert sample.advantages.tolist() == [1.0, 0.0, 1.0]


def test_a_sample_needs_tokens_and_one_logprob_each() -> None:
    for prompt, response, logprobs in (([], [1], None), ([1], [], None), ([1], [2, 3], [-0.5])):
        with pytest.raises(ValueError):
            to_training_sample(prompt, response, logprobs, advantage=1.0)


def test_a_folder_without_a_tokenizer_is_an_error_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"{tmp_path}.*no tokenizer; expected tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{oops")
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_tokenizer(tmp_path)
