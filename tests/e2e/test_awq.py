"""INT4 by AWQ, in an environment with the transformers that nvidia-modelopt can export experts of."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_dppo.hf import build_hf_model, stream_model
from megatron_dppo.weights.hf_folder import save_hf_folder
from tests.e2e.runs import ROOT, environment
from tests.unit.test_quantization import qwen3_moe

pytestmark = pytest.mark.e2e
TOKENIZER = ROOT / "examples/chain_sum/model"
_OLDER = ("transformers==4.57.6", "huggingface-hub==0.36.0", "tokenizers==0.22.1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("awq")
    config = qwen3_moe(moe_intermediate_size=128)
    config.save_pretrained(folder / "source")
    # As folders of the hub have it: transformers 5 writes another name, which older ones do not know.
    more = {"num_experts": config.num_experts, "architectures": ["Qwen3MoeForCausalLM"]}
    written = json.loads((folder / "source" / "config.json").read_text())
    (folder / "source" / "config.json").write_text(json.dumps(written | more))
    for file in TOKENIZER.glob("tokenizer*"):
        (folder / "source" / file.name).write_bytes(file.read_bytes())
    weights = stream_model(build_hf_model(config, torch.float32, seed=0))
    save_hf_folder(folder / "hf", folder / "source", weights, torch.bfloat16)
    lines = [json.dumps({"text": f"{i}+{i + 1}+3="}) for i in range(40)]
    (folder / "texts.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def quantize(model: Path, out: Path, *more: str, first: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools/quantize_hf.py"), str(model / "hf"), str(out), "--format", "int4_awq"]
    env = environment()
    env |= {"PYTHONPATH": os.pathsep.join(part for part in (first, env["PYTHONPATH"]) if part)}
    return subprocess.run([*command, *more], env=env, capture_output=True, text=True, timeout=300, check=False)


def test_what_awq_needs_is_said_before_any_work(model: Path, tmp_path: Path) -> None:
    without = quantize(model, tmp_path / "out")
    assert without.returncode == 2 and "int4_awq needs --calibration FILE" in without.stderr
    newer = quantize(model, tmp_path / "out", "--calibration", str(model / "texts.jsonl"))
    assert newer.returncode == 2 and "cannot export the fused experts of transformers 5." in newer.stderr
    assert "'transformers==4.57.6'" in newer.stderr and not list(tmp_path.iterdir())


@pytest.mark.long
def test_awq_is_written_by_modelopt_and_is_near_the_weights(model: Path, tmp_path: Path) -> None:
    older = tmp_path / "packages"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(older), *_OLDER]
    subprocess.run(install, check=True, timeout=300)
    texts = ("--calibration", str(model / "texts.jsonl"))
    done = quantize(model, tmp_path / "out", *texts, first=str(older))
    assert done.returncode == 0, done.stderr
    assert "INT4 by AWQ, calibrated with 40 texts" in done.stdout
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_algo"] == "W4A16_AWQ"
    assert {"tokenizer.json", "hf_quant_config.json"} <= {file.name for file in (tmp_path / "out").iterdir()}
    before, after = load_file(model / "hf" / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    compared = list(errors(before, after))
    assert len(compared) == 2 * 4 + 3 + 4 * 3 and max(compared) < 0.25
    again = quantize(model, tmp_path / "out", *texts, first=str(older))
    assert again.returncode == 2 and "already exists" in again.stderr
    (tmp_path / "bad.jsonl").write_text('{"prompt": "1+1="}\n')
    bad = quantize(model, tmp_path / "bad", "--calibration", str(tmp_path / "bad.jsonl"), first=str(older))
    assert bad.returncode == 2 and "line 1" in bad.stderr and "'text'" in bad.stderr


def errors(before: dict[str, Tensor], after: dict[str, Tensor]) -> Iterator[float]:
    """Of each layer: relative, of what inputs of one size are multiplied by."""
    for name, weight in before.items():
        scale = after.get(f"{name}_scale")
        if scale is None:
            continue
        packed = after[name]
        # Two rows in a byte, the lower one in the lower bits, in two's complement.
        rows = torch.stack([packed & 15, packed >> 4], 1).flatten(0, 1).to(torch.int8)
        numbers = torch.where(rows > 7, rows - 16, rows).float()
        inputs = after.get(name.replace(".weight", ".pre_quant_scale"))
        found = numbers.unflatten(1, (-1, 128)) * scale[..., None]
        found = found.flatten(1) * (1 if inputs is None else inputs.float())
        yield float((found - weight.float()).norm() / weight.float().norm())
