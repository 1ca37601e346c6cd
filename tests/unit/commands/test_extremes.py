"""No traceback for any key at its extremes and for hostile model folders: a result, or exit code 2 with a message.

CI takes a sample with a fixed seed; ``long`` takes every input.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from megatron_dppo.commands.main import main
from megatron_dppo.config.schema import Config

EXAMPLE = Path(__file__).parents[3] / "examples/chain_sum"
VALUES = ("0", "-1", "1", "1e-30", "1e30", "99999999999999999999", "100000", "nan", "''", "/dev/null", "/", "a:b")
VALUES += ("x" * 5000, "{}", "[]", "null", "true", "task:nothing", "http://", "ü\n", "[[1]]", '{a = "b"}')
CONFIG_VALUES: tuple[Any, ...] = (0, -1, 1, "x", None, 1e30, [], {}, 2**70, 0.5, True)
CONTENTS: dict[str, bytes] = {
    "empty": b"",
    "list": b"[]",
    "table": b"{}",
    "null": b"null",
    "number": b"3",
    "text": b'"x"',
    "bytes": bytes(range(256)),
    "deep": b"[" * 100_000,
    "pointer": b"version https://git-lfs.github.com/spec/v1\n",
    "byte order mark": b"\xef\xbb\xbf{}",
}
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")
QUANTIZE = ["convert", "quantize", "model", "out", "--format", "fp8"]
DRY_RUN = ["train", str(EXAMPLE / "dppo.toml"), "--dry-run", "--parallel.expert_model_parallel_size", "1"]
DRY_RUN += ["--run.output_dir", "run", "--data.train", "rows.jsonl", "--data.eval", "rows.jsonl"]


def keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        kinds = [field.annotation, *typing.get_args(field.annotation)]
        nested = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if nested and name != "functions":
            yield from keys(nested[0], f"{prefix}{name}.")
        else:
            yield prefix + name


def write_config(key: str, value: Any) -> Callable[[Path], None]:
    def damage(model: Path) -> None:
        file = model / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))

    return damage


def remove_key(key: str) -> Callable[[Path], None]:
    def damage(model: Path) -> None:
        file = model / "config.json"
        content = json.loads(file.read_text())
        del content[key]
        file.write_text(json.dumps(content))

    return damage


def replace_file(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return damage


def damages() -> Iterator[tuple[str, Callable[[Path], None], list[str]]]:
    """Yield a name, a damage to a model's folder, and a command that reads it."""
    with_model = [*DRY_RUN, "--model.path", "model"]
    for key in json.loads((EXAMPLE / "model/config.json").read_text()):
        for value in CONFIG_VALUES:
            yield f"{key} = {value!r}", write_config(key, value), with_model
        yield f"without {key}", remove_key(key), with_model
    for name in FILES:
        makers: dict[str, Callable[[Path], object]] = {
            kind: (lambda file, text=text: file.write_bytes(text)) for kind, text in CONTENTS.items()
        }
        makers |= {"folder": Path.mkdir, "pipe": os.mkfifo, "loop": lambda file: file.symlink_to(file.name)}
        makers["nothing"] = lambda file: None
        for kind, make in makers.items():
            for command in (with_model, QUANTIZE):
                yield f"{name}: {kind}", replace_file(name, make), command


RUN_FILES = ("config.toml", "metrics.jsonl", "samples.jsonl", "starts.jsonl", ".megatron_dppo_run.json", "summary.json")
RUN_FILES += ("checkpoints/best.json", "checkpoints/step_000001/state.json", "checkpoints/step_000001/manifest.json")
RUN_COMMANDS = (
    ["report", "run"],
    ["diagnose", "run"],
    ["replay", "run", "--step", "1"],
    ["train", "copy.toml", "--dry-run"],
)


def run_cases() -> Iterator[tuple[str, Callable[[Path], None], list[str]]]:
    """Yield a name, a damage to a run's folder, and a command that reads it."""
    for name in RUN_FILES:
        makers: dict[str, Callable[[Path], object]] = {
            kind: (lambda file, text=text: file.write_bytes(text)) for kind, text in CONTENTS.items()
        }
        makers |= {"folder": Path.mkdir, "pipe": os.mkfifo, "loop": lambda file: file.symlink_to(file.name)}
        for kind, make in makers.items():
            for command in RUN_COMMANDS:
                yield f"{name}: {kind}", replace_file(name, make), command


INPUTS = [(key, value) for key in keys(Config) for value in VALUES]
DAMAGES = list(damages())
RUN_DAMAGES = list(run_cases())
SAMPLE = random.Random(0)


