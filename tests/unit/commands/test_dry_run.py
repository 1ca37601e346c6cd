"""Output of ``train --dry-run``; it refuses what the run would refuse."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_dppo.commands.main import train_main
from tests.unit.published_folders import write_published_folder

EXAMPLES = Path(__file__).parents[3] / "examples"
CHAIN_SUM = EXAMPLES / "chain_sum/dppo.toml"
SINGLE = ("--parallel.expert_model_parallel_size", "1")


def rows(file: Path, prompts: list[str]) -> str:
    file.write_text("".join(json.dumps({"prompt": text, "label": str(eval(text[:-1]))}) + "\n" for text in prompts))
    return str(file)


def test_thirty_lines_say_what_the_run_will_do(dry: Any, tmp_path: Path) -> None:
    """32 prompts in 10 steps of 16 are 5 passes; 3 of the 8 held-out prompts are trained on."""
    from transformers import AutoConfig, AutoModelForCausalLM

    train = [f"{i}+{j}=" for i in range(1, 9) for j in range(1, 5)]
    data = ["--data.train", rows(tmp_path / "a.jsonl", train)]
    data += ["--data.eval", rows(tmp_path / "b.jsonl", [*train[:3], *(f"{i}-9=" for i in range(5))])]
    code, out, error = dry(*data, *SINGLE, "--run.num_steps", "10", "--checkpoint.save_every", "4")
    assert (code, error) == (0, "") and len(out.splitlines()) <= 30
    assert "10 steps x 16 prompts = 160 prompts = 5 passes over 32" in out
    assert "warning  3 of 8 prompts of data.eval are also in data.train" in out
    count = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(EXAMPLES / "chain_sum/model")).num_parameters()
    assert f"model    {count:,} parameters (qwen3_moe, fp32)" in out
    # 4 bytes of weight, 4 of the fp32 copy and 8 of Adam's moments, at most keep + 1 at a time.
    assert f"disk     {16 * count / 1e6:.1f} MB a checkpoint, at most 3 at a time = {48 * count / 1e6:.1f} MB" in out
    assert (
        "saves    the first after 30 minutes, then every 30 minutes in the background; at steps 4, 8; at the end" in out
    )
    first = next(line for line in out.splitlines() if line.startswith("prompt   "))
    text, label = first.split("'")[1], first.split("'")[3]
    assert text in train and str(eval(text[:-1])) == label
    assert f"the made-up answer 'The answer is \\\\boxed{{{label}}}.' scores 1" in out
    assert "[run]" not in out and "[run]" in dry(*data, *SINGLE, "--verbose")[1]


def test_a_reward_that_fails_on_the_made_up_answer_is_a_warning_and_one_that_asks_a_server_is_not_called(
    dry: Any, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("def score(completion, label):\n    return 1 / (len(label) - len(label))\n")
    code, out, _ = dry(*SINGLE, "--reward.function", "mine.py:score")
    assert code == 0 and "warning  the reward failed on the made-up answer" in out and "ZeroDivisionError" in out
    assert "All checks passed." not in out and "All checks passed but the warning" in out
    remote = [
        "--reward.function",
        "reward_model",
        "--reward.options.endpoint",
        "vllm_classify",
        "--reward.options.url",
        "http://127.0.0.1:9",
    ]
    out = dry(*SINGLE, *remote)[1]
    assert "reward   not tried: reward_model sends requests to a server" in out


REWARDS = """
import functools

def hidden(function):
    return lambda *args, **kwargs: function(*args, **kwargs)

def text(completion, label, **_):
    return 'good'

async def nothing(completion, label, **_):
    pass

def batch(completions, **_):
    return 1.0

@hidden
def unknown(completion, answer):
    return 1.0
"""


def test_a_reward_of_the_wrong_type_is_refused_with_its_place(dry: Any, tmp_path: Path) -> None:
    """No answer changes the type, so a run would end at its first scoring."""
    (tmp_path / "mine.py").write_text(REWARDS)
    trl = ("--reward.signature", "trl")
    ours = ("--reward.signature", "megatron_dppo")
    for name, text, line, signature in (
        ("text", "TypeError: the reward must be a number, got 'good'", 7, ()),
        ("nothing", "TypeError: the reward must be a number, got None", 10, ()),
        ("batch", "TypeError: expected a list of rewards from a batch function, got 1.0", 13, trl),
        ("unknown", "unexpected keyword argument", 5, ours),
    ):
        code, out, error = dry(*SINGLE, "--reward.function", f"mine.py:{name}", *signature)
        assert code == 2 and "All checks passed" not in out, name
        assert text in error and f"mine.py:{line})" in error and "return float(...)" in error, error


def test_a_last_step_at_learning_rate_zero_is_a_warning(dry: Any) -> None:
    """The schedule ends at the last step, so its rate is min_lr; the rate that the note speaks of is Megatron's own."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    for style, min_lr, warmup, warns in (
        ("linear", 0.0, 0, True),
        ("cosine", 0.0, 5, True),
        ("linear", 1e-5, 0, False),
        ("constant", 0.0, 0, False),
        ("linear", 0.0, 12, False),  # the warm-up is longer than the run
    ):
        keys = {"lr_decay_style": style, "min_lr": min_lr, "lr_warmup_steps": warmup}
        settings = [part for name, value in keys.items() for part in (f"--optimizer.{name}", str(value))]
        out = dry(*SINGLE, "--run.num_steps", "10", *settings)[1]
        assert ("warning  the learning rate is 0 in the last of 10 steps" in out) == warns, keys
        group = {"lr": 0.0, "wd_mult": 1.0, "lr_mult": 1.0}
        scheduler = OptimizerParamScheduler(
            SimpleNamespace(param_groups=[group]),
            init_lr=0.0,
            max_lr=3e-4,
            min_lr=min_lr,
            lr_warmup_steps=warmup,
            lr_decay_steps=max(10, warmup + 1),
            lr_decay_style=style,
            start_wd=0.0,
            end_wd=0.0,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )
        scheduler.step(increment=10)
        assert (group["lr"] == 0) == warns


