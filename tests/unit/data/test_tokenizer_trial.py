"""A model folder takes neither time nor memory without limit, whatever its files say."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.data import tokenizer_trial as trial
from megatron_dppo.data.chat import load_tokenizer
from megatron_dppo.errors import CheckpointError
from megatron_dppo.hf.config_keys import check_counts
from megatron_dppo.hf.folder import read_hf_config
from tests.unit.hf.test_config_keys import PUBLISHED

MODEL = Path(__file__).parents[3] / "examples/chain_sum/model"
LOOP = "{% for a in range(99999) %}"
TEMPLATES = {
    "nested loops": LOOP * 3 + "{% endfor %}" * 3,
    "nested macros": "{% macro m0() %}{% for i in range(9) %}x{% endfor %}{% endmacro %}"
    + "".join(
        f"{{% macro m{n}() %}}{{% for i in range(9) %}}{{{{ m{n - 1}() }}}}{{% endfor %}}{{% endmacro %}}"
        for n in range(1, 12)
    )
    + "{% if m11() %}{% endif %}",
    "multiplied text": "{{ 'a' * 10000000000 }}",
    "multiplied text without output": "{% set a = 'a' * 10000000000 %}",
    "multiplied list": "{% set a = [0] * 10000000000 %}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "joined range": "{{ range(99999) | join('a' * 99999) }}",
    "recursive macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive loop": "{% for a in [[[]]] recursive %}{% for b in range(99999) %}{% for c in range(99999) %}"
    "{% endfor %}{% endfor %}{{ loop(a) }}{% endfor %}",
    "chain of replacements": "{% set t = namespace(x='a') %}{% for i in range(40) %}"
    "{% set t.x = t.x | replace('a', 'aa') %}{% endfor %}{{ t.x }}",
    "padded text": "{{ '%9999999999d' | format(1) }}",
    "centered": "{{ 'a' | center(9999999999) }}",
    "only with tools": "{% if tools %}" + LOOP * 3 + "{% endfor %}" * 3 + "{% endif %}",
    "only with a tool's result": "{% for m in messages %}{% if m.role == 'tool' %}{{ 'a' * 10000000000 }}"
    "{% endif %}{% endfor %}",
    "only without a generation prompt": "{% if not add_generation_prompt %}"
    + LOOP * 3
    + "{% endfor %}" * 3
    + "{% endif %}",
    "only after a thought": "{% for m in messages if m.reasoning_content %}{{ 'a' * 10000000000 }}{% endfor %}",
    "long output": "{% for a in range(99999) %}{{ 'a' * 999 }}{% endfor %}",
    "block of a mask": "{% generation %}" + LOOP * 3 + "{% endfor %}" * 3 + "{% endgeneration %}",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a small model, which the trial gives a second of processor time."""
    monkeypatch.setattr(trial, "CPU_SECONDS", 1)
    shutil.copytree(MODEL, tmp_path / "model")
    return tmp_path / "model"


def change_tokenizer(folder: Path, **parts: Any) -> None:
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | parts))


def test_the_tokenizer_of_an_example_is_loaded(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    assert load_tokenizer(folder).encode("1=")


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_without_an_end_is_refused(name: str, folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(TEMPLATES[name])
    with pytest.raises(CheckpointError, match=r"chat_template.jinja .* end within"):
        load_tokenizer(folder)


@pytest.mark.parametrize("name", ["a text", "a list by name", "a folder of templates", "chat_template.json"])
def test_every_place_of_a_template_is_tried(name: str, folder: Path) -> None:
    text = TEMPLATES["multiplied text"]
    file = folder / "tokenizer_config.json"
    values = json.loads(file.read_text())
    if name == "a text":
        file.write_text(json.dumps(values | {"chat_template": text}))
    elif name == "a list by name":
        templates = [{"name": "default", "template": "x"}, {"name": "tool_use", "template": text}]
        file.write_text(json.dumps(values | {"chat_template": templates}))
    elif name == "chat_template.json":
        (folder / name).write_text(json.dumps({"chat_template": text}))
    else:
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates/tool_use.jinja").write_text(text)
    with pytest.raises(CheckpointError, match="not end within"):
        load_tokenizer(folder)


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


DOUBLE = replace({"String": "a"}, "aa")
TOKENIZERS: dict[str, dict[str, Any]] = {
    "doubling normalizers": {"normalizer": {"type": "Sequence", "normalizers": [DOUBLE] * 40}},
    "nested sequences": {
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [DOUBLE] * 10}] * 4}
    },
    "prepended text": {"normalizer": {"type": "Sequence", "normalizers": [replace({"Regex": "."}, "ab")] * 40}},
    "fixed padding": {
        "padding": {
            **{"strategy": {"Fixed": 10**10}, "direction": "Right", "pad_to_multiple_of": None},
            **{"pad_id": 0, "pad_type_id": 0, "pad_token": "x"},
        }
    },
    "doubling decoders": {"decoder": {"type": "Sequence", "decoders": [replace({"Regex": "."}, "ab")] * 40}},
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_that_grows_without_limit_is_refused(name: str, folder: Path) -> None:
    change_tokenizer(folder, **TOKENIZERS[name])
    with pytest.raises(CheckpointError, match=r"tokenizer.json of .* end within"):
        load_tokenizer(folder)


def test_a_changed_folder_is_tried_again_and_an_unchanged_one_is_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[Any] = []
    run = subprocess.run
    monkeypatch.setattr(trial.subprocess, "run", lambda *args, **kwargs: tries.append(args) or run(*args, **kwargs))
    load_tokenizer(folder)
    load_tokenizer(folder)
    assert len(tries) == 1
    (folder / "chat_template.jinja").write_text(TEMPLATES["centered"])
    with pytest.raises(CheckpointError):
        load_tokenizer(folder)
    assert len(tries) == 2


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_of_published_models_are_accepted(name: str) -> None:
    check_counts(PUBLISHED[name])


@pytest.mark.parametrize(
    "keys",
    [
        {"num_hidden_layers": 10**9},
        {"n_layers": 2000},
        {"num_experts": 10**9},
        {"num_hidden_layers": 1000, "num_experts": 1000},
        {"first_k_dense_replace": 10**12},
        {"num_nextn_predict_layers": 10**9},
        {"mtp_num_hidden_layers": 10**9},
        {"n_shared_experts": 10**9},
        {"text_config": {"model_type": "qwen3_moe", "num_hidden_layers": 10**9}},
        {"vision_config": {"depth": 10**9}},
        {"num_hidden_layers": 10**30},
        {"num_labels": 10**9},
        {"mlp_only_layers": list(range(10**6))},
        {"id2label": {str(number): "a" * 9 for number in range(300_000)}},
    ],
)
def test_counts_that_no_model_has_are_refused_before_anything_is_built(keys: dict[str, Any], folder: Path) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | keys))
    with pytest.raises(CheckpointError, match=r"config.json has .*at most \d+"):
        read_hf_config(folder)


def test_an_interpreter_that_does_not_start_says_nothing_of_the_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "CHILD", folder / "absent.py")
    assert Path(sys.executable).exists() and load_tokenizer(folder)
