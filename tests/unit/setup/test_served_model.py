"""Servers with quantized weights: checks before the start, and verification of each version."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_dppo.config.io import load_config
from megatron_dppo.errors import CheckpointError, ConfigError
from megatron_dppo.export.hf_folder import save_hf_folder
from megatron_dppo.export.quantization import Quantization, quantize_stream
from megatron_dppo.hf.folder import build_hf_model, stream_model
from megatron_dppo.run.guard import FirstUpdateGuard
from megatron_dppo.setup import engines
from megatron_dppo.setup.preflight import CHECKS, Start
from megatron_dppo.setup.server_checks import check_served_model, served_quantization
from megatron_dppo.weights.sync import WeightSync
from tests.unit.configs import config as config_of
from tests.unit.configs import server_plans
from tests.unit.export.test_quantization import qwen3_moe
from tests.unit.setup.test_preflight_servers import problems_of, servers, sglang, vllm  # noqa: F401
from tests.unit.weight_server import FakeServer, make


def weights(seed: int) -> dict[str, Tensor]:
    return {name: w.bfloat16() for name, w in stream_model(build_hf_model(qwen3_moe(), torch.float32, seed=seed))}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``model`` and its quantized copies ``fp8`` and ``int4``."""
    folder = tmp_path_factory.mktemp("served")
    qwen3_moe().save_pretrained(folder / "model")
    for form in ("fp8", "int4"):
        how = Quantization(form)  # type: ignore[arg-type]
        save_hf_folder(folder / form, folder / "model", weights(0).items(), torch.bfloat16, quantization=how)
    return folder


def config(folder: Path, served: str | Path, **sections: Any) -> Any:
    rollout = {"engine": "sglang", "servers": {"model": str(folder / served)}, "weight_sync": {"method": "disk"}}
    sections["rollout"] = rollout | sections.get("rollout", {})
    run = {"run": {"output_dir": str(folder / "out"), "num_steps": 1}}
    return config_of(**{"model": {"path": str(folder / "model")}, **run, **sections})


@pytest.mark.parametrize("form", ["fp8", "int4"])
def test_each_version_is_published_in_the_format_of_the_folder(
    folder: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(folder, form)
    check_served_model(settings.rollout, settings.model)
    server = FakeServer("a:1")
    monkeypatch.setattr(engines, "connect_servers", lambda _: [server])
    sync = engines.build_weight_sync(settings, qwen3_moe(), torch.device("cpu"))
    result = sync.send(iter(weights(1).items()), 1)
    assert result.good
    assert server.holds(dict(quantize_stream(weights(1).items(), Quantization(form))))  # type: ignore[arg-type]
    written = json.loads((folder / "out/weights/version_000001/config.json").read_text())
    assert written == json.loads((folder / form / "config.json").read_text())
    sync.close()


def test_a_quantized_server_with_old_weights_or_without_scales_is_detected(folder: Path) -> None:
    how = Quantization("fp8")
    served = FakeServer("a:1")
    served.plain = False  # in a form of its own
    sync = disk(served, folder, how)
    served.weights = dict(quantize_stream(weights(0).items(), how))
    assert "all weights: not checked in this sync" in sync.send(iter(weights(0).items()), 0).notes[served.url]
    result = sync.send(iter(weights(1).items()), 1)
    assert result.good and "all weights: kept by the server in a form of its own" in result.notes[served.url]
    served.ignores = set(served.weights)
    assert "all weights: not what was sent" in sync.send(iter(weights(2).items()), 2).failed[served.url]
    # Weights that did not change need not change the server.
    assert sync.send(iter(weights(1).items()), 3).good
    sync.close()

    plain = FakeServer("b:1")
    sync = disk(plain, folder, how)
    plain.ignores = {name for name in quantized_names_of(how) if name.endswith("_scale_inv")}
    assert "weight_scale_inv" in sync.send(iter(weights(1).items()), 0).failed[plain.url]
    sync.close()


def quantized_names_of(how: Quantization) -> list[str]:
    return [name for name, _ in quantize_stream(weights(0).items(), how)]


def disk(server: FakeServer, folder: Path, how: Quantization) -> WeightSync:
    return make([server], folder / "fp8", torch.bfloat16, method="disk", quantization=how)


def test_weights_that_cannot_be_quantized_reach_no_server(folder: Path) -> None:
    server = FakeServer("a:1")
    sync = disk(server, folder, Quantization("fp8"))
    broken = weights(1)
    name = "model.layers.1.self_attn.o_proj.weight"
    broken[name][0, 0] = torch.nan
    assert f"{name} has values that are not finite" in sync.send(iter(broken.items()), 0).failed[server.url]
    assert not server.weights
    sync.close()


def test_servers_start_with_the_folder_and_have_the_limits_of_bf16(folder: Path) -> None:
    settings = config(
        folder, "fp8", model={"path": str(folder / "model"), "random_init": True}, distillation={"teacher_path": "t"}
    )
    (plan,) = server_plans(settings, {})
    assert plan.argv[plan.argv.index("--model-path") + 1] == str(folder / "fp8") and "dummy" not in plan.argv
    fp16 = config(folder, "fp8", model={"path": "m", "dtype": "fp16"}, rollout={"dtype": "fp16"})
    guard = FirstUpdateGuard.from_config(
        fp16.train, fp16.rollout, fp16.model, nonfinite_fraction=0.0, is_on_policy=True
    )
    assert guard.dtype == "bf16"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"weight_sync": {"method": "ipc"}}, "'ipc'.*set method to 'disk'"),
        ({"dtype": "fp32"}, "dtype = 'fp32'.*'bf16' or 'fp16'"),
        ({"engine": "local"}, "no effect with rollout.engine = 'local'"),
    ],
)
def test_settings_that_do_not_support_a_quantized_folder_are_rejected(
    folder: Path, changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        config(folder, "fp8", rollout=changes)


@pytest.mark.parametrize(
    ("form", "change", "problem"),
    [
        (None, None, "is not quantized.*megatron-dppo"),
        ("fp8", {"weight_block_size": None}, "weight_block_size = None"),
        ("fp8", {"weight_block_size": [64, 64]}, r"weight_block_size = \[64, 64\]"),
        ("fp8", {"activation_scheme": "static"}, "activation_scheme = 'static'"),
        ("fp8", {"scale_fmt": "ue8m0"}, "scale_fmt = 'ue8m0'"),
        ("fp8", {"quant_method": "awq"}, "quant_method = 'awq'; supported are 'fp8'"),
        ("int4", {"format": "nvfp4-pack-quantized"}, "format = 'nvfp4-pack-quantized'"),
        ("int4", {"group_size": 128}, "group_size = 128"),
        ("int4", {"symmetric": False}, "symmetric = False"),
    ],
)
def test_folders_with_an_unsupported_quantization_are_rejected(
    folder: Path, tmp_path: Path, form: str | None, change: dict[str, Any] | None, problem: str
) -> None:
    settings = json.loads((folder / (form or "model") / "config.json").read_text())
    if form is not None and change is not None:
        quantization = settings["quantization_config"]
        is_of_group = form == "int4" and "format" not in change
        (quantization["config_groups"]["group_0"]["weights"] if is_of_group else quantization).update(change)
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=problem):
        served_quantization(config(folder, tmp_path).rollout)


