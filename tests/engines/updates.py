"""The ways of giving a server new weights, and a judge of what it serves."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence

from torch import Tensor

from megatron_dppo.weights.transfer_group import (
    broadcast_bucket,
    close_transfer_group,
    flatten_bucket,
    open_transfer_group,
)
from megatron_dppo_engines.server import Generation, InferenceServer, transfer_group_name
from megatron_dppo_engines.shared_memory import SharedBucket
from tests.engines.servers import free_port
from tests.engines.tiny import Reference, difference

Update = Callable[[InferenceServer, Reference, int], Awaitable[None]]


async def from_disk(server: InferenceServer, model: Reference, version: int) -> None:
    await server.update_from_disk(str(model.folder), version)


async def receive(server: InferenceServer, tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Have a server read some tensors from this process's memory."""
    bucket = flatten_bucket(tensors)
    shared = SharedBucket(bucket.data, readers=1)
    try:
        await server.receive_handles(bucket.names, bucket.dtypes, bucket.shapes, [shared.handle])
    finally:
        bucket.data.fill_(0xFF)  # the server is done with it
        shared.free(taken=True)


async def by_handle(server: InferenceServer, model: Reference, version: int) -> None:
    weights = list(model.weights())
    await server.begin_update()
    for start in range(0, len(weights), 11):
        await receive(server, weights[start : start + 11])
    await server.end_update(version)


async def by_broadcast(server: InferenceServer, model: Reference, version: int, ranks: int = 1) -> None:
    """Send the weights to a server of ``ranks`` ranks."""
    port = free_port()
    world_size = 1 + ranks
    name = transfer_group_name("127.0.0.1", port)
    joined = asyncio.create_task(server.join_group("127.0.0.1", port, 1, world_size, "gloo"))
    group = await asyncio.to_thread(
        open_transfer_group, "127.0.0.1", port, name=name, rank=0, world_size=world_size, backend="gloo", timeout=60
    )
    await joined
    weights = list(model.weights())
    # Two types in one bucket: each tensor must start at a multiple of its item size.
    weights = [(n, w.half() if "layernorm" in n else w) for n, w in weights]
    await server.begin_update()
    for start in range(0, len(weights), 11):
        bucket = flatten_bucket(weights[start : start + 11])
        received = asyncio.create_task(server.receive_broadcast(bucket.names, bucket.dtypes, bucket.shapes))
        await asyncio.to_thread(broadcast_bucket, bucket, group)
        await received
    await server.end_update(version)
    await server.leave_group()
    close_transfer_group(group)


def off(model: Reference, answer: Generation, prompt: tuple[int, ...]) -> float:
    """Return the largest log-probability error of a response against a model."""
    expected = model.logprobs(prompt, answer.token_ids.tolist(), 1.0)
    return difference(answer.logprobs, expected)


def vanishing_trainer(host: str, port: int, name: str) -> subprocess.Popen:
    """A trainer of its own process that opens a group of two and waits to be killed."""
    program = (
        "import sys; from megatron_dppo.weights.transfer_group import open_transfer_group as g; "
        f"g({host!r}, {port}, name={name!r}, rank=0, world_size=2, backend='gloo'); print('in'); sys.stdin.read()"
    )
    return subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
