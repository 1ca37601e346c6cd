"""Messages that a newcomer meets first: one for each cause, with a fix that works."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.commands.main import main
from megatron_dppo.config.io import read_config
from megatron_dppo.data.data_rows import iter_rows
from megatron_dppo.errors import DataError
from megatron_dppo.files import is_hub_name
from megatron_dppo.setup.resume import differing_fields
from tests.unit.published_folders import published_config

EXAMPLES = Path(__file__).parents[3] / "examples"
CHAIN_SUM = EXAMPLES / "chain_sum/dppo.toml"
SINGLE = ("--parallel.expert_model_parallel_size", "1")


@pytest.fixture
def single(dry: Any) -> Any:
    """Dry-run the example on one process."""
    return partial(dry, *SINGLE)


def test_a_hub_name_gets_one_message_with_the_download(single: Any, tmp_path: Path) -> None:
    code, _, error = single("--model.path", "Qwen/Qwen3-0.6B")
    assert code == 2 and error.count("\n  - ") == 0, error
    assert "Fix: hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B, then model.path = 'Qwen3-0.6B'" in error
    # The fix leads on: the folder is read, and only what it lacks is named.
    (tmp_path / "Qwen3-0.6B").mkdir()
    (tmp_path / "Qwen3-0.6B/config.json").write_text(json.dumps(published_config("Qwen3-0.6B")))
    error = single("--model.path", "Qwen3-0.6B")[2]
    assert "is not a Hugging Face folder" not in error and "chat_template.jinja" in error
    for path in ("absent", "./owner/name", "absent/sub/folder"):
        code, _, error = single("--model.path", path)
        assert code == 2 and "hf download" not in error and "config.json is missing" in error, error


def test_a_path_is_no_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    assert is_hub_name("Qwen/Qwen3-0.6B")
    assert not any(map(is_hub_name, ("models/Qwen3-0.6B", "./Qwen3-0.6B", "~/Qwen3-0.6B", "/Qwen3-0.6B", "Qwen3")))


def test_serve_looks_at_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    config = str(EXAMPLES / "chain_sum/sglang.toml")
    for path in (tmp_path / "empty", tmp_path / "absent"):
        assert main(["serve", config, "--dry-run", "--model.path", str(path)]) == 2
        output = capsys.readouterr()
        assert f"model.path = {str(path)!r} is not a Hugging Face folder" in output.err and not output.out
    assert main(["serve", config, "--dry-run"]) == 0


@pytest.mark.parametrize(
    ("key", "text", "has_fix"),
    [
        ("optimizer.lr", "1e-6", True),
        ("run.num_steps", " 3 ", True),
        ("run.overwrite", "true", True),
        ("run.num_steps", "many", False),
        ("optimizer.lr", "[1]", False),
    ],
)
def test_a_number_in_quotes_is_told_to_lose_them(key: str, text: str, has_fix: bool, tmp_path: Path) -> None:
    section, name = key.split(".")
    file = tmp_path / "c.toml"
    file.write_text(f'extends = "{CHAIN_SUM}"\n[{section}]\n{name} = "{text}"\n')
    (problem,) = read_config(file, []).problems
    assert problem.startswith(f"{key} = {text!r}: Input should be")
    assert problem.endswith(f"Fix: write it without quotes: {text.strip()}") == has_fix


def test_a_misspelt_key_is_one_problem(tmp_path: Path) -> None:
    lines = CHAIN_SUM.read_text().replace("samples_per_prompt", "samples_per_promt", 1)
    file = tmp_path / "c.toml"
    file.write_text(lines)
    problems = read_config(file, []).problems
    assert [text for text in problems if "samples_per_prom" in text] == [
        "rollout.samples_per_promt = 16: unknown key; did you mean 'samples_per_prompt'?"
    ]
    # A key that is missing, and no misspelt one beside it.
    file.write_text(CHAIN_SUM.read_text().replace("samples_per_prompt = 16\n", "", 1))
    assert "rollout.samples_per_prompt is missing; it has no default" in read_config(file, []).problems


def test_a_folder_that_is_no_run_is_used_with_a_line(single: Any, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert "is no run" not in single("--run.output_dir", "out")[1]
    for name in "abcd":
        (tmp_path / "out" / name).write_text("mine")
    code, out, _ = single("--run.output_dir", "out")
    assert code == 0 and "note     out is no run and not empty (a, b, c, ...)" in out


def test_a_foreign_run_shows_the_fields_that_differ() -> None:
    old, new = {"family": "llama", "num_layers": 30, "bias": None}, {"family": "llama", "num_layers": 2, "width": 8}
    assert differing_fields(old, new) == ({"num_layers": 30, "width": None}, {"num_layers": 2, "width": 8})
    assert differing_fields("a", "b") == ("a", "b")


def test_a_name_with_bytes_that_are_not_utf8_is_named(single: Any) -> None:
    error = single("--run.output_dir", os.fsdecode(b"r\xe9sultats"))[2]
    assert "bytes that are not UTF-8" in error and "control character" not in error


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("a.csv", "prompt,label\na,b\n", r"is a CSV table.*pandas\.read_csv\(FILE\)\.to_json\("),
        ("a.tsv", "prompt\tlabel\na\tb\n", r"is a TSV table.*sep='\\t'"),
        ("a.yaml", "- prompt: a\n", "is YAML"),
        ("a.yml", "- prompt: a\n", "is YAML"),
        ("a.json", '{"prompt": ["a", "b"], "label": ["1", "2"]}', "a column of 2 texts"),
        (
            "a.jsonl",
            '{"prompt": "a", "label": ["1"]}',
            r"got .*Fix: .*data\.label_key = ''.*metadata\['label'\]",
        ),
        ("b.jsonl", '{"prompt": "a", "label": true}', "got True. Fix"),
        (
            "c.jsonl",
            '{"prompt": "a", "reward_model": {"ground_truth": {"target": ["x"]}}}',
            r"'reward_model\.ground_truth' must be .*metadata\['reward_model'\]",
        ),
        ("d.jsonl", '{"prompt": [{"role": "user", "content": ""}], "label": "1"}', "all messages"),
    ],
)
def test_other_data_names_the_way(name: str, content: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=text):
        list(iter_rows(str(tmp_path / name), "train"))


@pytest.mark.parametrize(
    ("answer", "label"),
    [
        ("2 + 3 = 5\n#### 5", "5"),
        ("2 + 3 = 5\n####5", "5"),
        ("a\n#### 1\nb\n####  2", "2"),
        ("a\n##### 5", "a\n##### 5"),
        ("no####5", "no####5"),
    ],
)
def test_the_answer_after_four_hashes_needs_no_blank(answer: str, label: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"question": "q", "answer": answer}))
    (row,) = iter_rows(str(tmp_path / "a.jsonl"), "train")
    assert row.label == label


def test_a_label_as_a_list_reaches_the_function_as_metadata(tmp_path: Path) -> None:
    """The way that the message names."""
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "label": ["1", "2"]}')
    (row,) = iter_rows(str(tmp_path / "a.jsonl"), "train", label_key="")
    assert row.label == "" and row.metadata == {"label": ["1", "2"]}
