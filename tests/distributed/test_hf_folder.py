"""A folder that several processes write together is the folder of one, and a disk that is full on one stops all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megatron_dppo.errors import DiskError
from megatron_dppo.export import hf_folder
from megatron_dppo.export.hf_folder import save_hf_folder
from megatron_dppo.hf.folder import build_hf_model, read_hf_config, stream_model
from tests.distributed.spawn import run_distributed

pytestmark = pytest.mark.distributed

MODEL = Path(__file__).parents[2] / "examples/chain_sum/model"
SHARD = 100_000
"""bytes of a file: some tensors are larger, most smaller"""


def write_together(rank: int, world_size: int, folder: str) -> None:
    model = build_hf_model(read_hf_config(MODEL), torch.float32, seed=0)
    group = dist.group.WORLD
    write = hf_folder.save_file
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        save_hf_folder(Path(folder) / name, MODEL, stream_model(model), dtype, group=group, max_shard_bytes=SHARD)
    whole = Path(folder) / "one_file"
    save_hf_folder(whole, MODEL, stream_model(model), torch.float32, group=group)

    def full(tensors: dict[str, torch.Tensor], file: Path, metadata: dict[str, str]) -> None:
        if rank == 1:
            raise OSError(28, "No space left on device")
        write(tensors, file, metadata=metadata)

    hf_folder.save_file = full
    taken = 0

    def counted() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal taken
        for item in stream_model(model):
            taken += 1
            yield item

    with pytest.raises(DiskError, match="disk is full"):
        save_hf_folder(Path(folder) / "fp32", MODEL, counted(), torch.bfloat16, group=group, max_shard_bytes=SHARD)
    hf_folder.save_file = write
    assert taken == sum(1 for _ in stream_model(model)), "the other ranks gather to the end"
    files = json.loads((Path(folder) / "fp32/model.safetensors.index.json").read_text())["weight_map"].values()
    (Path(folder) / f"rank_{rank}").write_text(str(len(set(files))))


@pytest.mark.parametrize("world_size", [2, 3])
def test_several_ranks_write_what_one_writes(tmp_path: Path, world_size: int) -> None:
    run_distributed(write_together, world_size, str(tmp_path))
    model = build_hf_model(read_hf_config(MODEL), torch.float32, seed=0)
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        folder = tmp_path / name
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        expected = {key: tensor.detach().to(dtype) for key, tensor in stream_model(model)}
        assert set(index["weight_map"]) == set(expected)
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
        files = sorted(set(index["weight_map"].values()))
        count = len(files)
        assert count > world_size and files == [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        assert sorted(file.name for file in folder.glob("*.safetensors")) == files
        for file in files:
            result = load_file(folder / file)
            assert len(result) == 1 or sum(tensor.nbytes for tensor in result.values()) <= SHARD
            for key, tensor in result.items():
                assert index["weight_map"][key] == file and tensor.dtype == dtype
                assert torch.equal(tensor, expected[key])
    second = build_hf_model(read_hf_config(tmp_path / "fp32"), torch.float32).from_pretrained(tmp_path / "fp32")
    for (name, tensor), (_, before) in zip(stream_model(second), stream_model(model), strict=True):
        assert torch.equal(tensor.float(), before), name
    assert [f.name for f in (tmp_path / "one_file").glob("*.safetensors")] == ["model.safetensors"]