def test_another_model_missing_weights_and_a_missing_folder_are_rejected(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"rollout.servers.model = .*config.json is missing"):
        served_quantization(config(folder, "nowhere").rollout)
    settings = json.loads((folder / "fp8" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=r"rollout.servers.model = .*\*.safetensors"):
        served_quantization(config(folder, tmp_path).rollout)
    (folder / "other").mkdir()
    other = config(folder, "other")
    for file in (folder / "fp8").iterdir():
        (folder / "other" / file.name).write_bytes(file.read_bytes())
    (folder / "other" / "config.json").write_text(json.dumps(settings | {"hidden_size": 512}))
    with pytest.raises(ConfigError, match=r"another model than model.path = .*hidden_size 256, 512"):
        check_served_model(other.rollout, other.model)
    (folder / "other" / "config.json").write_text(json.dumps(settings))
    check_served_model(other.rollout, other.model)
    (folder / "other" / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 17]}))
    with pytest.raises(ConfigError, match=r"another model than .*eos_token_id \[\], \[2, 17\]"):
        check_served_model(other.rollout, other.model)
    (preflight_check,) = (check for check in CHECKS if check.name == "the servers' model")
    with pytest.raises(ConfigError, match="another model"):
        preflight_check.find(Start(config(folder, "other"), world_size=1))


def test_a_vllm_server_without_quantized_weights_is_reported_before_the_start(servers: Any, folder: Path) -> None:  # noqa: F811
    wanted = {"rollout__servers__model": str(folder / "fp8"), "rollout__weight_sync__method": "disk"}
    wanted |= {"rollout__dtype": "bf16", "data__max_prompt_tokens": "200"}
    assert problems_of("vllm", servers(vllm(model={"quantization": "fp8"})), **wanted) == []
    (problem,) = problems_of("vllm", servers(vllm()), **wanted)
    assert "has no quantized weights" in problem and "--model" in problem
    assert problems_of("sglang", servers(sglang()), **wanted) == []


def test_the_path_is_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "quantized").mkdir()
    (tmp_path / "run.toml").write_text(
        '[run]\noutput_dir = "out"\nnum_steps = 1\n[model]\npath = "m"\n[data]\ntrain = "task:chain_sum"\n'
        "[rollout]\nprompts_per_step = 1\nsamples_per_prompt = 2\nmax_new_tokens = 4\n"
        'engine = "sglang"\nservers.model = "quantized"\nweight_sync.method = "disk"\n[optimizer]\nlr = 1e-3\n'
    )
    settings = load_config(tmp_path / "run.toml", [])
    assert settings.rollout.servers.model == str(tmp_path / "quantized")
