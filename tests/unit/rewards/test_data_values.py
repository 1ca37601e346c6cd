"""Any JSON that Python reads: refused with its line, or carried through all that is written of it later."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from columns import ids, logs, same
from megatron_dppo.data.chat import load_tokenizer
from megatron_dppo.data.prompts import PromptDataset, load_rows
from megatron_dppo.errors import DataError
from megatron_dppo.report.records import read_records
from megatron_dppo.rewards.functions import FunctionSpec
from megatron_dppo.rewards.item import RewardItem
from megatron_dppo.rewards.worker import Worker
from megatron_dppo.rollout.store import StoredRollouts, load_groups, save_groups
from megatron_dppo.run.evaluation import write_sample_responses
from megatron_dppo.types import Completion, Prompt, Rollout, RolloutGroup
from megatron_dppo_lab.supervised import SupervisedDataset

MODEL = Path(__file__).parents[3] / "examples/chain_sum/model"
TOKENIZER = load_tokenizer(MODEL)
LONE = "\ud800"


def text() -> st.SearchStrategy[str]:
    """Halves of pairs, null bytes, other line ends and marks of order among ordinary text."""
    odd = st.sampled_from([LONE, "\udfff", "\0", "\r\n", "\u2028", "\ufeff", "é", "\U0001f600", "1+1=", '"', "\\"])
    return st.lists(odd | st.text(max_size=3), max_size=4).map("".join)


def nested() -> st.SearchStrategy[Any]:
    numbers = st.integers() | st.just(10**4000) | st.floats() | st.booleans() | st.none()
    return st.recursive(
        numbers | text(), lambda part: st.lists(part, max_size=2) | st.dictionaries(text(), part, max_size=2)
    )


def deep(levels: int) -> Any:
    value: Any = "x"
    for _ in range(levels):
        value = [value]
    return value


def rows() -> st.SearchStrategy[dict[str, Any]]:
    message = st.fixed_dictionaries({"role": st.just("user") | text(), "content": text()})
    return st.fixed_dictionaries(
        {"prompt": text().map(lambda t: "1+1=" + t) | text() | st.lists(message, max_size=2), "label": nested()},
        optional={
            "metadata": nested(),
            LONE: nested(),
            "finish_reason": nested(),
            "deep": st.integers(0, 200).map(deep),
        },
    )


def downstream(prompt: Prompt, folder: Path) -> None:
    """Everything that is sent and written of a prompt."""
    completion = Completion(
        token_ids=ids([4, 5]), logprobs=logs([-0.5, -0.25]), finish_reason="stop", text=prompt.label, policy_version=0
    )
    rollout = Rollout(prompt=prompt, completion=completion, reward=1.0)
    group = RolloutGroup(prompt=prompt, rollouts=(rollout,))
    save_groups(folder / "groups", [StoredRollouts(0, prompt, group)])
    assert same(load_groups(folder / "groups", lambda position: prompt)[0].content, group)
    answers = write_sample_responses(folder, [group], 0, None)
    (record,) = read_records(folder / "samples.jsonl")
    assert (record["prompt"], record["label"]) == (prompt.text, prompt.label)
    (folder / "state.json").write_text(json.dumps({"answers_before": answers}, indent=2), "utf-8")


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True)
@given(rows())
@example({"prompt": "1+1=", "label": LONE})
@example({"prompt": "1+1=", "label": "2", "metadata": {"a": [{"b": LONE}]}})
@example({"prompt": "1+1=", "label": math.inf})
@example({"prompt": "1+1=", "label": 10**4000})
@example({"prompt": "1+1=\0\u2028", "label": "\0"})
def test_a_row_is_rejected_with_its_line_or_passes_every_stage(tmp_path: Path, row: dict[str, Any]) -> None:
    file = tmp_path / "rows.jsonl"
    line = json.dumps(row)
    file.write_text('{"prompt": "1+2=", "label": "3"}\n' + line + "\r\n", encoding="utf-8")
    try:
        loaded = load_rows(str(file), "train", deduplicate="off")
        prompts = PromptDataset(loaded.rows, TOKENIZER, max_prompt_tokens=10**6, max_new_tokens=1, context_length=10**6)
        prompts.fingerprint()
    except DataError as error:
        assert str(error).startswith("rows.jsonl:2: "), error
        return
    for index in range(len(prompts)):
        downstream(prompts[index], tmp_path)


def test_carried_columns_reach_the_reward_workers(tmp_path: Path) -> None:
    (tmp_path / "row.py").write_text("def reward(*, prompt, completion, label, metadata):\n    return 1.0\n")
    metadata = {"deep": deep(60), "null": "\0", "number": 10**400, "empty": None, "\u2028": 1e308}
    worker = Worker(FunctionSpec(f"{tmp_path / 'row.py'}:reward"), 30.0, concurrent=False)
    try:
        worker.launch()
        item = RewardItem(prompt="p", completion="c", label="l", metadata=metadata)
        worker.submit([0], [item])
        while (chunk := worker.receive()) is None:
            worker.connection.poll(0.1)
        assert chunk.outcomes[0].score == 1.0
    finally:
        worker.close()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"prompt": "1+1=", "label": "\\ud800"}', "half of a UTF-16 pair"),
        (b'{"prompt": "1+1=", "label": "2", "x": {"y": ["\\udfff"]}}', "field 'x' holds half"),
        (b'{"prompt": "1+1=", "label": "2", "\\ud800": 1}', "half of a UTF-16 pair"),
        (b'{"prompt": "1+1=", "label": NaN}', "NaN is not JSON"),
        (b'{"prompt": "1+1=", "label": "2", "x": -Infinity}', "-Infinity is not JSON"),
        (b'{"prompt": "1+1=", "label": 1e999}', "finite number"),
        (b'{"prompt": "1+1=", "label": ' + b"1" * 5000 + b"}", "not usable JSON"),
        (b'{"prompt": "1+1=", "label": "2", "label": "3"}', "the key 'label' stands"),
        (b'{"prompt": "1+1=", "label": "2", "x": ' + b"[" * 65 + b"]" * 65 + b"}", "nested more than 64"),
        (b'{"prompt": "1+1=", "label": "2", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested more than 64"),
        (b'{"prompt": "1+1=\xff", "label": "2"}', "not UTF-8"),
        (b"[1]", "expected a JSON object"),
    ],
)
def test_invalid_json_is_rejected_with_its_line(tmp_path: Path, line: bytes, words: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"prompt": "1+2=", "label": "3"}\n' + line + b"\n")
    with pytest.raises(DataError) as raised:
        load_rows(str(file), "train")
    assert str(raised.value).startswith("rows.jsonl:2: ") and words in str(raised.value)


def test_byte_order_marks_and_foreign_line_endings_are_not_part_of_the_text(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "1+1=", "label": "2"}\r\n\r\n{"prompt": "1+2=", "label": "3"}\r\n')
    assert [(r.prompt, r.label) for r in load_rows(str(file), "train").rows] == [("1+1=", "2"), ("1+2=", "3")]


def test_a_supervised_sample_longer_than_the_context_is_rejected_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    pairs = [{"prompt": "1+1=", "response": "2"}, {"prompt": "1+1=", "response": "2" * 40}]
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    data = SupervisedDataset(str(file), TOKENIZER, 0)
    length = max(data[i].num_tokens + 1 for i in range(40))
    data.check_lengths(length)
    with pytest.raises(DataError, match=rf"pairs.jsonl:2: .*{length} tokens .* {length - 1}\."):
        data.check_lengths(length - 1)