def test_problems_come_after_layout_and_arithmetic(dry: Any, tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES / "chain_sum/model", tmp_path / "m")
    (tmp_path / "m/tokenizer.json").unlink()
    for overrides in (["--data.train", "absent.jsonl"], ["--model.path", "absent"], ["--model.path", "m"]):
        code, out, error = dry(*overrides, "--world-size", "4")
        assert code == 2 and error, overrides
        assert "layout   4 processes" in out and "16 prompts x 16 samples = 256 samples a step, 64 on each of 4" in out


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused_by_run_and_dry_run(
    dry: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(EXAMPLES / "chain_sum/model", tmp_path / "m")
    config = json.loads((tmp_path / "m/config.json").read_text())
    tokenizer = json.loads((tmp_path / "m/tokenizer.json").read_text())
    tokenizer["added_tokens"].append(
        {**dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False), "special": True}
        | {"id": config["vocab_size"], "content": "<extra>"}
    )
    (tmp_path / "m/tokenizer.json").write_text(json.dumps(tokenizer))
    expected = (
        f"token '<extra>' with id {config['vocab_size']}, and config.json has vocab_size = {config['vocab_size']}"
    )
    code, _, error = dry(*SINGLE, "--model.path", "m")
    assert code == 2 and expected in error
    assert train_main([str(CHAIN_SUM), *SINGLE, "--model.path", "m"]) == 2
    assert expected in capsys.readouterr().err and not (tmp_path / "runs").exists()


def test_a_model_that_megatron_refuses_to_build_is_refused(dry: Any) -> None:
    """Its TransformerConfig accepts this key; the random state tracker of the model does not."""
    code, out, error = dry("--model.transformer.cuda_graph_impl", "local", "--world-size", "2")
    assert code == 2 and "layout   2 processes" in out
    assert "Megatron cannot build the model with this layout" in error and "cudagraphs" in error
    # Pipeline stages, tensor and expert parallelism are built for their own ranks.
    large = ["--pipeline-model-parallel-size", "2", "--tensor-model-parallel-size", "2", "--world-size", "8"]
    assert dry(*large)[0] == 0


def test_the_first_check_of_the_30b_readme_passes_without_servers_and_without_a_gpu(
    dry: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """WORLD_SIZE=32, on a disk that is too small for 430 GB a checkpoint: that is a warning on this machine."""
    write_published_folder(tmp_path / "Qwen3-30B-A3B", "Qwen3-30B-A3B")
    train = rows(tmp_path / "train.jsonl", [f"{i}+{j}=" for i in range(8) for j in range(8)])
    held_out = [rows(tmp_path / f"{name}.jsonl", [f"{i}-9="]) for i, name in enumerate(("a", "b"))]
    data = ["--data.train", train, "--data.eval.aime24", held_out[0], "--data.eval.aime25", held_out[1]]
    monkeypatch.setenv("WORLD_SIZE", "32")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=10**12, used=0, free=10**11))
    code, out, error = dry(*data, config=EXAMPLES / "qwen3_30b_a3b/dppo.toml")
    assert (code, error) == (0, ""), error
    assert len(out.splitlines()) <= 30 and out.rstrip().splitlines()[-1].startswith("All checks passed.")
    assert "layout   32 processes = tp2 pp1 cp1 dp16 ep8 etp1" in out
    assert "256 prompts x 16 samples = 4096 samples a step, 256 on each of 16" in out
    assert "model    30,532,122,624 parameters (qwen3_moe, bf16)" in out
    assert "servers  4 of 4 not running yet" in out
    # bf16 weights, the fp32 copy and two moments: 14 bytes a parameter.
    assert "disk     427.4 GB a checkpoint, at most 3 at a time = 1.3 TB" in out
    assert "warning  the run needs about 1.3 TB" in out and "100.0 GB free" in out


LOSSES = """
import torch

def right(inputs):
    ratio = (inputs.logprobs - inputs.rollout_logprobs).exp()
    return -ratio * inputs.advantages, torch.ones_like(inputs.loss_mask)

def wrong(inputs):
    ratio = (inputs.logprobs - inputs.rollout_logprobs).exp()
    return ratio * inputs.advantages, torch.ones_like(inputs.loss_mask)

def supervised(inputs):
    return -inputs.logprobs, torch.ones_like(inputs.loss_mask)

def penalized(inputs):
    return -inputs.logprobs * inputs.advantages + 10 * inputs.logprobs, torch.ones_like(inputs.loss_mask)
"""


def test_a_loss_that_lowers_what_has_a_positive_advantage_is_refused(dry: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(LOSSES)
    for name, code in (("right", 0), ("wrong", 2), ("supervised", 0), ("penalized", 0)):
        result, _, error = dry(*SINGLE, "--loss.name", f"mine.py:{name}")
        assert result == code, (name, error)
        assert ("makes responses with a positive advantage less likely" in error) == (code == 2)
