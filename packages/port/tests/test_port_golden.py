"""Ten launch files that follow published ones: each loss, batch, aggregation and layout key, worked out by hand.

The expected values come from reading the frameworks' code (verl's ``core_algos.py``, slime's ``loss.py`` and
``cp_utils.py``, prime-rl's ``loss.py``), not from ``port``.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo_port.draft import FILL_IN, OPTIONAL_KEYS, Setting
from megatron_dppo_port.port import port, translate
from megatron_dppo_port.settings import SourceFile, read_shell, read_toml

SCRIPTS = Path(__file__).parent / "port_scripts"
VERL_ADAM = {"weight_decay": 0.01, "adam_beta2": 0.999}
SLIME_ADAM = {"adam_beta2": 0.999}

# script, version, values of whole sections or single keys, keys to fill in, number of processes
GOLDEN: list[tuple[str, str, dict[str, Any], set[str], int | None]] = [
    (
        "verl_dppo_30b.sh",
        "0.9.1",
        {
            # clip_ratio_low/high are the TV thresholds, clip_ratio_c the truncation of the ratio.
            "loss": {
                "name": "verl/dppo_tv",
                "divergence_threshold_low": 0.15,
                "divergence_threshold_high": 0.15,
                "ratio_cap": 10000.0,
                "aggregation": "seq_mean_token_sum_norm",
                "horizon": 8192,  # loss_scale_factor = null: the padded length of the responses
                "entropy_coef": 0.0,
            },
            "train": {"mini_batches": 8, "micro_batch_tokens": 30720, "advantage": "mean"},  # 256 / 32
            "optimizer": {"lr": 1e-6} | VERL_ADAM,
            "parallel": {
                "tensor_model_parallel_size": 2,
                "pipeline_model_parallel_size": 1,
                "expert_model_parallel_size": 8,
                "expert_tensor_parallel_size": 1,
            },
            "rollout.prompts_per_step": 256,
            "rollout.samples_per_prompt": 16,
            "rollout.max_new_tokens": 8192,
            "rollout.vllm": {"tensor-parallel-size": 4},
            "data": {"train": "/data/train.parquet", "max_prompt_tokens": 2048, "overlong_prompts": "drop"},
            "model.path": "/models/Qwen3-30B-A3B-Base",
            "run.num_epochs": 10.0,
        },
        set(),
        8,
    ),
    (
        "verl_grpo_30b.sh",
        "1dda039",
        {
            "loss": {
                "name": "verl/vanilla",
                "clip_ratio_low": 0.2,
                "clip_ratio_high": 0.28,
                "dual_clip": 10.0,
                "aggregation": "token_mean",
                "entropy_coef": 0.0,
            },
            "train": {"mini_batches": 32, "micro_batch_tokens": 30720, "advantage": "std"},  # 512 / 16
            "optimizer": {"lr": 1e-5} | VERL_ADAM,
            "parallel": {
                "tensor_model_parallel_size": 4,
                "pipeline_model_parallel_size": 2,
                "virtual_pipeline_model_parallel_size": 2,
                "expert_model_parallel_size": 2,
                "context_parallel_size": 1,
            },
            "rollout.prompts_per_step": 512,
            "rollout.vllm": {"tensor-parallel-size": 4, "max-num-seqs": 1024},
            "reward": {"overlong_buffer_tokens": 4096, "overlong_penalty": 1.0},
            "data.overlong_prompts": "truncate_left",
        },
        set(),
        8,
    ),
    (
        "verl_router_replay_30b.sh",
        "0.9.1",
        {
            "loss": {
                "name": "verl/vanilla",
                "clip_ratio_low": 0.2,  # verl's defaults from here
                "clip_ratio_high": 0.2,
                "dual_clip": 3.0,
                "aggregation": "token_mean",
                "entropy_coef": 0.0,
            },
            # (512 + 512) * 2 tokens; R3 replays the routes of the rollout engine.
            "train": {"mini_batches": 1, "micro_batch_tokens": 2048, "advantage": "std", "router_replay": "R3"},
            "optimizer": {"lr": 1e-6} | VERL_ADAM,
            "parallel": {
                "pipeline_model_parallel_size": 6,
                "expert_model_parallel_size": 8,
                "expert_tensor_parallel_size": 1,
            },
            "rollout.vllm": {"tensor-parallel-size": 2},  # verl's default
            "run.num_steps": 50000,
        },
        set(),
        48,
    ),
    (
        "verl_fully_async_30b.sh",
        "0.9.1",
        {
            "loss": {
                "name": "verl/vanilla",
                "clip_ratio_low": 0.2,
                "clip_ratio_high": 0.28,
                "dual_clip": 10.0,
                "aggregation": "token_mean",
                "entropy_coef": 0.0,
            },
            # 32 prompts * 1 batch * 16 batches until the servers get new weights; 0.6 of that may be older.
            "train": {"mini_batches": 16, "micro_batch_tokens": 22528 * 4, "advantage": "std", "max_staleness": 1},
            "rollout.prompts_per_step": 512,
            "run.num_steps": 400,  # 512 * 400 prompts
            "optimizer": {"lr": 1e-6, "lr_warmup_steps": 10, "weight_decay": 0.1, "adam_beta2": 0.999},
            "parallel": {"context_parallel_size": 4},
            "rollout.max_new_tokens": 20480,
            "rollout.servers": {"count": 2},  # on GPUs of their own: 8 a node, 4 a server
            "reward": {"overlong_buffer_tokens": 4096, "overlong_penalty": 1.0},
        },
        set(),
        16,
    ),
    (
        "stable_rl_gspo_30b.sh",
        "0.7.1",
        {
            "loss": {
                "name": "verl/gspo",
                "clip_ratio_low": 3e-4,
                "clip_ratio_high": 4e-4,
                "aggregation": "seq_mean_token_mean",  # fixed in this version
                "entropy_coef": 0.0,
            },
            "train": {"mini_batches": 8, "micro_batch_tokens": 30720, "advantage": "std"},
            "optimizer": {"lr": 1e-6} | VERL_ADAM,
            "parallel": {
                "tensor_model_parallel_size": 2,
                "expert_model_parallel_size": 8,
                "expert_tensor_parallel_size": 1,
            },
            "model.path": "/models/Qwen3-30B-A3B-Base",
        },
        set(),
        None,  # the environment's
    ),
    (
        "skywork_grpo_7b.sh",
        "0.9.1",
        {
            "loss": {
                "name": "verl/vanilla",
                "clip_ratio_low": 0.2,
                "clip_ratio_high": 0.2,
                "dual_clip": 3.0,
                "aggregation": "token_mean",
                "entropy_coef": 0.0,
            },
            "train": {"mini_batches": 1, "micro_batch_tokens": 11240, "advantage": "std"},
            "optimizer": {"lr": 1e-6} | VERL_ADAM,
        },
        {"model.path", "data.train"},
        8,
    ),
    (
        "slime_grpo_30b.sh",
        "624b824",
        {
            "loss": {
                "name": "ppo_clip",
                "clip_ratio_low": 0.2,
                "clip_ratio_high": 0.28,
                "aggregation": "seq_mean_token_mean",  # without --calculate-per-token-loss
                "entropy_coef": 0.0,
            },
            "train": {"mini_batches": 1, "micro_batch_tokens": 20480, "advantage": "std"},  # 32 * 8 / 256
            "optimizer": {
                "lr": 1e-6,
                "lr_decay_style": "constant",
                "weight_decay": 0.1,
                "adam_beta1": 0.9,
                "adam_beta2": 0.98,
            },
            "parallel": {
                "tensor_model_parallel_size": 4,
                "pipeline_model_parallel_size": 1,
                "context_parallel_size": 1,
                "expert_model_parallel_size": 8,
                "expert_tensor_parallel_size": 1,
                "sequence_parallel": True,
            },
            "rollout.prompts_per_step": 32,
            "rollout.samples_per_prompt": 8,
            "rollout.max_new_tokens": 8192,
            "rollout.sglang": {"tp-size": 8},
            "rollout.servers": {"colocated": True},
            "model": {"path": "/root/Qwen3-30B-A3B"},
            "run.num_steps": 3000,
        },
        set(),
        8,
    ),
    (
        "slime_gspo_355b.sh",
        "624b824",
        {
            "loss.name": "gspo",
            "loss.clip_ratio_low": 1e-4,
            "loss.clip_ratio_high": 2e-4,
            "loss.aggregation": "seq_mean_token_mean",
            "train": {"mini_batches": 4, "micro_batch_tokens": 32768, "advantage": "std"},
            "optimizer": {"lr": 1e-6, "lr_decay_style": "linear", "weight_decay": 0.01} | SLIME_ADAM,
            "parallel": {
                "tensor_model_parallel_size": 8,
                "pipeline_model_parallel_size": 4,
                "context_parallel_size": 2,
                "expert_model_parallel_size": 16,
                "sequence_parallel": True,
            },
            "model.transformer": {
                "num_layers_in_last_pipeline_stage": 23,
                "moe_token_dispatcher_type": "flex",
                "moe_flex_dispatcher_backend": "deepep",
            },
            "rollout.oversample": 2.0,
            "rollout.dynamic_sampling": True,
        },
        {"model.path", "data.train", "loss.mismatch", "loss.mismatch_low", "loss.mismatch_high"},
        64,
    ),
    (
        "slime_async_9b.sh",
        "624b824",
        {
            "loss": {
                "name": "ppo_clip",
                "clip_ratio_low": 0.2,
                "clip_ratio_high": 0.28,
                "aggregation": "seq_mean_token_mean",
                "entropy_coef": 0.0,
            },
            "train": {"mini_batches": 1, "micro_batch_tokens": 4096, "advantage": "std", "max_staleness": 1},
            "optimizer": {"lr": 1e-6, "lr_decay_style": "constant", "weight_decay": 0.1} | SLIME_ADAM,
            "parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
            "rollout.prompts_per_step": 8,
        },
        set(),
        4,
    ),
    (
        "prime_rl_30b.toml",
        "559b447",
        {
            # 0.001 log^2 r to the rollout's policy = 0.002 times k2.
            "loss": {
                "name": "dppo_binary_tv",
                "divergence_threshold_low": 0.2,
                "divergence_threshold_high": 0.2,
                "ratio_cap": "off",
                "form": "ratio",
                "aggregation": "token_mean",
                "kl_coef": 0.002,
                "kl_estimator": "k2",
                "kl_target": "rollout",
            },
            "train": {"max_staleness": 4, "micro_batch_tokens": 32768},
            "optimizer": {"lr": 1e-6} | VERL_ADAM,
            "parallel": {"expert_model_parallel_size": 8},
            "rollout.prompts_per_step": 64,  # 512 rollouts in groups of 8
            "rollout.samples_per_prompt": 8,
            "rollout.max_new_tokens": 32768,
        },
        {"data"},
        16,
    ),
]


def lookup(values: dict[str, Any], path: str) -> Any:
    value: Any = values
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def without_open_keys(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: part for key, part in value.items() if not str(part).startswith(FILL_IN)}


@pytest.mark.parametrize(("name", "version", "expected", "to_fill_in", "num_processes"), GOLDEN)
def test_each_key_means_what_it_meant(
    name: str,
    version: str,
    expected: dict[str, Any],
    to_fill_in: set[str],
    num_processes: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PWD", "/work")
    result = port(SCRIPTS / name, version=version)
    values = tomllib.loads(result.toml)
    for path, value in expected.items():
        assert without_open_keys(lookup(values, path)) == value, path
    places = {problem.split(":")[0].split(" ")[0] for problem in result.problems if not problem.startswith("line ")}
    assert places == to_fill_in
    assert result.num_processes == num_processes and result.version == version


OTHER_WORDS = {
    "dppo_tv": "dppo_kl",
    "vanilla": "dppo_tv",
    "gspo": "vanilla",
    "grpo": "rloo",
    "token-mean": "token-sum",
    "seq-mean-token-sum-norm": "token-mean",
    "default": "ipo",
    "ipo": "default",
    "R3": "R2",
    "left": "error",
    "vllm": "sglang",
    "constant": "cosine",
    "low_var_kl": "k1",
    "deepscaler": "remote",
    "null": "2",
}


def changed(value: Any) -> Any:
    """Another valid value of the same kind."""
    if isinstance(value, list):
        return ["False"] if value == [] else [changed(value[0]), *value[1:]]
    text = str(value)
    if text in ("True", "False"):
        return str(text == "False")
    if text in OTHER_WORDS:
        return OTHER_WORDS[text]
    try:
        doubled = 2 * float(text)
    except ValueError:
        return text + "x"
    return type(value)(f"{doubled:g}") if isinstance(value, str) else type(value)(doubled)


def paths(values: dict[str, Any], before: str = "") -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in values.items():
        result |= paths(value, f"{before}{key}.") if isinstance(value, dict) else {before + key: value}
    return result


@pytest.mark.parametrize(("name", "version"), [row[:2] for row in GOLDEN])
def test_no_key_that_depends_on_an_unread_setting_gets_a_value(name: str, version: str) -> None:
    """Each setting is made unread in turn. What changes with its value must then be left to the user."""
    reader = read_toml if name.endswith(".toml") else read_shell
    source = reader(SCRIPTS / name, SCRIPTS, {"MODEL_PATH": "/m", "CODE_PATH": "/c", "BASE_DIR": "/b", "HOSTFILE": ""})

    def keys_with(key: str, setting: Setting) -> dict[str, Any]:
        settings = source.settings | {key: setting}
        result = translate(SourceFile(source.framework, settings, source.defaults), "name", version)
        return paths(tomllib.loads(result.toml))

    num_dependent = 0
    for key, setting in source.settings.items():
        if setting.unread:
            continue
        base, other = keys_with(key, setting), keys_with(key, Setting(changed(setting.value)))
        unread = keys_with(key, Setting(setting.value, "not known"))
        for path in {path for path in base.keys() | other.keys() if base.get(path) != other.get(path)}:
            value = unread.get(path)
            is_left = str(value).startswith(FILL_IN) or (value is None and path.startswith(OPTIONAL_KEYS))
            # A key that only one loss has is left with the name of the loss.
            is_left |= value is None and path.startswith("loss.") and str(unread["loss.name"]).startswith(FILL_IN)
            # The configuration refuses an aggregation that needs a horizon without one.
            is_left |= path == "loss.horizon" and str(unread["loss.aggregation"]).startswith(FILL_IN)
            assert is_left or path == "run.output_dir", (key, path, value)
            num_dependent += 1
    assert num_dependent >= 10


def test_the_version_decides_where_versions_differ() -> None:
    gspo = port(SCRIPTS / "stable_rl_gspo_30b.sh", version="0.9.1")
    (problem,) = gspo.problems  # verl 0.9.1 aggregates GSPO by loss_agg_mode = token-mean
    assert problem.startswith("loss.aggregation: to fill in (actor_rollout_ref.actor.loss_agg_mode: token-mean")
    newest = tomllib.loads(port(SCRIPTS / "prime_rl_30b.toml").toml)["loss"]
    assert newest == {
        "name": "ipo",
        "divergence_threshold_low": 0.3,
        "divergence_threshold_high": 0.3,
        "form": "ratio",
        "aggregation": "token_mean",
    }


def test_variables_complete_a_script_that_needs_them() -> None:
    variables = {"MODEL_PATH": "/m/r1-7b", "CODE_PATH": "/c"}
    result = port(SCRIPTS / "skywork_grpo_7b.sh", variables=variables)
    values = tomllib.loads(result.toml)
    assert result.problems == [] and values["model"]["path"] == "/m/r1-7b"
    assert values["data"]["train"] == ["/c/train/code.pkl", "/c/train/math.pkl"]
    assert values["run"]["output_dir"] == "runs/7B_L8k-r1-7b-gs16"
    kl = port(SCRIPTS / "verl_dppo_30b.sh", variables={"MODE": "dppo_kl"})
    assert tomllib.loads(kl.toml)["loss"]["divergence_threshold_low"] == 0.05
