"""A real server with quantised weights: INT4 of dense layers. On a CPU the engines want AMX for experts and for FP8."""

from __future__ import annotations

import copy
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, Qwen3Config, Qwen3ForCausalLM

from megatron_dppo.config.servers import WeightSyncConfig
from megatron_dppo.export.hf_folder import save_hf_folder
from megatron_dppo.export.quantization import FORMATS, Quantization
from megatron_dppo.hf.folder import build_hf_model, stream_model
from megatron_dppo.weights.attempt import SyncResult
from megatron_dppo.weights.sync import WeightSync
from megatron_dppo_engines.vllm import VLLMServer
from tests.engines.calls import SHORT, ask, call
from tests.engines.proxy import Proxy
from tests.engines.servers import TOOLS, Engine, SharedEngine, start_vllm
from tests.engines.test_sync_proof import other_folder
from tests.engines.tiny import END, SPECIAL, VOCAB, byte_tokenizer
from tests.unit.export.test_quantization import qwen3_moe


def model(seed: int) -> Any:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        eos_token_id=END,
        initializer_range=0.1,
    )
    return Qwen3ForCausalLM(config).bfloat16()


MODELS = [model(0), model(1)]
HOW = Quantization("int4", frozenset(name for name, _ in stream_model(MODELS[0]) if name.endswith("_proj.weight")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first model with all of its layers in INT4."""
    root = tmp_path_factory.mktemp("quantised")
    MODELS[0].save_pretrained(root / "source")
    byte_tokenizer(SPECIAL).save_pretrained(root / "source")
    save_hf_folder(root / "int4", root / "source", stream_model(MODELS[0]), torch.bfloat16, quantization=HOW)
    config = json.loads((root / "int4" / "config.json").read_text())
    config["quantization_config"]["ignore"] = ["lm_head"]  # for dense layers
    (root / "int4" / "config.json").write_text(json.dumps(config))
    return root / "int4"


@pytest.fixture(scope="module")
def vllm(folder: Path) -> Iterator[Engine]:
    with SharedEngine(lambda: start_vllm(folder, folder.parent / "log", "--dtype", "bfloat16")) as shared:
        yield shared.engine()


def dequantized(folder: Path) -> Any:
    """Load a quantized folder into an fp32 model of transformers."""
    settings = CompressedTensorsConfig(run_compressed=False)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=settings)


def off(model: Any, engine: Engine) -> float:
    """The mean difference of a server's log-probabilities to a model's."""
    answer = call(engine, lambda server: server.generate(ask(SHORT, 40)))
    ids = torch.cat([torch.tensor(SHORT), answer.token_ids.long()])
    with torch.no_grad():
        table = model.float().eval()(ids[None]).logits[0, :-1].log_softmax(-1)
    expected = table.gather(1, ids[1:, None])[-len(answer.token_ids) :, 0]
    return float((answer.logprobs - expected).abs().mean())


def test_a_server_with_int4_layers_samples_from_each_version_and_a_stale_one_is_detected(
    vllm: Engine, folder: Path, tmp_path: Path
) -> None:
    with Proxy(vllm.url) as proxy:
        config = WeightSyncConfig(method="disk", timeout_seconds=120)
        settings: dict[str, Any] = dict(model_folder=folder, weights_folder=tmp_path, dtype=torch.bfloat16)
        sync = WeightSync([VLLMServer(proxy.url)], config, device=torch.device("cpu"), quantization=HOW, **settings)  # type: ignore[list-item]

        def send(which: int, version: int) -> SyncResult:
            return sync.send(iter(list(stream_model(MODELS[which]))), version)

        try:
            assert send(0, 0).good
            first = off(dequantized(tmp_path / "version_000000"), vllm)
            result = send(1, 1)
            assert result.good and "all weights: kept by the server in a form of its own" in result.notes[proxy.url]
            second = off(dequantized(tmp_path / "version_000001"), vllm)
            assert first < 0.02 and second < 0.02
            plain = (off(copy.deepcopy(MODELS[1]), vllm), off(copy.deepcopy(MODELS[0]), vllm))
            assert 0.05 < plain[0] < 0.5 < plain[1], "the weights before they were quantised, and the other ones"
            proxy.before = other_folder(tmp_path / "version_000001")
            assert "all weights: not what was sent" in send(0, 2).failed[proxy.url]
            proxy.before = None
            assert send(0, 2).good and off(dequantized(tmp_path / "version_000002"), vllm) < 0.02
        finally:
            sync.close()


SGLANG_READS = """
import json, sys
import sglang_cpu
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.quantization import get_quantization_config
from sglang.srt.layers.quantization.utils import is_layer_skipped
for folder in sys.argv[1:]:
    name = ModelConfig(folder).quantization
    config = get_quantization_config(name).from_config(json.load(open(folder + "/config.json"))["quantization_config"])
    if name == "fp8":
        layers = ("model.layers.1.mlp.gate", "model.layers.1.mlp.experts", "model.layers.1.self_attn.o_proj")
        print(config.weight_block_size, config.is_checkpoint_fp8_serialized,
              [is_layer_skipped(layer, config.ignored_layers) for layer in layers])
    else:
        weights = config.target_scheme_map["Linear"]["weights"]
        print(name, config.quant_format, weights.num_bits, weights.group_size, weights.symmetric)
"""


def test_sglang_loads_both_quantization_formats(tmp_path: Path) -> None:
    base = Path(
        subprocess.run(
            [TOOLS / "sglang.sh", "install", "0.5.23"], capture_output=True, text=True, check=True
        ).stdout.strip()
    )
    config = qwen3_moe(architectures=["Qwen3MoeForCausalLM"])
    config.save_pretrained(tmp_path / "source")
    weights = dict(stream_model(build_hf_model(config, torch.bfloat16, seed=0)))
    for form in FORMATS:
        save_hf_folder(
            tmp_path / form, tmp_path / "source", weights.items(), torch.bfloat16, quantization=Quantization(form)
        )
    env = os.environ | {"PYTHONPATH": f"{TOOLS}/sglang_shim:{base}/sglang-0.5.23", "SGLANG_USE_CPU_ENGINE": "1"}
    command = [base / "bin/python", "-c", SGLANG_READS, *(tmp_path / form for form in FORMATS)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    fp8, int4 = done.stdout.splitlines()[-2:]
    assert fp8 == "[128, 128] True [True, False, False]"
    assert int4 == "compressed-tensors pack-quantized 4 32 True"
