"""Chat templates that print the date: a run has that of its first start, on every day and in every command."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers.utils import chat_template_utils

from megatron_dppo.data.chat import ChatOptions, load_tokenizer
from megatron_dppo.errors import DataError
from megatron_dppo.process import marker as marker_module
from megatron_dppo.process.marker import MARKER, Marker, first_start, new_marker, read_marker, write_marker
from megatron_dppo.rewards import FunctionSpec, RewardItem, RunInfo
from megatron_dppo.rewards.functions import load
from megatron_dppo.run.offline import single_prompt_template
from megatron_dppo.setup import run_folder
from megatron_dppo.setup.inputs import PromptReader
from megatron_dppo.setup.run_folder import template_time
from megatron_dppo_agents.template import ChatTemplate
from megatron_dppo_conversations.chat_template import apply_chat_template
from tests.unit.configs import config

MODEL = Path(__file__).parents[3] / "examples/chain_sum/model"
LLAMA = """{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{{- date_string }}
{%- for m in messages %}{{ m.content }}{% endfor %}"""
TEMPLATES = [
    LLAMA,
    "\n  {{ strftime_now('%Y-%m-%d') }}\n{% for m in messages %}\n  {{ m.content }}\n{% endfor %}",
    "  {% if true %}\n{{ strftime_now('%A, %-d %B, week %V, %H:%M:%S; 100%%') }}{% endif %}",
    "{%- macro today() %}{{ strftime_now('%j/%y') }}{% endmacro %}{{ today() }}{{ today()|length }}",
    "{% set f = '%I ' + '%p' %}{{ strftime_now(f) }} {{ strftime_now is defined }}",
    "{{ messages[0].content }} without a date",
]
CHAT = [{"role": "user", "content": "1+1="}]
NOON = datetime(2026, 3, 5, 12, 4, 9)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(MODEL)


@pytest.mark.parametrize("template", TEMPLATES, ids=range(len(TEMPLATES)))
def test_the_text_is_what_transformers_writes_at_that_time(
    tokenizer: Any, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer.chat_template = template
    monkeypatch.setattr(chat_template_utils, "datetime", SimpleNamespace(now=lambda: NOON))
    expected = tokenizer.apply_chat_template(CHAT, tokenize=False)
    monkeypatch.setattr(chat_template_utils, "datetime", SimpleNamespace(now=lambda: datetime(1999, 1, 1)))
    assert apply_chat_template(tokenizer, CHAT, NOON) == expected
    assert (
        apply_chat_template(tokenizer, CHAT, NOON, tokenize=True)
        == tokenizer(expected, add_special_tokens=False).input_ids
    )


def test_agents_and_rows_see_the_same_date(tokenizer: Any) -> None:
    tokenizer.chat_template = LLAMA.replace("%d %b %Y", "%d+")
    messages = [{"role": "user", "content": "1"}]
    assert (
        ChatTemplate(tokenizer, {}, NOON).opening(messages, []) == tokenizer("05+1", add_special_tokens=False).input_ids
    )
    options = ChatOptions(now=NOON)
    row = SimpleNamespace(prompt=messages, location="a:1", is_problem=False, tools=list)
    assert options.render(row, tokenizer)[0] == "05+1"


@pytest.mark.parametrize("draw", ["{{ [1, 2] | random }}", "{{ lipsum(n=1) }}", "{{ [1]|random}}"])
def test_a_template_that_draws_at_random_is_refused(tokenizer: Any, draw: str) -> None:
    tokenizer.chat_template = "{{ messages[0].content }}" + draw
    with pytest.raises(DataError, match="draws at random"):
        ChatOptions().check(tokenizer)
    tokenizer.chat_template = "{{ messages[0].content }} a random word"
    ChatOptions().check(tokenizer)


def set_time(monkeypatch: pytest.MonkeyPatch, now: datetime) -> None:
    for module in (marker_module, run_folder):
        monkeypatch.setattr(module, "process_time", lambda: now)


def test_the_first_start_is_recorded_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_time(monkeypatch, NOON)
    assert first_start(tmp_path) == NOON
    write_marker(tmp_path, new_marker())
    tomorrow = datetime(2026, 3, 6, 1, 0, 0)
    set_time(monkeypatch, tomorrow)
    assert first_start(tmp_path) == NOON
    assert template_time(config(run={"output_dir": str(tmp_path)}).run) == NOON
    moved = config(run={"output_dir": str(tmp_path), "overwrite": True})
    assert template_time(moved.run) == tomorrow, "that run will be moved aside"
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    write_marker(tmp_path, Marker("id", "SLURM_JOB_ID=7", NOON.strftime("%Y-%m-%d %H:%M:%S")))
    assert template_time(moved.run) == NOON, "a requeued job resumes its run"
    marker = read_marker(tmp_path)
    assert marker is not None
    write_marker(tmp_path, Marker(marker.run_id, marker.submission, marker.created, moving_to="old"))
    assert first_start(tmp_path) == tomorrow
    (tmp_path / MARKER).write_text("{damaged")
    assert first_start(tmp_path) == tomorrow


def test_prompts_of_a_run_are_those_of_its_first_start(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer.chat_template = LLAMA.replace("%d %b %Y", "%d+%H+%S+")
    data = tmp_path / "chat.jsonl"
    data.write_text(json.dumps({"prompt": CHAT, "label": "2"}) + "\n")
    settings = config(run={"output_dir": str(tmp_path / "run")}, data={"train": str(data), "eval": None})
    (tmp_path / "run").mkdir()
    set_time(monkeypatch, NOON)

    def prompts(**settings_of_reader: Any) -> Any:
        return PromptReader(settings, tokenizer, 256, **settings_of_reader).read(str(data), "train", "train")

    first = prompts()
    assert first[0].text == "05+12+09+1+1="
    write_marker(tmp_path / "run", new_marker())
    set_time(monkeypatch, datetime(2027, 1, 1))
    again = prompts()
    assert (again[0].text, again.fingerprint()) == (first[0].text, first.fingerprint())
    assert prompts(now=datetime(2027, 1, 1))[0].text == "01+00+00+1+1="


def test_a_reward_model_sees_the_date_of_the_run(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.chat_template = LLAMA.replace("%d %b %Y", "%d+")
    tokenizer.save_pretrained(tmp_path / "model")
    options = {"url": "http://127.0.0.1:1", "endpoint": "vllm_pooling", "tokenizer": str(tmp_path / "model")}
    spec = FunctionSpec("reward_model", run_info=RunInfo(started_at=NOON), options=options)
    question = load(spec).function._build_question(RewardItem(prompt="1+1=", completion="2", label=""))
    assert question == tokenizer("05+1+1=2", add_special_tokens=False).input_ids


ROWS = {
    "messages": ({"prompt": CHAT, "label": "2"}, True, "chat messages"),
    "text": ({"prompt": "1+1=", "label": "2"}, False, "plain text"),
    "problem": ({"problem": "1+1", "answer": "2"}, False, "plain text"),
}


@pytest.mark.parametrize("kind", ROWS)
def test_a_single_prompt_is_sent_as_those_of_the_run(kind: str, tmp_path: Path) -> None:
    row, expected, reason = ROWS[kind]
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps(row) + "\n")
    is_chat, text = single_prompt_template(config(data={"train": str(data)}).data, MODEL)
    assert is_chat is expected and reason in text
    for forced in (True, False):
        settings = config(data={"train": str(data), "apply_chat_template": forced})
        assert single_prompt_template(settings.data, MODEL)[0] is forced


def test_a_single_prompt_of_a_run_without_its_data_is_plain_and_says_why(tmp_path: Path) -> None:
    missing = config(data={"train": str(tmp_path / "gone.jsonl")}, model={"path": str(MODEL)})
    is_chat, text = single_prompt_template(missing.data, MODEL)
    assert not is_chat and "gone.jsonl" in text and "--data.apply_chat_template true" in text
    with_system = config(data={"train": "gone.jsonl", "system_prompt": "be brief"}, model={"path": str(MODEL)})
    assert single_prompt_template(with_system.data, MODEL)[0]


def test_bare_problems_need_the_template_of_the_tokenizer_in_use(tmp_path: Path, tokenizer: Any) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"problem": "1+1", "answer": "2"}) + "\n")
    tokenizer.chat_template = "{{ messages[0].content }}="
    tokenizer.save_pretrained(tmp_path / "other")
    settings = config(data={"train": str(data)}, model={"path": str(MODEL)})
    assert single_prompt_template(settings.data, tmp_path / "other") == (
        True,
        "data.train has bare problems, and the tokenizer has a chat template",
    )
