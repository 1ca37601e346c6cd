"""Defaults of other stacks that depend on other settings, and names that are derived from paths.

The expected values come from reading verl 0.9.1 (``llm_server.py``, ``workers/config``, ``core_algos.py``), slime
624b824 (``utils/arguments.py``, ``utils/eval_config.py``) and prime-rl 559b447 (``prime-rl-configs``), not ``port``.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.commands.main import main
from megatron_dppo.config.data import DataConfig
from megatron_dppo_port.converters import name_files
from megatron_dppo_port.draft import FILL_IN
from megatron_dppo_port.port import PortedConfig, port

ROLLOUT, MODEL, ACTOR = "actor_rollout_ref.rollout.", "actor_rollout_ref.model.", "actor_rollout_ref.actor."
VERL = "python3 -m verl.trainer.main_ppo data.train_files=/d.parquet algorithm.adv_estimator=grpo "
VERL += f"{MODEL}path=/m {ROLLOUT}n=4 {ROLLOUT}name=vllm "
ASYNC = VERL.replace("verl.trainer.main_ppo", "verl.experimental.fully_async_policy.fully_async_main")
ONE_STEP = VERL.replace("verl.trainer.main_ppo", "verl.experimental.one_step_off_policy.main_ppo")
SLIME = "python3 train.py --hf-checkpoint /m --prompt-data /d.jsonl --num-rollout 9 --rollout-batch-size 32 "
SLIME += "--n-samples-per-prompt 8 --global-batch-size 256 --rollout-max-response-len 64 "
PRIME = '[model]\nname = "/m"\n[orchestrator]\nbatch_size = 8\n'
COLOCATED = "--colocate --actor-num-nodes 1 --actor-num-gpus-per-node 8 "
TP = f"{ROLLOUT}tensor_model_parallel_size="


def ported(folder: Path, text: str) -> PortedConfig:
    file = folder / ("run.sh" if text.startswith("python3") else "rl.toml")
    file.write_text(text + "\n")
    return port(file)


def lookup(result: PortedConfig, path: str) -> Any:
    value: Any = tomllib.loads(result.toml)
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return FILL_IN if str(value).startswith(FILL_IN) else value


@pytest.mark.parametrize(
    ("text", "path", "expected"),
    [
        # As many engines as the GPUs hold.
        (VERL + TP + "2 trainer.n_gpus_per_node=8", "rollout.servers.count", 4),
        (VERL + "trainer.n_gpus_per_node=8", "rollout.servers.count", 4),  # verl's default is 2 GPUs
        (VERL + TP + "1 trainer.n_gpus_per_node=6", "rollout.servers.count", 6),
        (VERL + TP + "2 trainer.nnodes=3", "rollout.servers.count", 4),  # on each node
        (VERL + TP + f"2 {ROLLOUT}data_parallel_size=2", "rollout.servers.count", 2),
        (VERL + TP + f"2 {ROLLOUT}pipeline_model_parallel_size=4", "rollout.servers.count", None),  # one: the default
        (VERL + TP + "16 trainer.nnodes=2", "rollout.servers.count", None),  # over two nodes
        (VERL + "trainer.n_gpus_per_node=$GPUS", "rollout.servers.count", None),
        (ASYNC + TP + "4 rollout.n_gpus_per_node=4 trainer.n_gpus_per_node=8", "rollout.servers.count", None),
        (ASYNC + TP + "1 rollout.n_gpus_per_node=4 trainer.n_gpus_per_node=8", "rollout.servers.count", 4),
        (ONE_STEP + TP + "1 rollout.n_gpus_per_node=2", "rollout.servers.count", 2),
        (SLIME + COLOCATED, "rollout.servers.count", 8),  # an engine for each GPU
        (SLIME + COLOCATED + "--rollout-num-gpus-per-engine 2", "rollout.servers.count", 4),
        (SLIME + COLOCATED + "--rollout-num-gpus-per-engine 2 --rollout-num-gpus 4", "rollout.servers.count", 2),
        (SLIME + "--rollout-num-gpus 6 --rollout-num-gpus-per-engine 2", "rollout.servers.count", 3),
        (SLIME + "--rollout-num-gpus 16 --rollout-num-gpus-per-engine 4", "rollout.servers.count", 2),
        (SLIME + "--rollout-num-gpus-per-engine 8 --sglang-pp-size 2", "rollout.sglang.tp-size", 4),
        (PRIME + "[deployment]\nnum_infer_gpus = 6\n", "rollout.servers.count", 6),
        (
            PRIME + "[deployment]\nnum_infer_gpus = 6\n[inference.vllm]\ntensor_parallel_size = 2\n",
            "rollout.servers.count",
            3,
        ),
        (
            PRIME + "[deployment]\nnum_infer_gpus = 4\n[inference.vllm]\nenable_expert_parallel = true\n",
            "rollout.vllm.data-parallel-size",
            4,
        ),
        (PRIME + "[deployment]\nnum_infer_nodes = 2\n", "rollout.servers.count", 8),
        # Adapters.
        (VERL + f"{MODEL}lora_rank=8", "lora.alpha", 16.0),
        (VERL + f"{MODEL}lora.rank=8", "lora.alpha", 32.0),
        (VERL, "lora", None),
        (VERL + f"{MODEL}lora_rank=8 {MODEL}target_modules=all-linear", "lora.target_modules", None),
        (
            VERL + f"{MODEL}lora_rank=8 {MODEL}target_modules=[q_proj,v_proj]",
            "lora.target_modules",
            ["q_proj", "v_proj"],
        ),
        (
            VERL + f"{MODEL}lora.rank=8 {MODEL}lora.target_modules=[linear_qkv]",
            "lora.target_modules",
            ["q_proj", "k_proj", "v_proj"],
        ),
        (VERL + f"{MODEL}lora_rank=8 {MODEL}target_modules=.*attn.*", "lora.target_modules", FILL_IN),
        (VERL + f"{MODEL}lora_rank=8 {MODEL}exclude_modules=[q_proj]", "lora.target_modules", FILL_IN),
        (PRIME + "[trainer.model.lora]\nrank = 8\n", "lora.alpha", 32.0),
        (PRIME + "[trainer.model.lora]\n", "lora.rank", 16),
        (PRIME + "[trainer.model.lora]\nalpha = 4\n", "lora.alpha", 4.0),
        (PRIME, "lora", None),
        (
            PRIME + '[trainer.model.lora]\ntarget_modules = ["q_proj", "experts"]\n',
            "lora.target_modules",
            ["q_proj", "gate_proj", "up_proj", "down_proj"],
        ),
        (PRIME + '[trainer.model.lora]\ntarget_modules = ["router"]\n', "lora.target_modules", FILL_IN),
        (PRIME + "[trainer.model.lora]\ndropout = 0.1\n", "lora.rank", FILL_IN),
        # Limits and sizes.
        (VERL + f"{ACTOR}clip_ratio=0.3 {ACTOR}clip_ratio_low=null", "loss.clip_ratio_low", 0.3),
        (VERL + f"{ACTOR}clip_ratio=0.3", "loss.clip_ratio_low", 0.2),  # clip_ratio_low is not null
        (VERL + f"{ACTOR}loss_agg_mode=seq-mean-token-sum-norm", "loss.horizon", 512),
        (VERL + f"data.max_response_length=64 {ROLLOUT}response_length=32", "rollout.max_new_tokens", 32),
        (VERL + f"data.max_prompt_length=64 {ROLLOUT}prompt_length=32", "data.max_prompt_tokens", 32),
        (
            VERL + f"{ACTOR}ulysses_sequence_parallel_size=2 {ACTOR}fsdp_config.ulysses_sequence_parallel_size=2",
            "train.micro_batch_tokens",
            2 * 16384,
        ),
        (VERL + f"{ACTOR}optim.min_lr_ratio=0.1 {ACTOR}optim.lr=1e-5", "optimizer.min_lr", pytest.approx(1e-6)),
        (VERL + f"{ACTOR}policy_loss.loss_mode=geo_mean", "loss.name", "gmpo"),
        (VERL + f"{ACTOR}policy_loss.loss_mode=geo_mean", "loss.log_clip_low", 0.2),
        (VERL + f"{ACTOR}policy_loss.loss_mode=geo_mean", "loss.aggregation", "seq_mean_token_mean"),
        # The programs with servers of their own set bypass mode, so nothing is corrected.
        (ASYNC + "algorithm.rollout_correction.rollout_is=token", "loss.name", "verl/vanilla"),
        (VERL + "algorithm.rollout_correction.rollout_is=token", "loss.name", "ppo_decoupled"),
        (SLIME + "--eps-clip 0.1", "loss.clip_ratio_high", 0.1),
        (SLIME + "--rollout-temperature 0.7", "eval.temperature", 0.7),
        (SLIME + "--rollout-top-p 0.9", "eval.top_p", 0.9),
        (SLIME + "--rollout-top-p 0.9 --eval-top-p 0.8", "eval.top_p", 0.8),
        (SLIME + "--rollout-top-k 20", "eval.top_k", 20),
        (SLIME + "--rollout-max-context-len 1000", "data.max_prompt_tokens", 999),
        (SLIME + "--rollout-max-context-len 1000 --rollout-max-prompt-len 10", "data.max_prompt_tokens", 10),
        (SLIME.replace("--global-batch-size 256", ""), "train.mini_batches", FILL_IN),
        (SLIME.replace("prompt 8", "prompt 1").replace("256", "32"), "train.advantage", None),  # mean, the default
        (SLIME, "train.advantage", "std"),
        (PRIME + "[monitors.wandb]\n", "log.wandb_project", "prime-rl"),
        (PRIME + '[trainer.scheduler]\ntype = "cosine"\n', "optimizer.lr_warmup_steps", 10),
        (PRIME + '[trainer.scheduler]\ntype = "linear"\n', "optimizer.lr_decay_style", FILL_IN),
    ],
)
def test_a_default_that_depends_on_another_setting_is_followed(
    tmp_path: Path, text: str, path: str, expected: Any
) -> None:
    assert lookup(ported(tmp_path, text), path) == expected


def test_the_number_of_servers_is_changed_with_its_arithmetic(tmp_path: Path) -> None:
    rows = ported(tmp_path, VERL + TP + "2 trainer.nnodes=2").rows
    assert [(row.status, row.target) for row in rows if "servers.count" in row.target] == [
        (
            "changed",
            "rollout.servers.count = 4 (8 GPUs / 2 of a server, on each of 2 nodes; rollout.servers.urls lists all 8)",
        )
    ]
    (unread,) = [row for row in ported(tmp_path, VERL + "trainer.n_gpus_per_node=$GPUS").rows if row.value == "$GPUS"]
    assert unread.status == "unread" and unread.target.endswith("; rollout.servers.count keeps its default")


@pytest.mark.parametrize(
    ("files", "names"),
    [
        (["/a/test.parquet", "/b/test.parquet"], ["a_test", "b_test"]),
        (["/a/x/test.parquet", "/b/x/test.parquet", "/b/dev.parquet"], ["a_x_test", "b_x_test", "dev"]),
        (["a/b.jsonl", "/c/a_b.jsonl", "/d/b.jsonl"], None),
        (["/a/te st.jsonl", "/a/te+st.jsonl", "/a/te?st.jsonl"], None),
        (["test.json", "test.jsonl", "/test.parquet"], None),
        (["/a/test.parquet", "/a/test.parquet"], ["test"]),
        (["..", ".", "/"], None),
    ],
)
def test_names_that_are_derived_from_paths_differ(files: list[str], names: list[str] | None) -> None:
    named = name_files(files)
    assert sorted(named.values()) == sorted(set(files)), "no file is lost"
    assert names is None or list(named) == names
    DataConfig(train="task:chain_sum", eval=named)


def test_sets_of_one_name_are_all_evaluated_or_refused(tmp_path: Path) -> None:
    files = "data.val_files=['/x/gsm8k/test.parquet','/x/math/test.parquet'] trainer.test_freq=5"
    result = ported(tmp_path, VERL + files.replace("[", '"[').replace("]", ']"'))
    expected = {"gsm8k_test": "/x/gsm8k/test.parquet", "math_test": "/x/math/test.parquet"}
    assert lookup(result, "data.eval") == expected
    twice = ported(tmp_path, SLIME + "--eval-prompt-data aime /a.jsonl aime /b.jsonl --eval-interval 2")
    assert lookup(twice, "data.eval") is None
    (row,) = [row for row in twice.rows if row.source_key == "eval-prompt-data"]
    assert row.status == "unread" and "two sets have one name" in row.target


@pytest.mark.parametrize(
    ("loss", "advice"),
    [
        ("dppo_tv", "[loss] is DPPO (dppo_binary_tv) with divergence_threshold_low = 0.2"),
        ("vanilla", '[loss] is that of verl. To use DPPO, set name = "dppo_binary_tv" there.'),
        ("gpg", '[loss] is that of verl. To use DPPO, set name = "dppo_binary_tv" there.'),
    ],
)
def test_the_closing_lines_look_at_the_result(
    loss: str, advice: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = VERL.replace("path=/m", "path=Qwen/Qwen3-0.6B") + f"{ACTOR}policy_loss.loss_mode={loss} "
    script += "algorithm.rollout_correction.bypass_mode=True reward_model.reward_manager=dapo"
    (tmp_path / "run.sh").write_text(script + "\n")
    out = tmp_path / "my.toml"
    main(["port", str(tmp_path / "run.sh"), "--output", str(out), "--verbose"])
    text = capsys.readouterr().err
    assert advice in text
    assert (
        f"next: hf download Qwen/Qwen3-0.6B --local-dir {tmp_path}/Qwen/Qwen3-0.6B\nnext: megatron-dppo train" in text
    )
    assert "replaces every loss_mode" not in text and "reward models run as servers" not in text


@pytest.mark.parametrize(
    ("name", "text", "key"),
    [
        ("train.py", "from trl import GRPOTrainer\n", "num_generations"),
        ("grpo.yaml", "model_name_or_path: m\nper_device_train_batch_size: 4\n", "model_name_or_path"),
        ("grpo.yml", "seed: 1\nlearning_rate: 1e-6\n", "learning_rate"),
    ],
)
def test_a_file_of_trl_gets_a_way_on(
    name: str, text: str, key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(text)
    assert main(["port", str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert f"megatron-dppo help {key} " in error and "docs/from_verl.md" in error
    # The advice works.
    assert main(["help", key]) == 0
    assert main(["help", "per_device_train_batch_size"]) == 0
    assert "rollout.prompts_per_step" in capsys.readouterr().out
