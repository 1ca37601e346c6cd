"""Which files of a folder are the model: the index decides, buffers are skipped and named, damage is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_dppo.errors import CheckpointError
from megatron_dppo.hf.folder import build_hf_model, check_weights_fit, copy_into_model, read_hf_config, stream_folder
from megatron_dppo.hf.weight_files import FolderWeights
from megatron_dppo_engines.weight_files import INDEX, SINGLE

SIZES = {"vocab_size": 56, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8} | {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
STALE = {"model.embed_tokens.weight": torch.full((56, 32), 7.0)}
BUFFERS = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(4) for layer in range(2)}


def model_folder(folder: Path, shard: str = "20KB", model_type: str = "qwen3", **changes: object) -> Path:
    """Save a random model in fp32 with transformers, in several files by default."""
    config = AutoConfig.for_model(model_type, **SIZES | changes)
    build_hf_model(config, torch.float32, seed=3).save_pretrained(folder, max_shard_size=shard)
    return folder


def read_by_transformers(folder: Path) -> dict[str, Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return dict(model.state_dict())


def in_file(folder: Path, file: str, tensors: dict[str, Tensor]) -> None:
    """Add tensors to a file, and to the index if there is one."""
    before = load_file(folder / file) if (folder / file).exists() else {}
    save_file(before | tensors, folder / file, metadata={"format": "pt"})
    index = folder / INDEX
    if index.exists():
        content = json.loads(index.read_text())
        content["weight_map"] |= dict.fromkeys(tensors, file)
        index.write_text(json.dumps(content))


def first_shard(folder: Path) -> str:
    return sorted(file.name for file in folder.glob("model-*"))[0]


BESIDE = {
    "a shard of an older save with more files": "model-00001-of-00099.safetensors",
    "a shard that sorts last": "zzz.safetensors",
    "the authors' own names": "consolidated.safetensors",
    "adapters": "adapter_model.safetensors",
    "a numbered set of another name": "old-00001-of-00001.safetensors",
}


@pytest.mark.parametrize("shard", ["20KB", "1GB"])
@pytest.mark.parametrize("name", BESIDE.values(), ids=BESIDE)
def test_files_beside_the_model_are_not_read_and_named(tmp_path: Path, name: str, shard: str) -> None:
    folder = model_folder(tmp_path, shard)
    save_file(STALE | {"tok_embeddings.weight": torch.ones(2)}, folder / name, metadata={"format": "pt"})
    expected = read_by_transformers(folder)
    check_weights_fit(folder, read_hf_config(folder))
    weights = FolderWeights(folder)
    assert weights.names() == expected.keys()
    assert all(torch.equal(weights[key], tensor) for key, tensor in expected.items())
    assert weights.ignored_files == (name,) and name in (weights.note() or "")


@pytest.mark.parametrize("shard", ["20KB", "1GB"])
def test_rotary_buffers_are_skipped_by_name_and_counted(tmp_path: Path, shard: str) -> None:
    folder = model_folder(tmp_path, shard)
    expected = read_by_transformers(folder)
    file = SINGLE if shard == "1GB" else first_shard(folder)
    in_file(folder, file, BUFFERS)
    hf_config = read_hf_config(folder)
    model = build_hf_model(hf_config, torch.float32)
    copy_into_model(model, stream_folder(folder, hf_config))
    assert all(torch.equal(tensor, expected[key]) for key, tensor in model.state_dict().items())
    note = FolderWeights(folder).note()
    assert note is not None and "2 buffers that follow from config.json" in note
    for other in ("model.layers.0.self_attn.rotary_emb.weight", "model.layers.0.inv_freq", "inv_freq", "extra"):
        in_file(folder, file, {other: torch.ones(4)})
        with pytest.raises(CheckpointError, match=rf"{other} does not .*, 1 unexpected\)"):
            check_weights_fit(folder, hf_config)
        copied = load_file(folder / file)
        del copied[other]
        save_file(copied, folder / file, metadata={"format": "pt"})
        if (index := folder / INDEX).exists():
            content = json.loads(index.read_text())
            del content["weight_map"][other]
            index.write_text(json.dumps(content))
    assert model_folder(tmp_path / "plain") and FolderWeights(tmp_path / "plain").note() is None


def test_a_weight_in_two_files_is_read_from_the_one_that_the_index_names(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    expected = read_by_transformers(folder)["model.embed_tokens.weight"]
    content = json.loads((folder / INDEX).read_text())["weight_map"]
    other = next(file for file in sorted(set(content.values())) if file != content["model.embed_tokens.weight"])
    save_file(load_file(folder / other) | STALE, folder / other, metadata={"format": "pt"})
    assert torch.equal(FolderWeights(folder)["model.embed_tokens.weight"], expected)


def cut(folder: Path) -> None:
    file = folder / first_shard(folder)
    file.write_bytes(file.read_bytes()[:-1])


def as_directory(folder: Path) -> None:
    file = folder / first_shard(folder)
    file.unlink()
    file.mkdir()


def as_pipe(folder: Path) -> None:
    file = folder / first_shard(folder)
    file.unlink()
    os.mkfifo(file)


def as_lfs_pointer(folder: Path) -> None:
    (folder / first_shard(folder)).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")


def empty(folder: Path) -> None:
    (folder / first_shard(folder)).write_bytes(b"")


def write_index(content: object) -> Callable[[Path], None]:
    return lambda folder: [(folder / INDEX).write_text(json.dumps(content)), None][1]


def two_models(folder: Path) -> None:
    save_file(STALE, folder / SINGLE, metadata={"format": "pt"})


def without_index(folder: Path) -> None:
    (folder / INDEX).unlink()
    (folder / first_shard(folder)).unlink()


def two_without_index(folder: Path) -> None:
    without_index(folder)
    for file in folder.glob("model-*"):
        file.unlink()
    for name in ("a.safetensors", "b.safetensors"):
        save_file(STALE, folder / name)


def adapters_alone(folder: Path) -> None:
    two_without_index(folder)
    (folder / "a.safetensors").unlink()
    (folder / "b.safetensors").rename(folder / "adapter_model.safetensors")


def quantized(folder: Path) -> None:
    in_file(folder, first_shard(folder), {"model.norm.weight": torch.ones(32).to(torch.float8_e4m3fn)})


DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (cut, "not a readable safetensors file"),
    (empty, "not a readable safetensors file"),
    (as_directory, "is not a file"),
    (as_pipe, "is not a file"),
    (as_lfs_pointer, "pointer of Git LFS.*git lfs pull"),
    (write_index([]), "Expected JSON with 'weight_map'"),
    (write_index({"weight_map": 3}), "Expected JSON with 'weight_map'"),
    (write_index({"weight_map": {}}), "empty 'weight_map'"),
    (write_index({"weight_map": {"a": "../x.safetensors"}}), "Expected names of .* got '../x.safetensors' for a"),
    (write_index({"weight_map": {"a": "/x.safetensors"}}), "Expected names of"),
    (write_index({"weight_map": {"a": None}}), "Expected names of .* got None"),
    (write_index({"weight_map": {"a": "pytorch_model.bin"}}), "Expected names of"),
    (write_index({"weight_map": {"a": "b.safetensors"}}), "names b.safetensors .* which is not there"),
    (two_models, "holds two models: model.safetensors.*Delete one"),
    (without_index, r"numbered safetensors files and no model.safetensors.index.json"),
    (two_without_index, "several safetensors files .*a.safetensors, b.safetensors"),
    (adapters_alone, r"has no \*.safetensors weights"),
    (quantized, r"model.norm.weight has shape \(32,\) in F8_E4M3, expected"),
]


def test_damaged_and_ambiguous_folders_are_refused(tmp_path: Path) -> None:
    for number, (damage, message) in enumerate(DAMAGES):
        folder = model_folder(tmp_path / str(number))
        hf_config = read_hf_config(folder)
        damage(folder)
        with pytest.raises(CheckpointError, match=message):
            check_weights_fit(folder, hf_config)
    folder = model_folder(tmp_path / "named elsewhere")
    content = json.loads((folder / INDEX).read_text())
    content["weight_map"]["more.weight"] = first_shard(folder)
    (folder / INDEX).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"more.weight in .*, got none"):
        FolderWeights(folder)


def test_a_file_that_the_system_does_not_map_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_folder(tmp_path, "1GB")
    for error in (RuntimeError("unable to mmap 9 bytes"), OSError(19, "No such device")):

        def fail(*args: object, error: Exception = error, **kwargs: object) -> None:
            raise error

        monkeypatch.setattr("megatron_dppo_engines.weight_files.safe_open", fail)
        with pytest.raises(CheckpointError, match=r"model.safetensors .*(mmap|device)"):
            FolderWeights(folder)


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "part-1-of-1.safetensors", "weights.safetensors"])
def test_a_complete_set_without_an_index_is_read(tmp_path: Path, name: str) -> None:
    folder = model_folder(tmp_path, "1GB")
    expected = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    names, half = list(expected), len(expected) // 2
    parts = [names[:half], names[half:]] if "00002" in name else [names]
    for number, part in enumerate(parts, 1):
        file = folder / name.replace("00001", f"{number:05d}")
        save_file({key: expected[key] for key in part}, file, metadata={"format": "pt"})
    check_weights_fit(folder, read_hf_config(folder))
    weights = FolderWeights(folder)
    assert all(torch.equal(weights[key], tensor) for key, tensor in expected.items())
    if len(parts) == 2:
        save_file(expected, folder / name, metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match="Expected each weight"):
            FolderWeights(folder)


def test_the_output_of_a_tied_model_must_be_its_embedding(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, "1GB", tie_word_embeddings=True)
    hf_config = read_hf_config(folder)
    embedding = load_file(folder / SINGLE)["model.embed_tokens.weight"]
    for same in (embedding.clone(), embedding.double()):
        in_file(folder, SINGLE, {"lm_head.weight": same})
        check_weights_fit(folder, hf_config)
        assert "lm_head.weight" not in dict(stream_folder(folder, hf_config))
    changed = embedding.clone()
    changed[-1, -1] += 1e-6
    for other in (changed, embedding[:-1].clone(), torch.ones(3)):
        in_file(folder, SINGLE, {"lm_head.weight": other})
        for read in (check_weights_fit, stream_folder):
            with pytest.raises(CheckpointError, match=r"lm_head.weight to equal model.embed_tokens.weight"):
                read(folder, hf_config)
        with pytest.raises(CheckpointError, match="tie_word_embeddings = true"):
            list(FolderWeights(folder).stream(tied=True))