def check(command: list[str], label: str) -> int:
    """Run a command; any exception but the exit of the argument parser fails the test."""
    try:
        code = main(command)
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException as error:
        pytest.fail(f"{label}: {type(error).__name__}: {error}")
    assert code in (0, 2), label
    return code


def run_inputs(inputs: list[tuple[str, str]]) -> None:
    for key, value in inputs:
        check([*DRY_RUN, f"--{key}", value], f"--{key} {value[:40]}")


def run_damages(cases: list[tuple[str, Callable[[Path], None], list[str]]]) -> None:
    for label, damage, command in cases:
        for folder in ("model", "out", "run"):
            shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(EXAMPLE / "model", "model")
        damage(Path("model"))
        check(command, f"{label} ({command[0]})")


def run_run_damages(cases: list[tuple[str, Callable[[Path], None], list[str]]]) -> None:
    text = (EXAMPLE / "dppo.toml").read_text().replace('"model"', f'"{EXAMPLE}/model"')
    text = text.replace('"runs/chain_sum"', '"run"').replace("model_parallel_size = 2", "model_parallel_size = 1")
    Path("copy.toml").write_text(text)
    for label, damage, command in cases:
        shutil.rmtree("run", ignore_errors=True)
        Path("run").mkdir()
        Path("run/config.toml").write_text(text)
        marker = {"run_id": "a", "submission": "", "created": "2026-01-01T00:00:00"}
        Path("run/.megatron_dppo_run.json").write_text(json.dumps(marker))
        Path("run/starts.jsonl").write_text(json.dumps({"cwd": ".", "world_size": 1}) + "\n")
        damage(Path("run"))
        check(command, f"{label} ({command[0]})")


@pytest.fixture(autouse=True)
def in_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some prompts are all that it holds: the task of the example has thousands, which each command would read."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{number}+1=", "label": str(number + 1)} for number in range(32)]
    Path("rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def test_a_sample_of_keys_at_their_extremes() -> None:
    run_inputs(SAMPLE.sample(INPUTS, 30))


@pytest.mark.slow
def test_a_sample_of_hostile_model_folders() -> None:
    run_damages(SAMPLE.sample(DAMAGES, 30))


def test_a_sample_of_hostile_run_folders() -> None:
    run_run_damages(SAMPLE.sample(RUN_DAMAGES, 60))


@pytest.mark.long
def test_all_hostile_run_folders() -> None:
    assert len(RUN_DAMAGES) > 400
    run_run_damages(RUN_DAMAGES)


@pytest.mark.long
def test_every_key_at_its_extremes() -> None:
    assert len(INPUTS) > 3000
    run_inputs(INPUTS)


@pytest.mark.long
def test_all_hostile_model_folders() -> None:
    assert len(DAMAGES) > 400
    run_damages(DAMAGES)


NAMED: list[tuple[list[str], str]] = [
    (["--model.transformer.moe_permute_fusion", "true"], "Megatron's TransformerConfig rejects"),
    (["--rollout.temperature", "1e-30"], "rollout.temperature = 1e-30"),
    (["--run.threads_per_rank", "100000"], "run.threads_per_rank = 100000"),
    (["--reward.timeout_seconds", "1e30"], "reward.timeout_seconds = 1e+30"),
    (["--run.output_dir", "/"], "choose a separate folder"),
    (["--run.output_dir", ""], "the path is empty"),
]


def test_inputs_of_reports_are_refused_by_their_right_names(capsys: pytest.CaptureFixture[str]) -> None:
    for overrides, words in NAMED:
        assert check([*DRY_RUN, *overrides], str(overrides)) == 2
        assert words in capsys.readouterr().err, overrides
    for key, value, words in (
        ("num_experts_per_tok", 1, "num_experts_per_tok = 1, which is not supported; supported: at least 2"),
        ("num_experts_per_tok", 9, "num_experts_per_tok = 9"),
        ("hidden_size", 0, "hidden_size = 0, which is not supported; supported: a whole number from 1"),
        ("rms_norm_eps", 1e30, "rms_norm_eps = 1e+30"),
        ("num_key_value_heads", 3, "a divisor of the"),
    ):
        shutil.rmtree("model", ignore_errors=True)
        shutil.copytree(EXAMPLE / "model", "model")
        write_config(key, value)(Path("model"))
        assert check([*DRY_RUN, "--model.path", "model"], key) == 2
        assert words in capsys.readouterr().err, key
