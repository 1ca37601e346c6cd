"""Launch scripts of verl and slime, and configurations of verl and prime-rl, become ours; scripts are never run."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.commands.main import main
from megatron_dppo.config.describe import keys
from megatron_dppo.config.io import load_config
from megatron_dppo.errors import ConfigError
from megatron_dppo_port import prime_rl, slime, verl
from megatron_dppo_port.draft import Draft, Setting, apply_rules
from megatron_dppo_port.port import PortedConfig, port

VERL = r"""
set -x
touch {trap}  # a script that is run would leave this file
MODEL=${{MODEL:-/models/qwen3}}
n=8; mini=$((n * 4))
TP=2
if [ -n "$BIG" ]; then LEN=4096; fi
FILES="['$MODEL/a.parquet', '$MODEL/b.parquet']"
DATA=(
    data.train_files="$FILES"
    data.val_files=/d/test.parquet
    # data.train_batch_size=7
    data.train_batch_size=128
    data.max_response_length=$LEN
)
python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer \
    "${{DATA[@]}}" \
    algorithm.adv_estimator=grpo \
    actor_rollout_ref.model.path=$MODEL \
    actor_rollout_ref.actor.ppo_mini_batch_size=$mini \
    actor_rollout_ref.actor.policy_loss.loss_mode=dppo_tv \
    actor_rollout_ref.actor.clip_ratio_low=0.1 actor_rollout_ref.actor.clip_ratio_high=0.2 \
    actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.actor.kl_loss_coef=0.5 \
    actor_rollout_ref.actor.optim.lr=2e-6 \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=${{TP}} \
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_num_layers=1 \
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm \
    actor_rollout_ref.rollout.name=sglang actor_rollout_ref.rollout.n=$n \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    trainer.logger='["console","wandb"]' trainer.project_name=maths trainer.experiment_name=run-$(date +%s) \
    trainer.default_local_dir=/ckpt/x trainer.total_epochs=2 trainer.test_freq=5 trainer.save_freq=20 \
    trainer.nnodes=2 trainer.n_gpus_per_node=8 custom_reward_function.path=/r.py trainer.new_thing=3 $@ | tee log
"""

SLIME = r"""
SAVE="/ckpt/run"
CKPT_ARGS=(
   --hf-checkpoint /models/qwen3   # the tokenizer too
   --save $SAVE
)
ROLLOUT_ARGS=(
   --prompt-data /d/train.jsonl --input-key text --label-key label --rm-type math
   --num-rollout 300 --rollout-batch-size 32 --n-samples-per-prompt 8
   --rollout-max-response-len 2048 --rollout-temperature 0.8 --global-batch-size 64
   --eval-prompt-data aime /d/aime.jsonl amc /d/amc.jsonl --n-samples-per-eval-prompt 4
   --over-sampling-batch-size 48
   --dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std
)
GRPO_ARGS=( --advantage-estimator grpo --eps-clip 0.1 --eps-clip-high 0.3 --use-kl-loss --kl-loss-coef 0.01
   --kl-loss-type low_var_kl --use-tis )
ray job submit --address="http://127.0.0.1:8265" --runtime-env-json="{\"a\": 1}" -- python3 train.py \
   --actor-num-nodes 2 --actor-num-gpus-per-node 8 --colocate ${MODEL_ARGS[@]} ${CKPT_ARGS[@]} \
   ${ROLLOUT_ARGS[@]} "${GRPO_ARGS[@]}" \
   --tensor-model-parallel-size 2 --context-parallel-size 2 --max-tokens-per-gpu 4096 --sequence-parallel \
   --lr 1e-6 --lr-decay-style constant --sglang-mem-fraction-static 0.7 --num-layers 36 --use-rollout-routing-replay
