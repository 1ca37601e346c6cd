"""The conversion tools, as a user starts them: there and back over different layouts, and what the check finds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from megatron_dppo.export.hf_folder import save_hf_folder
from megatron_dppo.hf.folder import build_hf_model, stream_model
from megatron_dppo.hf.weight_files import FolderWeights
from megatron_dppo_convert.upcycled_config import Upcycling
from megatron_dppo_convert.upcycling import upcycle_folder
from tests.distributed.parity import hf_config, hf_reference
from tests.e2e.forked import train_forked
from tests.e2e.runs import ROOT, environment

pytestmark = pytest.mark.e2e

LAYOUT = ["--dtype", "fp32", "--expert-model-parallel-size"]
SIZES = {"vocab_size": 117, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3} | {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.08,
    "tie_word_embeddings": True,
}
"""Configuration of a dense model."""


def convert(name: str, *arguments: str, processes: int = 1) -> subprocess.CompletedProcess[str]:
    """``megatron-dppo convert NAME ARGUMENTS``."""
    return train_forked(["convert", name, *arguments], environment(), processes, timeout=300, entry="main")


def script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A file of ``tools`` in a process of its own."""
    command = [sys.executable, str(ROOT / "tools" / name), *arguments]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def hf_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("convert")
    hf_config(tied=False).save_pretrained(folder / "source")
    save_hf_folder(folder / "hf", folder / "source", stream_model(hf_reference(tied=False)), torch.float32)
    return folder / "hf"


def test_there_on_two_processes_and_back_on_one_is_bitwise(hf_folder: Path, tmp_path: Path) -> None:
    checkpoint, back = str(tmp_path / "megatron"), str(tmp_path / "back")
    there = convert("hf-to-megatron", str(hf_folder), checkpoint, *LAYOUT, "2", processes=2)
    assert there.returncode == 0, there.stderr
    assert there.stdout.count("wrote") == 1
    second = convert("megatron-to-hf", checkpoint, str(hf_folder), back, *LAYOUT, "1")
    assert second.returncode == 0, second.stderr
    result, reference = FolderWeights(back), FolderWeights(hf_folder)
    assert result.names() == reference.names()
    assert all(torch.equal(result[name], reference[name]) for name in reference.names())
    taken = script("convert_hf_to_megatron.py", str(hf_folder), checkpoint, *LAYOUT, "1")
    assert taken.returncode == 2 and "already exists" in taken.stderr

    weights = load_file(Path(back) / "model.safetensors")
    weights["model.layers.2.mlp.experts.5.up_proj.weight"][3, 4] += 1e-3
    save_file(weights, Path(back) / "model.safetensors", metadata={"format": "pt"})
    checked = script("check_conversion.py", back, "--checkpoint", checkpoint, *LAYOUT, "1")
    assert checked.returncode == 1
    assert "model.layers.2.mlp.experts.5.up_proj.weight differs by up to 1.0e-03" in checked.stdout


def test_quantised_export_is_the_quantised_folder_and_nothing_is_overwritten(hf_folder: Path, tmp_path: Path) -> None:
    checkpoint, direct, out = (str(tmp_path / name) for name in ("megatron", "direct", "out"))
    assert convert("hf-to-megatron", str(hf_folder), checkpoint, "--dtype", "bf16").returncode == 0
    done = convert("quantize", str(hf_folder), direct, "--format", "fp8")
    assert done.returncode == 0 and f"wrote {direct}: 112 weights in fp8" in done.stdout, done.stderr
    arguments = [checkpoint, str(hf_folder), out, "--quantize", "fp8", "--expert-model-parallel-size", "2"]
    exported = convert("megatron-to-hf", *arguments, processes=2)
    assert exported.returncode == 0, exported.stderr
    result, wanted = (
        {name: w for file in Path(folder).glob("*.safetensors") for name, w in load_file(file).items()}
        for folder in (out, direct)
    )
    assert result.keys() == wanted.keys()
    assert not [n for n in result if not torch.equal(result[n].view(torch.uint8), wanted[n].view(torch.uint8))]
    assert (Path(out) / "config.json").read_text() == (Path(direct) / "config.json").read_text()

    before = (Path(out) / "config.json").stat().st_mtime_ns
    for name, taken in (
        ("convert_megatron_to_hf.py", arguments),
        ("quantize_hf.py", [str(hf_folder), out, "--format", "fp8"]),
    ):
        refused = script(name, *taken)
        assert refused.returncode == 2 and "already exists" in refused.stderr
    assert (Path(out) / "config.json").stat().st_mtime_ns == before
    twice = convert("quantize", direct, str(tmp_path / "twice"), "--format", "fp8")
    assert twice.returncode == 2 and "quantization_config = 'fp8', which is not supported" in twice.stderr
    assert not (tmp_path / "twice").exists()


def test_check_of_a_good_folder_under_tensor_parallelism(hf_folder: Path) -> None:
    done = convert("check", str(hf_folder), *LAYOUT, "1", "--tensor-model-parallel-size", "2", processes=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same: every weight bit for bit" in done.stdout


MEGATRON_AGAINST_DENSE = """
import sys
from pathlib import Path
from megatron_dppo.config.schema import ParallelConfig
from megatron_dppo.run.conversion import open_converter
from megatron_dppo_convert.comparison import find_differences, measure_logprob_error
for folder in map(Path, sys.argv[1:]):
    with open_converter(str(folder / "upcycled"), ParallelConfig(), "fp32") as converter:
        converter.load_hf()
        assert not find_differences(converter)
        converter.hf_folder = folder / "dense"
        print("error", measure_logprob_error(converter))
"""


def test_megatron_computes_of_an_upcycled_folder_what_the_dense_model_computes(tmp_path: Path) -> None:
    folders = [tmp_path / family for family in ("llama", "qwen2", "qwen3")]
    for folder in folders:
        config = AutoConfig.for_model(folder.name, **SIZES)
        build_hf_model(config, torch.float32, seed=0).save_pretrained(folder / "dense")
        upcycle_folder(folder / "dense", folder / "upcycled", Upcycling(num_experts=4, top_k=2, noise=0.0))
    command = [sys.executable, "-c", MEGATRON_AGAINST_DENSE, *map(str, folders)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    errors = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("error")]
    assert len(errors) == 3 and max(errors) < 1e-5
