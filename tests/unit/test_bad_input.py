"""Bad input ends with exit code 2 and a message that names the value, the place and the fix, before anything starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megatron_dppo.commands.main import main, train_main

EXAMPLE = Path(__file__).parents[2] / "examples/chain_sum"
MODEL = EXAMPLE / "model"


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run the example with overrides; returns the message of the refusal."""
    monkeypatch.chdir(tmp_path)

    def run(*overrides: str, config: Path = EXAMPLE / "dppo.toml") -> str:
        single = ("--parallel.expert_model_parallel_size", "1", "--run.output_dir", str(tmp_path / "run"))
        code = train_main([str(config), *single, *overrides])
        assert code == 2
        assert not (tmp_path / "run").exists(), "a refused run must not leave a folder behind"
        error = capsys.readouterr().err
        assert error.startswith("\nerror: ")
        return error

    return run


def write_jsonl(path: Path, *rows: object) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def test_missing_configuration_file(refused, tmp_path: Path) -> None:
    assert "'nowhere.toml' does not exist" in refused(config=Path("nowhere.toml"))


def test_missing_data_file(refused) -> None:
    assert "data file 'nowhere.jsonl' does not exist" in refused("--data.train", "nowhere.jsonl")


def test_bad_data_row_names_line_and_field(refused, tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "d.jsonl", {"prompt": "1+1=", "label": "2"}, {"prompt": "1+2="})
    assert "d.jsonl:2: field 'label' is missing; the row has ['prompt']" in refused("--data.train", file)
    file = write_jsonl(tmp_path / "d.jsonl", {"prompt": "1+1=", "label": "2"}, "{not json")
    assert "d.jsonl:2: not valid JSON" in refused("--data.train", file)


def test_empty_data_set(refused, tmp_path: Path) -> None:
    assert "has no rows" in refused("--data.train", write_jsonl(tmp_path / "empty.jsonl"))


def test_prompt_longer_than_the_context(refused, tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "long.jsonl", {"prompt": "1+" * 120 + "1=", "label": "121"})
    message = refused("--data.train", file)
    assert "long.jsonl:1" in message and "context of 256" in message and "rollout.max_new_tokens = 40" in message
    message = refused("--eval.max_new_tokens", "252")
    assert "context of 256" in message and "lower eval.max_new_tokens" in message and "rollout." not in message


def test_unknown_loss_and_unknown_key(refused) -> None:
    assert "loss.name = 'dppo_topk'" in refused("--loss.name", "dppo_topk")
    assert "did you mean 'clip_ratio_low'" in refused("--loss.clip_ratio_lo", "0.1")


def test_dppo_without_rollout_logprobs(refused) -> None:
    message = refused("--rollout.return_logprobs", "false")
    assert "dppo_binary_tv" in message and "rollout.return_logprobs" in message


def test_wrong_hugging_face_folder(refused, tmp_path: Path) -> None:
    assert "config.json is missing" in refused("--model.path", str(tmp_path))
    copy = tmp_path / "gemma"
    shutil.copytree(MODEL, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "model_type": "gemma"}))
    assert "model_type 'gemma' has no mapping" in refused("--model.path", str(copy))


def test_folder_without_weights(refused, tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE / "model", tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    message = refused("--model.path", str(tmp_path / "model"))
    assert "no *.safetensors weights" in message


def test_impossible_layout_shows_the_arithmetic(refused) -> None:
    message = refused("--tensor-model-parallel-size", "2")
    assert "= 2 * 1 * 1 = 2 does not divide the 1 processes" in message
    assert "1 is not a multiple" not in message


def test_verbose_dry_run_prints_the_resolved_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        str(EXAMPLE / "dppo.toml"),
        "--dry-run",
        "--verbose",
        "--expert-model-parallel-size",
        "1",
        "--lr",
        "1e-4",
    ]
    assert main(["train", *arguments]) == train_main(arguments) == 0
    output = capsys.readouterr().out
    assert "lr = 0.0001" in output and "16 prompts x 16 samples = 256 samples a step" in output
    assert output[: len(output) // 2] == output[len(output) // 2 :], "both entry points are one program"


def test_router_replay_of_a_dense_model_and_of_routers_that_would_ignore_it(refused, tmp_path: Path) -> None:
    dense = tmp_path / "dense"
    shutil.copytree(MODEL, dense)
    values = json.loads((dense / "config.json").read_text())
    sparse = ("norm_topk_prob", "mlp_only_layers", "decoder_sparse_step", "moe_intermediate_size")
    dense_values = {k: v for k, v in values.items() if "expert" not in k and k not in sparse}
    (dense / "config.json").write_text(
        json.dumps(dense_values | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]})
    )
    message = refused("--train.router_replay", "R3", "--model.path", str(dense))
    assert "train.router_replay = 'rollout'" in message and "dense model" in message
    message = refused("--train.router_replay", "R3", "--model.transformer.moe_router_fusion", "true")
    assert "moe_router_fusion = True cannot be combined with train.router_replay" in message
