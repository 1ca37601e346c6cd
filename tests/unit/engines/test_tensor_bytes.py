"""Every place that takes a tensor for its bytes, with strides that ``is_contiguous`` says nothing of."""

from __future__ import annotations

import asyncio
import hashlib
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_dppo.parallel.objects import from_message, to_message
from megatron_dppo.rollout.store import StoredRollouts, load_groups, save_groups
from megatron_dppo.types import Completion, Prompt, Rollout, RolloutGroup
from megatron_dppo.weights.transfer_group import flatten_bucket
from megatron_dppo_engines.servers.frames import Frames
from megatron_dppo_engines.serving.vllm_extension.megatron_dppo_digest import PartsDigest, tensor_digest

BF16 = torch.bfloat16
NUMBERS = torch.arange(1, 25, dtype=torch.float32).view(4, 6)
STRANGE = {
    "one element of a column": NUMBERS[1:2, 5],
    "one row of a column": NUMBERS[2:3, 3:4],
    "one element between other sizes of 1": NUMBERS[3:, None, 4:5].transpose(0, 1),
    "a column": NUMBERS[:, 2],
    "a transposed part": NUMBERS[1:3].T,
    "an expanded number": NUMBERS[0, :1].expand(3),
    "an expanded row of one": NUMBERS[0, :1].expand(1, 5)[:, 4:],
    "a number": NUMBERS[2, 2],
    "nothing": NUMBERS[2:2, 1],
    "bf16": NUMBERS.bfloat16()[3:4, 1],
    "int64": NUMBERS.long()[3:4, 1],
    "int16": NUMBERS.short()[:, 1:2],
    "bool": (NUMBERS > 7)[1:2, 0],
}


def same(found: Tensor, expected: Tensor) -> bool:
    return found.dtype == expected.dtype and found.shape == expected.shape and found.tolist() == expected.tolist()


def in_order(tensor: Tensor) -> bytes:
    """The bytes of the numbers one after the other, each by itself."""
    each = [torch.tensor([number], dtype=tensor.dtype) for number in tensor.flatten().tolist()]
    return b"".join(bytes(number.view(torch.uint8).tolist()) for number in each)


def test_a_message_between_ranks() -> None:
    result = from_message(to_message({**STRANGE, "arrays": [t.numpy() for t in STRANGE.values() if t.dtype != BF16]}))
    assert all(same(result[name], tensor) for name, tensor in STRANGE.items())
    arrays = [torch.from_numpy(array) for array in result["arrays"]]
    assert all(map(same, arrays, [t for t in STRANGE.values() if t.dtype != BF16]))


def test_a_frame_between_processes() -> None:
    async def run() -> Mapping[str, Tensor]:
        loop, pair = asyncio.get_running_loop(), socket.socketpair()
        got: asyncio.Future[Mapping[str, Tensor]] = loop.create_future()

        def received(message: Mapping[str, Any], columns: Mapping[str, Tensor]) -> None:
            got.set_result(columns)

        ends = [Frames(received, lambda: None), Frames(received, lambda: None)]
        for end, side in zip(ends, pair, strict=True):
            await loop.create_unix_connection(lambda end=end: end, sock=side)  # type: ignore[misc]
        ends[0].send({}, STRANGE)
        columns = await asyncio.wait_for(got, 10)
        for end in ends:
            end.close()
        return columns

    result = asyncio.run(run())
    assert all(same(result[name], tensor) for name, tensor in STRANGE.items())


def test_a_bucket_of_weights() -> None:
    bucket = flatten_bucket(list(STRANGE.items()))
    assert bytes(bucket.data.tolist()) == b"".join(in_order(STRANGE[name]) for name in bucket.names)


@pytest.mark.parametrize("digest", [tensor_digest, lambda tensor: parts(tensor, "words")])
def test_digests_are_those_of_the_same_numbers_lying_together(digest: Callable[[Tensor], str]) -> None:
    for name, tensor in STRANGE.items():
        together = torch.tensor(tensor.tolist(), dtype=tensor.dtype).view(tensor.shape)
        assert digest(tensor) == digest(together), name
        assert parts(tensor, "sha256") == hashlib.sha256(in_order(tensor)).hexdigest(), name


def parts(tensor: Tensor, algorithm: str) -> str:
    result = PartsDigest(algorithm)
    result.add(0, tensor)
    return result.hexdigest()


def test_groups_on_disk_whose_columns_lie_in_the_same_memory(tmp_path: Path) -> None:
    prompt, logprobs = Prompt(prompt_id="p", text="", token_ids=(1, 2), label=""), torch.rand(3, 4).log()
    tokens = torch.arange(6, dtype=torch.int32)
    parts = ((tokens[:3], logprobs[:, 0]), (tokens[:3], logprobs[:, 0]), (tokens[2:5], logprobs[:, 3]))
    rollouts = tuple(
        Rollout(
            prompt=prompt,
            completion=Completion(token_ids=t, logprobs=p, finish_reason="stop", text="", policy_version=0),
            reward=1.0,
        )
        for t, p in parts
    )
    save_groups(tmp_path / "groups", [StoredRollouts(0, prompt, RolloutGroup(prompt=prompt, rollouts=rollouts))])
    (actual,) = load_groups(tmp_path / "groups", lambda position: prompt)
    assert isinstance(actual.content, RolloutGroup)
    for rollout, (token_ids, expected) in zip(actual.content.rollouts, parts, strict=True):
        assert same(rollout.completion.token_ids, token_ids) and same(rollout.completion.logprobs, expected)
