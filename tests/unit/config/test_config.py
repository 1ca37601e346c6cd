from __future__ import annotations

import math
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomli_w

from megatron_dppo.config.io import dump_toml, load_config, validate
from megatron_dppo.config.loss import LossConfig
from megatron_dppo.config.loss_registry import loss_names
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import ConfigError
from megatron_dppo.setup.inputs import resolve_num_steps
from tests.unit.configs import config, minimal

EXAMPLE = Path(__file__).parents[3] / "examples/chain_sum/dppo.toml"


def write(folder: Path, values: dict[str, Any]) -> Path:
    path = folder / "c.toml"
    path.write_text(tomli_w.dumps(values))
    return path


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(path, overrides)
    return str(error.value)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with the minimal configuration."""
    return write(tmp_path, minimal())


def test_the_example_loads_with_the_values_of_its_file() -> None:
    loaded, raw = load_config(EXAMPLE), tomllib.loads(EXAMPLE.read_text())
    raw["model"]["path"] = str(EXAMPLE.parent / "model")
    for section, values in raw.items():
        for key, value in values.items():
            assert getattr(getattr(loaded, section), key) == value, f"{section}.{key}"


def test_a_resolved_configuration_loads_again_as_the_same(tmp_path: Path) -> None:
    for overrides in ([], ["--recompute-granularity", "full", "--log.wandb_project", "a 'b' \"c\"", "--lr", "1e-3"]):
        first = load_config(EXAMPLE, overrides)
        (tmp_path / "resolved.toml").write_text(dump_toml(first))
        assert load_config(tmp_path / "resolved.toml") == first


def test_paths_resolve_against_the_file_only_if_they_exist_there(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "train.jsonl").touch()
    (tmp_path / "task:chain_sum").touch()
    data = {"train": "train.jsonl", "eval": "elsewhere.jsonl"}
    values = minimal() | {"data": data}
    loaded = load_config(write(tmp_path, values))
    assert loaded.model.path == str(tmp_path / "model")
    assert loaded.data.train == str(tmp_path / "train.jsonl") and loaded.data.eval == "elsewhere.jsonl"
    assert load_config(write(tmp_path, values), ["--model.path", "model"]).model.path == "model"


@pytest.mark.parametrize(
    ("flags", "section", "key", "value"),
    [
        (["--run.num_steps", "3"], "run", "num_steps", 3),
        (["--run.num_steps=3"], "run", "num_steps", 3),
        (["--run.num-steps", "3"], "run", "num_steps", 3),
        (["--run.overwrite", "true"], "run", "overwrite", True),
        (["--run.output_dir", "runs/a b"], "run", "output_dir", "runs/a b"),
        (["--data.train=a=b.jsonl"], "data", "train", "a=b.jsonl"),
        (["--tensor-model-parallel-size", "2"], "parallel", "tensor_model_parallel_size", 2),
        (["--sequence-parallel"], "parallel", "sequence_parallel", True),
        (["--sequence-parallel", "--lr", "1e-4"], "parallel", "sequence_parallel", True),
        (["--no-sequence-parallel"], "parallel", "sequence_parallel", False),
        (["--no-overlap-p2p-comm"], "parallel", "overlap_p2p_comm", False),
        (["--use-distributed-optimizer"], "parallel", "use_distributed_optimizer", True),
        (["--lr", "1e-4"], "optimizer", "lr", 1e-4),
        (["--lr-decay-style", "cosine"], "optimizer", "lr_decay_style", "cosine"),
        (["--adam-beta2", "0.95"], "optimizer", "adam_beta2", 0.95),
        (["--clip-grad", "0"], "optimizer", "clip_grad", 0.0),
        (["--no-bf16"], "model", "dtype", "fp32"),
        (["--no-bf16", "--bf16"], "model", "dtype", "bf16"),
        (["--seed", "7"], "run", "seed", 7),
        (["--seed", str(2**63 - 1)], "run", "seed", 2**63 - 1),
        (["--wandb-project", "mine"], "log", "wandb_project", "mine"),
        (["--recompute-granularity", "full"], "model", "transformer", {"recompute_granularity": "full"}),
        (["--recompute-granularity", "full", "--recompute-granularity", "null"], "model", "transformer", {}),
        (["--sequence-parallel", "--sequence-parallel=null"], "parallel", "sequence_parallel", None),
        (["--recompute-num-layers=2"], "model", "transformer", {"recompute_num_layers": 2}),
        (["--model.transformer.moe_z_loss_coeff", "1e-3"], "model", "transformer", {"moe_z_loss_coeff": 1e-3}),
        (["--distribute-saved-activations"], "model", "transformer", {"distribute_saved_activations": True}),
    ],
)
def test_each_flag_sets_its_key(path: Path, flags: list[str], section: str, key: str, value: Any) -> None:
    assert getattr(getattr(load_config(path, flags), section), key) == value


def test_the_last_flag_wins_and_reaches_nested_sections(path: Path) -> None:
    loaded = load_config(path, ["--train.layer_noise.std", "0.5", "--lr", "1", "--optimizer.lr", "2"])
    assert loaded.train.layer_noise.std == 0.5 and loaded.optimizer.lr == 2


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["run.num_steps", "3"], "unexpected argument 'run.num_steps'; overrides look like --section.key value"),
        (["--run.num_steps", "3", "4"], "unexpected argument '4'"),
        (["--run.num_steps"], "--run.num_steps needs a value"),
        (["--run.output_dir", "--lr", "1"], "--run.output_dir needs a value"),
        (["--run.output_dir.x", "1"], "'output_dir' is a key, not a section"),
        (["--bf16=false"], "--bf16 takes no value, got 'false'"),
        (["--no-sequence-parallel=true"], "--no-sequence-parallel takes no value"),
        (["--lr"], "optimizer.lr = True: Input should be a valid number"),
        (["--seed"], "run.seed = True: Input should be a valid integer"),
        (["--seed", str(2**63)], f"run.seed = {2**63}: Input should be less than or equal to {2**63 - 1}"),
    ],
)
def test_invalid_flags_are_rejected(path: Path, flags: list[str], part: str) -> None:
    assert part in refusal(path, *flags)


def test_an_unknown_key_suggests_the_closest_known_key(path: Path) -> None:
    assert "run.num_step = 3: unknown key; did you mean 'num_steps'?" in refusal(path, "--run.num_step", "3")
    assert "rolout = {'top_k': 3}: unknown key; did you mean 'rollout'?" in refusal(path, "--rolout.top_k", "3")
    message = refusal(path, "--rollout.servers.cont", "3")
    assert "rollout.servers.cont = 3: unknown key; did you mean 'count'?" in message
    assert "log.xyz = 1: unknown key; known keys: tensorboard, wandb_project, trackers" in refusal(
        path, "--log.xyz", "1"
    )


def test_the_warm_up_that_the_trainer_no_longer_has_is_refused_with_the_command(path: Path) -> None:
    path.write_text(path.read_text() + "[warmup]\nnum_steps = 9\n[warmup.optimizer]\nlr = 0.1\n")
    for flags in ([], ["--warmup.batch_size", "3"]):
        message = refusal(path, *flags)
        assert "warmup = {'num_steps': 9" in message and message.count("unknown key") == 1
        assert "`megatron-dppo base SOURCE FOLDER --steps N`" in message and "remove [warmup]" in message


def test_all_problems_are_listed_at_once(path: Path) -> None:
    message = refusal(path, "--run.num_stepz", "3", "--lr", "-1", "--rollout.top_p", "1.5", "--loss.name", "ppo")
    head, *problems = message.splitlines()
    assert head == f"{path} cannot be used:" and len(problems) == 4
    for part in ("run.num_stepz = 3", "optimizer.lr = -1", "rollout.top_p = 1.5", "loss.name = 'ppo'"):
        assert sum(part in line for line in problems) == 1, message


def test_a_missing_section_and_a_missing_key_are_named() -> None:
    values = minimal()
    del values["optimizer"], values["run"]["num_steps"]
    with pytest.raises(ConfigError, match=r"num_epochs(.|\n)*optimizer is missing"):
        validate(values, "test")


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("run", "num_steps", "5"),
        ("run", "num_steps", 5.5),
        ("run", "num_steps", True),
        ("run", "num_steps", -1),
        ("run", "num_epochs", 0),
        ("run", "output_dir", 5),
        ("run", "overwrite", "yes"),
        ("run", "overwrite", 1),
        ("optimizer", "lr", "fast"),
        ("optimizer", "lr", float("nan")),
        ("model", "dtype", "fp8"),
        ("model", "transformer", "full"),
        ("rollout", "samples_per_prompt", 1),
        ("rollout", "temperature", 0),
        ("parallel", "tensor_model_parallel_size", 0),
        ("log", "progress", None),
    ],
)
def test_a_value_of_a_wrong_type_or_range_is_rejected_and_shown(section: str, key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as error:
        config(**{section: {key: value}})
    assert f"{section}.{key} = {value!r}: " in str(error.value)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ({}, (0.15, 0.15)),
        ({"name": "dppo_binary_kl"}, (0.05, 0.05)),
        ({"divergence_threshold_low": 0.1}, (0.1, 0.15)),
        ({"name": "dppo_binary_kl", "divergence_threshold_high": 2.5}, (0.05, 2.5)),
        ({"divergence_threshold_low": 1.0}, (1.0, 0.15)),
    ],
)
def test_threshold_defaults_depend_on_the_variant(loss: dict[str, Any], expected: tuple[float, float]) -> None:
    assert config(loss=loss).loss.thresholds == expected


@pytest.mark.parametrize(
    ("sections", "part"),
    [
        ({"loss": {"divergence_threshold_low": 1.1}}, "a total variation"),
        ({"loss": {"divergence_threshold_high": 0}}, "loss.divergence_threshold_high = 0"),
        ({"loss": {"name": "grpo", "divergence_threshold_high": 0.1}}, "on the loss 'grpo'"),
        ({"loss": {"clip_ratio_low": 0.1}}, "clip_ratio_low = 0.1 has no effect"),
        ({"loss": {"name": "pg_is", "ratio_floor": 0.1}}, "on the loss 'pg_is'"),
        ({"loss": {"name": "ppo_clip", "ratio_cap": 3.0}}, "on the loss 'ppo_clip'"),
        ({"loss": {"name": "grpo", "dual_clip": 3.0}}, "use ppo_clip or ppo_decoupled"),
        ({"loss": {"topk": 5}}, "5 has no effect"),
        ({"loss": {"topk_eviction": True}}, "topk_eviction = True"),
        ({"loss": {"mismatch_high": 3.0}}, "mismatch other than 'none'"),
        ({"loss": {"mismatch": "truncate"}}, "ratio_cap caps its weight"),
        ({"loss": {"mismatch": "mask_token", "mismatch_low": 3.0}}, "mismatch_low = 3.0 is above"),
        ({"loss": {"name": "cispo", "ratio_floor": 6.0}}, "ratio_floor = 6.0 is above ratio_cap = 5.0"),
        ({"loss": {"name": "gspo", "form": "reinforce"}}, "form = 'reinforce' does"),
        ({"loss": {"name": "gspo", "aggregation": "token_mean"}}, "seq_mean_token_mean', which defines gspo"),
        ({"loss": {"aggregation": "token_sum_norm"}}, "only the *_norm aggregations"),
        ({"loss": {"horizon": 8}}, "horizon = 8 with aggregation = 'token_mean'"),
        ({"optimizer": {"min_lr": 1e-2}}, "min_lr = 0.01 is above lr = 0.001"),
        ({"rollout": {"return_logprobs": False}}, "rollout.return_logprobs = false"),
        ({"train": {"mini_batches": 3}}, "16 * 8 = 128 samples cannot"),
        ({"model": {"random_init": True}}, "`megatron-dppo base` makes a small one"),
        ({"train": {"layer_noise": {"lr": 0.1}}}, "layer_noise.lr = 0.1 has no effect"),
        ({"train": {"layer_noise": {"std": 1e-6, "learn": False, "lr": 0.1}}}, "effect with learn"),
        ({"train": {"layer_noise": {"std": 1e-6, "start_layer": 3, "end_layer": 3}}}, "is not above start_layer = 3"),
    ],
)
def test_incompatible_values_are_rejected(sections: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError) as error:
        config(**sections)
    assert part in str(error.value)


def test_losses_with_recomputed_logprobs_reject_stale_rollouts() -> None:
    for name in ("minirl", "ppo_decoupled", "dppo_recompute_binary_kl"):
        assert config(loss={"name": name}).loss.uses_recomputed_logprobs
        with pytest.raises(ConfigError, match="no longer exist"):
            config(loss={"name": name}, train={"max_staleness": 1})


def test_a_run_has_either_steps_or_epochs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"num_steps = 10 and num_epochs = 2.0"):
        config(run={"num_epochs": 2.0})
    file = tmp_path / "run.toml"
    file.write_text(dump_toml(config()))
    by_epochs = load_config(file, ["--run.num_steps", "null", "--run.num_epochs", "1.5"])
    prompts = SimpleNamespace(train_prompts=range(33))
    for settings, steps in ((by_epochs, 4), (config(), 10)):  # 33 * 1.5 / 16 = 3.1
        resolved = resolve_num_steps(settings, prompts)
        assert resolved.run.num_steps == steps and resolved.run.num_epochs is None
        file.write_text(dump_toml(resolved))
        assert load_config(file) == resolved


def test_a_reference_policy_without_a_kl_penalty_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"reward\.kl_coef above 0, or loss\.kl_coef"):
        config(model={"path": "model", "reference_path": "other"})


@pytest.mark.parametrize(
    "loss",
    [
        {"name": "cispo"},
        {"name": "ppo_clip", "dual_clip": 3.0},
        {"mismatch": "mask_sequence"},
        {"kl_coef": 0.001, "kl_target": "rollout"},
        {"name": "verl/dppo_kl"},
        {"name": "prime_rl/2026-09-18"},
    ],
)
def test_a_loss_whose_inputs_the_trainer_provides_is_accepted(loss: dict[str, Any]) -> None:
    assert config(loss=loss).loss.required_inputs <= {"rollout_logprobs", "sequence_ids"}


def test_an_alias_on_the_command_line_is_resolved(path: Path, tmp_path: Path) -> None:
    loaded = load_config(path, ["--loss.name", "trl/binary_kl", "--loss.ratio_cap", "7"])
    assert (loaded.loss.name, loaded.loss.thresholds, loaded.loss.ratio_cap) == ("dppo_binary_kl", (0.15, 0.15), 7.0)
    (tmp_path / "resolved.toml").write_text(dump_toml(loaded))
    assert load_config(tmp_path / "resolved.toml") == loaded


@pytest.mark.parametrize(
    ("loss", "expected"), [({"name": "grpo"}, (0.2, 0.28)), ({"name": "gspo", "clip_ratio_high": 0.1}, (3e-4, 0.1))]
)
def test_clip_ratio_defaults_depend_on_the_loss(loss: dict[str, Any], expected: tuple[float, float]) -> None:
    assert LossConfig(**loss).clip_ratios == expected


def test_dppo_and_cispo_cap_the_ratio_by_default() -> None:
    caps = {"cispo": 5.0}
    for name in loss_names():
        floor, cap = (
            -math.inf if name in ("drpo", "spo") else 0.0,
            5.0 if name.startswith("dppo_") else caps.get(name, math.inf),
        )
        assert LossConfig(name=name).ratio_limits == (floor, cap)
        if name not in ("gspo", "gmpo", "m2po", "vespo", "ppo_clip", "ppo_decoupled"):
            assert LossConfig(name=name, ratio_cap="off").ratio_limits == (floor, math.inf)
            assert LossConfig(name=name, ratio_cap=3.0).ratio_limits == (floor, 3.0)
    assert LossConfig(name="score_centering").ratio_limits == (0.0, 2.0)
    assert LossConfig(name="score_centering", centering="none").ratio_limits == (1.0, 1.0)


def test_a_missing_or_invalid_file_is_named(tmp_path: Path) -> None:
    assert "nowhere.toml' does not exist" in refusal(tmp_path / "nowhere.toml")
    (tmp_path / "bad.toml").write_text("[run]\nnum_steps = \n")
    message = refusal(tmp_path / "bad.toml")
    assert "bad.toml' is not valid TOML" in message and "line 2" in message
    (tmp_path / "latin.toml").write_bytes(b'[run]\noutput_dir = "\xff"\n')
    assert "is not valid TOML" in refusal(tmp_path / "latin.toml")
    assert "cannot be read: Is a directory" in refusal(tmp_path)


def test_a_configuration_is_immutable() -> None:
    loaded: Config = config()
    with pytest.raises(ValueError, match="frozen"):
        loaded.run.num_steps = 3  # type: ignore[misc]


def test_sampling_filters_are_rejected_if_the_engine_cannot_return_allowed_ids() -> None:
    for engine in ("sglang", "vllm"):
        for values in ({"top_p": 0.9}, {"top_k": 5000}, {"min_p": 0.1}):
            message = refused_rollout({**values, "engine": engine})
            name, value = next(iter(values.items()))
            assert f"{name} = {value}" in message and "Set top_k between 2 and 4096" in message
    for engine in ("local", "sglang", "vllm"):
        assert "top_k = 1 allows only one token" in refused_rollout({"top_k": 1, "engine": engine})
    for values in ({"engine": "local"}, {"top_k": 4096, "engine": "sglang"}, {"top_k": 4096, "engine": "vllm"}):
        config = minimal()
        config["rollout"] |= {"top_p": 0.9, **values}
        assert Config.model_validate(config).rollout.has_filters
    assert not Config.model_validate(minimal()).rollout.has_filters


def test_evaluation_of_a_vllm_that_returns_allowed_ids_is_greedy_or_has_a_top_k() -> None:
    config = minimal()
    config["rollout"] |= {"engine": "vllm", "top_k": 50}
    config["data"]["eval"] = "held_out.jsonl"
    for values in ({}, {"temperature": 0.7, "top_k": 20}):
        assert Config.model_validate({**config, "eval": values}).rollout.has_filters
    with pytest.raises(ConfigError, match=r"eval.top_k = 0 with eval.temperature = 0.7.*Set eval.top_k"):
        validate({**config, "eval": {"temperature": 0.7, "top_p": 0.95}}, "test")


def refused_rollout(values: dict[str, Any]) -> str:
    config = minimal()
    config["rollout"] |= values
    with pytest.raises(ConfigError) as caught:
        validate(config, "test")
    return str(caught.value)
