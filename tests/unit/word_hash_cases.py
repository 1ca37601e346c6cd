"""The Triton kernel of the weights' digests against a plain numpy reference: cases for interpret_row_kernels.py."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_dppo.weights import digests
from megatron_dppo_engines.serving.vllm_extension import megatron_dppo_digest
from megatron_dppo_engines.serving.vllm_extension.megatron_dppo_digest import (
    BatchedWords,
    Cut,
    PartsDigest,
    batched_words,
)
from megatron_dppo_engines.weight_digests import WeightLayout
from tests.unit.weights import test_weight_digests as served

TILE_BYTES = 4 * 8192


def reference(parts: dict[int, np.ndarray], size: int) -> str:
    """The hash of a tensor of ``size`` bytes, of which only ``parts`` are there, by SGLang's source in uint32."""

    def mix(x: np.ndarray) -> np.ndarray:
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
        x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
        return x ^ (x >> np.uint32(16))

    def turned(x: np.ndarray, bits: int) -> np.ndarray:
        return (x << np.uint32(bits)) | (x >> np.uint32(32 - bits))

    words = -(-size // 4)
    tiles = np.zeros((2, -(-words // 8192)), np.uint32)
    with np.errstate(over="ignore"):
        for start, data in parts.items():
            value = np.pad(data, (0, -len(data) % 4)).view(np.uint32)
            at = np.arange(start // 4, start // 4 + len(value), dtype=np.uint64)
            p = at.astype(np.uint32)
            seeds = (0x243F6A88, ((0x243F6A88 * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF)
            for row, factor, bits in ((0, 0x27D4EB2D, 15), (1, 0x165667B1, 13)):
                key = (p * np.uint32(factor) + np.uint32(seeds[row])) ^ turned(p, bits)
                np.add.at(tiles[row], (at // np.uint64(8192)).astype(np.int64), mix(value ^ key))
        mixed = mix(tiles ^ np.uint32(words * 4 & 0xFFFFFFFF)).astype(np.uint64)
    total = (int(mixed[0].sum()) * 2**32 + int(mixed[1].sum())) % 2**64
    total = (total ^ total >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    total = (total ^ total >> 27) * 0x94D049BB133111EB % 2**64
    return f"{total ^ total >> 31:016x}"


def hash_of(data: Tensor) -> str:
    data = data.contiguous().view(-1).view(torch.uint8)
    return reference({0: data.numpy()}, len(data))


def noise(size: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def whole(data: Tensor) -> Cut:
    return Cut(1, 1, len(data), len(data), 0)


def words_of_sglang() -> None:
    """Also in parts that come in any order, several of them in a word."""
    for count, dtype, digest in served.SGLANG_GPU_HASH:
        data = served.pattern(count, dtype).view(torch.uint8)
        assert reference({0: data.numpy()}, len(data)) == digest, "the reference itself"
        for size in (len(data), 4096, 1554):
            batched = BatchedWords()
            for start in reversed(range(0, len(data), size)):
                part = data[start : start + size]
                batched.add("w", start, part, whole(part))
            assert batched.hexdigests() == {"w": [digest]}, (count, dtype, size)


def words_of_parts_that_break_words() -> None:
    """Edges at every distance from a word; also a part of whole words between two broken ones."""
    data = noise(80)
    for edges in ([0, 6, 10, 80], [0, 4, 7, 15, 16, 20, 80], [0, 1, 2, 3, 4, 44, 46, 80]):
        batched, parts = BatchedWords(), PartsDigest("words")
        for start, end in reversed(list(itertools.pairwise(edges))):
            part = data[start:end].clone()  # it starts at a word, wherever its target's part does
            batched.add("w", start, part, whole(part))
            parts.add(start, part)
        assert batched.hexdigests()["w"] == [hash_of(data)] and parts.hexdigest() == hash_of(data), edges


def words_of_many_targets_and_batches() -> None:
    """Sizes around a tile and a block, in launches of a few parts."""
    sizes = [0, 4, 6, TILE_BYTES - 4, TILE_BYTES, TILE_BYTES + 4, 3 * TILE_BYTES + 1024, 5000, 4096]
    for batch in (1, 40_000, 2**40):
        with mock.patch.object(batched_words, "BATCH_BYTES", batch):
            batched = BatchedWords()
            for i, size in enumerate(sizes):
                batched.add(i, 0, noise(size, i), whole(noise(size)))
            result = batched.hexdigests()
        assert result == {i: [hash_of(noise(s, i)) if s else "0" * 16] for i, s in enumerate(sizes)}
        assert batched.hexdigests() == result, "a second time"


def words_in_slices() -> None:
    """Sums of pieces and of tiles are added up a few at a time."""
    with mock.patch.object(batched_words, "SLICE", 3):
        batched = BatchedWords()
        for i in range(3):
            data = noise(5 * TILE_BYTES + 8 * i, i)
            for start in range(0, len(data), 12_000):
                part = data[start : start + 12_000]
                batched.add(i, start, part, whole(part))
        assert batched.hexdigests() == {i: [hash_of(noise(5 * TILE_BYTES + 8 * i, i))] for i in range(3)}


def words_beyond_31_bits() -> None:
    """Positions of a part that are larger than a signed integer of 32 bits, as in all experts of a large layer."""
    for start in (2**33 - 8 * TILE_BYTES, 2**33 - 1000, 3 * 2**32):
        data = noise(3 * TILE_BYTES)
        batched = BatchedWords()
        batched.add("w", start, data, whole(data))
        assert batched.hexdigests()["w"] == [reference({start: data.numpy()}, start + len(data))]


def words_that_change_are_seen() -> None:
    data = noise(2 * TILE_BYTES)
    batched = BatchedWords()
    batched.add("w", 0, data, whole(data))
    for i, at in enumerate((0, TILE_BYTES - 1, TILE_BYTES, len(data) - 1)):
        other = data.clone()
        other[at] ^= 1
        batched.add(i, 0, other, whole(other))
    halves = torch.cat([data[TILE_BYTES:], data[:TILE_BYTES]])
    batched.add("swapped", 0, halves, whole(halves))
    assert len({digest for (digest,) in batched.hexdigests().values()}) == 6


def words_too_many() -> None:
    data = torch.empty(8, dtype=torch.uint8)
    with pytest.raises(ValueError, match="8589934588 bytes, got 8589934592"):
        BatchedWords().add("w", 0, data, Cut(2, 1, 2**32, 2**32, 2**32))


def digests_on_gpu(layout: WeightLayout, weights: dict[str, Tensor]) -> list[dict[str, digests.ExpectedDigest]]:
    from megatron_dppo_engines.serving.vllm_extension.megatron_dppo_digest import words_kernel

    on_gpu = mock.patch.object(megatron_dppo_digest, "has_kernel", lambda device: True)
    # A tile at once, which the interpreter reads faster; the other cases have the block of a GPU.
    with on_gpu, mock.patch.object(words_kernel, "BLOCK", 8192):
        stream = digests.StreamDigests([layout], served.KV_HEADS)
        list(stream.watch(weights.items()))
        return [stream.expected(layout, rank) for rank in range(layout.tp_size)]


def streams() -> Iterator[tuple[dict[str, Tensor], int]]:
    """Weights and sizes of servers; also with parts that do not start and end at a word, and with several tiles."""
    for inter, hidden, size in ((16, 8, 2), (20, 8, 4), (60, 300, 2)):
        with mock.patch.multiple(served, HIDDEN=hidden, INTER=inter):
            yield {name: weight.bfloat16() for name, weight in served.layer().items()}, size


def words_of_every_rank_of_a_server() -> None:
    for weights, size in streams():
        layout = WeightLayout(algorithm="words", tp_size=size, plain=True)
        for rank, expected in enumerate(digests_on_gpu(layout, weights)):
            held = served.on_server(weights, rank, size)
            assert expected.keys() == held.keys()
            for name, tensor in held.items():
                assert expected[name].digest == hash_of(tensor.bfloat16()), (size, rank, name)


def words_of_a_target_that_lacks_parts() -> None:
    """The others are right."""
    weights = served.layer()
    del weights["model.layers.0.mlp.experts.1.up_proj.weight"]
    layout = WeightLayout(algorithm="words", tp_size=2, plain=True)
    _, expected = digests_on_gpu(layout, weights)
    assert "model.layers.0.mlp.experts.w13_weight" not in expected
    assert expected["model.norm.weight"].digest == hash_of(weights["model.norm.weight"])
