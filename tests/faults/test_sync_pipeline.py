"""The weight sync on a clock of its own: what overlaps, what passes over the link, and how much rank 0 holds."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.weight_sync import OneAfterAnother
from megatron_dppo.weights import transfer
from megatron_dppo.weights.transfer_group import TensorBucket, flatten_bucket
from tests.faults.simulation.clock import VirtualLoop
from tests.unit.weight_server import FakeServer, make

BUCKETS, EACH = 12, 64
"""Buckets of one sync, and tensors of a bucket."""
TURNS = 5
"""Turns of the event loop that a call takes, each of which may come a tensor late."""
MIB = 2**20


@dataclass
class Stages:
    """Seconds of one bucket."""

    gather: float
    link: float
    load: float
    call: float = 0.01
    """of one way of a call"""


@dataclass
class Link:
    """Transport of rank 0: a ``GroupTransport`` of one link, over which a bucket goes when all members receive it."""

    seconds: float
    members: list[Engine] = field(default_factory=list)
    sent: int = 0
    busy: float = 0.0
    buckets: int = 0

    def listen(self, host: str) -> tuple[int, int]:
        return 1, 1

    async def open(self, listener: int, **_: object) -> int:
        return listener

    async def broadcast(self, bucket: TensorBucket, group: int) -> None:
        number, self.buckets = self.buckets, self.buckets + 1
        data, names, shapes = bucket.data.clone(), bucket.names, bucket.shapes
        for member in self.members:
            while member.receives <= number:
                member.posted.clear()
                await member.posted.wait()
        await asyncio.sleep(self.seconds)
        self.busy += self.seconds
        self.sent += len(data)
        parts = data.view(torch.float32).split([torch.Size(shape).numel() for shape in shapes])
        for member in self.members:
            tensors = {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
            member.here[number].set_result(tensors)

    def close(self, group: int) -> None:
        pass


class Engine(FakeServer):
    """A server that receives and loads a bucket in one call, as SGLang does."""

    def __init__(self, link: Link, stages: Stages) -> None:
        super().__init__(f"engine{len(link.members)}:1")
        self.stages, self.receives, self.posted = stages, 0, asyncio.Event()
        self.here: list[asyncio.Future[dict[str, Tensor]]] = []
        link.members.append(self)

    async def join_group(self, *_: object) -> None:
        """There is one group."""

    async def receive_broadcast(self, names: Sequence[str], dtypes: object, shapes: object) -> None:
        await asyncio.sleep(self.stages.call)
        self._post()
        await self._take(-1)
        await asyncio.sleep(self.stages.call)

    def _post(self) -> None:
        self.here.append(asyncio.get_running_loop().create_future())
        self.receives += 1
        self.posted.set()

    async def _take(self, which: int) -> None:
        tensors = await self.here[which]
        await asyncio.sleep(self.stages.load)
        self._load(tensors)


class OverlappingEngine(Engine):
    """A server that loads a bucket while the next one arrives, as vLLM with our extension does."""

    async def receive_broadcast(self, names: Sequence[str], dtypes: object, shapes: object) -> None:
        await asyncio.sleep(self.stages.call)
        self._post()
        if self.receives > 1:
            await self._take(-2)
        await asyncio.sleep(self.stages.call)

    async def end_update(self, version: int) -> None:
        await self._take(-1)
        await super().end_update(version)


class Held:
    """Bytes of tensors and buffers on rank 0 that something still holds."""

    def __init__(self) -> None:
        self._seen: list[weakref.ref[Tensor]] = []
        self.most = 0

    def add(self, tensor: Tensor) -> Tensor:
        self._seen.append(weakref.ref(tensor))
        held = [seen() for seen in self._seen]
        self.most = max(self.most, sum(tensor.nbytes for tensor in held if tensor is not None))
        return tensor


def one_sync(
    kind: type[Engine], stages: Stages, folder: Path, monkeypatch: pytest.MonkeyPatch, buckets: type[transfer.Buckets]
) -> tuple[float, Link, int]:
    """Seconds from the first tensor to the end, the link, and the most bytes that rank 0 held."""
    loop, link, held = VirtualLoop(1e6, 10**6), Link(stages.link), Held()
    engines = [kind(link, stages) for _ in range(2)]
    sync = make(engines, folder, method="distributed", bucket_megabytes=1, checksum_every=1)  # type: ignore[arg-type]
    sync._broadcasts._transport = link
    weights = {f"w{i}": torch.full((MIB // 4 // EACH,), float(i)) for i in range(BUCKETS * EACH)}

    def export() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights.items():
            loop.block(stages.gather / EACH)  # a collective: nothing else runs on this thread
            yield name, tensor

    class Watched(buckets):  # type: ignore[valid-type,misc]
        def __init__(self, stream: Iterator[tuple[str, Tensor]], limit: int) -> None:
            super().__init__(((name, held.add(tensor)) for name, tensor in stream), limit)

    def flatten(tensors: Any) -> TensorBucket:
        bucket = flatten_bucket(tensors)
        held.add(bucket.data)
        return bucket

    monkeypatch.setattr(transfer, "Buckets", Watched)
    monkeypatch.setattr(transfer, "flatten_bucket", flatten)
    result = loop.run(sync.send_async(export(), 3))
    assert len(result.good) == 2 and all(engine.holds(weights) for engine in engines), "the proof agreed"
    seconds = loop.time()
    sync._runner.close()
    loop.close()
    return seconds, link, held.most


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


LINK_IS_SLOWEST = Stages(gather=0.5, link=1.0, load=0.6)
GATHERING_IS_SLOWEST = Stages(gather=2.0, link=1.0, load=0.6)
LOADING_IS_SLOWEST = Stages(gather=0.5, link=1.0, load=3.0)


@pytest.mark.parametrize("stages", [LINK_IS_SLOWEST, GATHERING_IS_SLOWEST, LOADING_IS_SLOWEST])
def test_where_the_engine_can_only_the_slowest_stage_is_on_the_critical_path_and_one_bucket_of_the_others(
    stages: Stages, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds, link, held = one_sync(OverlappingEngine, stages, folder, monkeypatch, transfer.Buckets)
    ways = (stages.gather, stages.link, stages.load)
    # Of the slowest loading the calls are a part.
    calls = (2 * stages.call + TURNS * stages.gather / EACH) * (BUCKETS if stages is LOADING_IS_SLOWEST else 2)
    least = BUCKETS * max(ways) + sum(ways) - max(ways)
    assert least <= seconds <= least + calls
    assert link.sent == BUCKETS * MIB and link.busy == pytest.approx(BUCKETS * stages.link)
    assert held <= 2 * MIB + 2 * MIB // EACH
    if stages is LINK_IS_SLOWEST:
        assert seconds <= BUCKETS * stages.link + sum(ways), "bytes over the link, and one bucket"


def test_an_engine_that_receives_and_loads_in_one_call_hides_the_gathering_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = LINK_IS_SLOWEST
    seconds, link, held = one_sync(Engine, stages, folder, monkeypatch, transfer.Buckets)
    served = stages.link + stages.load + 2 * stages.call
    least = stages.gather + BUCKETS * served
    assert least <= seconds <= least + BUCKETS * TURNS * stages.gather / EACH
    slow, same, _ = one_sync(Engine, stages, folder, monkeypatch, OneAfterAnother)
    assert slow == pytest.approx(BUCKETS * (stages.gather + served), rel=0.02)
    assert same.sent == link.sent and held <= 2 * MIB + 2 * MIB // EACH