"""

PRIME_RL = """
max_steps = 50
seq_len = 4096
[model]
name = "owner/model"
[trainer.optim]
lr = 3e-6
[orchestrator]
batch_size = 128
group_size = 16
max_off_policy_steps = 2
[orchestrator.train.sampling]
max_completion_tokens = 512
[[orchestrator.train.source]]
name = "reverse"
[inference.vllm]
max_model_len = 8192
"""


def ported(tmp_path: Path, name: str, text: str) -> tuple[PortedConfig, dict[str, Any], dict[str, tuple[str, str]]]:
    file = tmp_path / name
    file.write_text(text)
    result = port(file)
    return result, tomllib.loads(result.toml), {row.source_key: (row.status, row.target) for row in result.rows}


def test_a_launch_of_verl_becomes_a_configuration_without_being_run(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    result, values, rows = ported(tmp_path, "run.sh", VERL.format(trap=trap))
    assert not trap.exists()
    assert values["data"]["train"] == ["/models/qwen3/a.parquet", "/models/qwen3/b.parquet"]
    assert values["rollout"]["prompts_per_step"] == 128 and values["train"]["mini_batches"] == 4
    assert values["rollout"]["sglang"] == {"mem-fraction-static": 0.6, "tp-size": 2}  # verl's default of two GPUs
    assert values["loss"].pop("horizon").startswith("TO FILL IN: data.max_response_length: $LEN is set under")
    loss = {"name": "verl/dppo_tv", "divergence_threshold_low": 0.1, "divergence_threshold_high": 0.2, "ratio_cap": 3.0}
    assert values["loss"] == loss | {"aggregation": "seq_mean_token_sum_norm", "entropy_coef": 0.0}
    assert values["rollout"]["max_new_tokens"].startswith("TO FILL IN"), "verl's default would hide an unknown value"
    assert any("rollout.max_new_tokens: to fill in" in problem for problem in result.problems)
    assert values["parallel"]["tensor_model_parallel_size"] == 2
    assert values["model"] == {"path": "/models/qwen3", "transformer": {"recompute_num_layers": 1}}
    assert values["optimizer"] == {"lr": 2e-6, "weight_decay": 0.01, "adam_beta2": 0.999}  # verl's, where unset
    assert values["run"] == {"output_dir": "/ckpt/x", "num_epochs": 2.0} and values["log"] == {"wandb_project": "maths"}
    assert values["reward"] == {"function": "/r.py:compute_score"} and result.num_processes == 16
    assert rows["data.max_response_length"] == ("unread", "$LEN is set under a condition (line 7)")
    assert rows["trainer.experiment_name"][0] == "unsupported"
    assert rows["actor_rollout_ref.actor.kl_loss_coef"][0] == "ported" and "kl_coef" not in values["loss"]
    assert rows["trainer.new_thing"] == ("unsupported", "unknown setting")
    defaults = {row.source_key for row in result.rows if row.status == "default"}
    assert set(rows) - {""} - defaults == set(rows_of(VERL)), "every setting has a row, and nothing else has"


def rows_of(script: str) -> set[str]:
    """The keys of a verl script, by its own looks."""
    words = script.replace("{{", "{").replace("\\\n", " ").split()
    return {w.partition("=")[0].lstrip("+") for w in words if "." in w.partition("=")[0] and "=" in w} & {
        w.partition("=")[0].lstrip("+") for w in words if not w.startswith(("--", "#", "'", "{"))
    }


def test_a_launch_of_slime_becomes_a_configuration(tmp_path: Path) -> None:
    result, values, rows = ported(tmp_path, "run.sh", SLIME)
    assert result.stack == "slime" and result.problems == [] and result.num_processes == 16
    assert values["rollout"]["prompts_per_step"] == 32 and values["train"]["mini_batches"] == 4
    assert values["rollout"]["oversample"] == 1.5 and values["rollout"]["dynamic_sampling"] is True
    assert values["train"]["micro_batch_tokens"] == 8192  # 4096 a GPU, a row over two
    assert values["train"]["router_replay"] == "rollout"
    assert values["data"]["eval"] == {"aime": "/d/aime.jsonl", "amc": "/d/amc.jsonl"}
    assert values["eval"] == {"samples_per_prompt": 4, "temperature": 0.8}
    clip = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3, "mismatch": "truncate", "mismatch_high": 2.0}
    loss = {"name": "ppo_decoupled", "kl_coef": 0.01, "kl_estimator": "k3", "entropy_coef": 0.0} | clip
    assert values["loss"] == loss | {"aggregation": "seq_mean_token_mean"}
    assert values["rollout"]["servers"] == {"colocated": True, "count": 8}  # one engine a GPU
    assert rows["${MODEL_ARGS[@]}"] == ("unread", "$MODEL_ARGS is not set in the file")
    assert rows["num-layers"][0] == "unsupported" and rows["colocate"][0] == "ported"


def test_prime_rl_s_configuration_lacks_what_an_environment_was(tmp_path: Path) -> None:
    result, values, rows = ported(tmp_path, "rl.toml", PRIME_RL)
    assert (values["rollout"]["prompts_per_step"], values["rollout"]["samples_per_prompt"]) == (8, 16)
    assert values["train"] == {"max_staleness": 2, "micro_batch_tokens": 4096}
    assert values["rollout"]["vllm"] == {"max-model-len": 8192} and values["run"]["num_steps"] == 50
    assert result.problems == ["data is missing; it has no default"]
    assert rows["orchestrator.train.source[0].name"][0] == "unsupported"
    file = tmp_path / "again.toml"
    file.write_text(result.toml)
    assert load_config(file, ["--data.train", "task:chain_sum"]).optimizer.lr == 3e-6


def test_verl_s_yaml_is_read_like_its_overrides(tmp_path: Path) -> None:
    text = "data: {train_files: /d/a.parquet, max_response_length: 64}\n"
    text += "trainer: {logger: [console, mlflow], project_name: maths}\n"
    text += "algorithm: {adv_estimator: grpo}\n"
    text += "actor_rollout_ref: {model: {path: /m}, rollout: {n: 4}, actor: {optim: {lr: '${x.lr}'}}}\n"
    result, values, rows = ported(tmp_path, "ppo.yaml", text)
    assert values["rollout"]["max_new_tokens"] == 64 and values["model"]["path"] == "/m"
    assert values["log"] == {"trackers": ["mlflow"], "project": "maths"}
    (problem,) = result.problems
    assert problem.startswith("optimizer.lr: to fill in (actor_rollout_ref.actor.optim.lr: ${x.lr} is filled in")
    assert "data.train_batch_size" not in text and values["rollout"]["prompts_per_step"] == 1024  # verl's default
    assert rows["actor_rollout_ref.actor.optim.lr"][0] == "unread"


def leaves(values: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from leaves(value, (*path, name))
        else:
            yield (*path, name)


def test_every_rule_targets_an_existing_key() -> None:
    known = set(keys())
    samples = ("1", "0.5", "x", "true", "constant", "float16", "[0.9,0.99]")
    for stack in (verl, slime, prime_rl):
        for key in stack.TABLE:
            draft: Draft
            for sample in samples:
                draft = Draft({key: Setting(sample)}, {}, "")
                apply_rules(draft, stack.TABLE, stack.PATTERNS)
                if draft.rows[0].status != "unread":
                    break
            assert draft.rows[0].status != "unread", key
            paths = {".".join(path) for path in leaves(draft.values)}
            assert {path for path in paths if not path.startswith("model.transformer.")} <= known, key


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("run.sh", "echo hello\n", "got 0"),
        ("run.sh", "python -m verl.trainer.main_ppo a.b=1\npython -m verl.trainer.main_ppo a.b=2\n", "got 2"),
        ("x.toml", "[a]\nb = 1\n", "expected prime-rl's tables"),
        ("x.yaml", "a: 1\n", "expected verl's tables"),
        ("x.json", "{}", "by its ending"),
    ],
)
def test_unportable_files_are_errors(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        port(tmp_path / name)


def test_the_output_file_is_written_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.sh").write_text(SLIME)
    out = tmp_path / "my.toml"
    assert main(["port", str(tmp_path / "run.sh"), "--output", str(out)]) == 0
    table = capsys.readouterr().err
    assert "unsupported (" in table and "ported (" in table and "--dry-run --world-size 16" in table
    assert load_config(out).run.output_dir == "/ckpt/run"
    assert main(["port", str(tmp_path / "run.sh"), "--output", str(out)]) == 2


BALANCE = {"moe_router_load_balancing_type": "aux_loss"}
LAUNCH = "python3 -m verl.trainer.main_ppo data.train_files=/d.parquet data.max_response_length=8 "
LAUNCH += "algorithm.adv_estimator=grpo "
LAUNCH += "actor_rollout_ref.model.path=/m actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.name=vllm "


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        (LAUNCH + "$EXTRA\n", "the words $EXTRA are unknown ($EXTRA is not set in the file); they may set any key"),
        (LAUNCH + "--config-name=mine\n", "--config-name mine: its file was not read; it may set any key"),
        (
            LAUNCH + "\\\n\n  actor_rollout_ref.actor.optim.lr=1\n",
            "line 3: actor_rollout_ref.actor.optim.lr=1 is not part",
        ),
        (
            LAUNCH.replace("verl.trainer.main_ppo", "recipe.x.main_x") + "\n",
            "recipe.x.main_x is not verl's own program",
        ),
        ("source other.env\n" + LAUNCH + "\n", "line 1: source other.env was not read"),
        ("X=${X:-}\n[ -z $X ] && exit 1\n" + LAUNCH + "\n", "line 2: the script ends before the training"),
        (LAUNCH + "actor_rollout_ref.actor.policy_loss.loss_mode=gpg\n", "loss.name: to fill in (actor_rollout_ref"),
        (LAUNCH + "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1\n", "optimizer.lr_warmup_steps: to fill in"),
        (
            LAUNCH + "actor_rollout_ref.actor.optim.lr=1e-5 actor_rollout_ref.actor.optim.optimizer=muon\n",
            "optimizer.lr: to fill in (actor_rollout_ref.actor.optim.optimizer: muon: Adam is the only",
        ),
        (LAUNCH + "algorithm.gamma=0.9\n", "train.advantage: to fill in (algorithm.gamma: 0.9"),
        (
            LAUNCH + "actor_rollout_ref.actor.optim.lr=''\n",
            "optimizer.lr: to fill in (actor_rollout_ref.actor.optim.lr: ",
        ),
    ],
)
def test_what_may_change_the_training_is_a_problem(tmp_path: Path, script: str, problem: str) -> None:
    (tmp_path / "run.sh").write_text(script)
    result = port(tmp_path / "run.sh")
    assert any(text.startswith(problem) for text in result.problems), result.problems
    for text in result.problems:
        path, is_key, _ = text.partition(": to fill in")
        if is_key:
            section, _, key = path.rpartition(".")
            assert tomllib.loads(result.toml)[section][key].startswith("TO FILL IN: "), path


def test_the_launch_of_these_tests_has_no_problem(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(LAUNCH)
    assert port(tmp_path / "run.sh").problems == []


def test_hydra_s_own_configuration_is_read_inside_the_root(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    text = "defaults: [ppo_trainer, _self_]\n"
    text += "actor_rollout_ref: {actor: {policy_loss: {loss_mode: dppo_kl}, ppo_epochs: 3}}\n"
    (tmp_path / "config" / "mine.yaml").write_text(text)
    (tmp_path / "run.sh").write_text(
        LAUNCH + "--config-path=config --config-name=mine actor_rollout_ref.actor.ppo_epochs=2\n"
    )
    result = port(tmp_path / "run.sh")
    values = tomllib.loads(result.toml)
    assert result.problems == [] and values["loss"]["name"] == "verl/dppo_kl" and values["train"]["epochs"] == 2


@pytest.mark.parametrize(
    ("flags", "table", "expected"),
    [
        ("--calculate-per-token-loss", "loss", {"aggregation": "token_mean"}),
        ("", "loss", {"aggregation": "seq_mean_token_mean"}),
        ("--use-kl-loss --kl-loss-coef 0.1", "loss", {"kl_coef": 0.1, "kl_estimator": "k1"}),  # slime's default
        ("--disable-grpo-std-normalization", "train", {"advantage": "mean"}),
        ("--disable-rewards-normalization", "train", {"advantage": "none"}),
        ("--num-rollout 300 --lr-warmup-fraction 0.1", "optimizer", {"lr_warmup_steps": 30}),
        ("--lr-decay-style cosine --min-lr 1e-7", "optimizer", {"lr_decay_style": "cosine", "min_lr": 1e-7}),
        ("--moe-aux-loss-coeff 1e-3", "model", {"transformer": {"moe_aux_loss_coeff": 0.001, **BALANCE}}),
        ("--moe-aux-loss-coeff 0", "model", {"transformer": None}),
        ("--advantage-estimator cispo --eps-clip 10 --eps-clip-high 4", "loss", {"name": "cispo", "ratio_cap": 5.0}),
    ],
)
def test_slime_s_arguments_of_the_loss(tmp_path: Path, flags: str, table: str, expected: dict[str, Any]) -> None:
    _, values, _ = ported(tmp_path, "run.sh", f"python3 train.py --hf-checkpoint /m {flags}\n")
    assert {key: values[table].get(key) for key in expected} == expected
