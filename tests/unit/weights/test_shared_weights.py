"""Weights by reference: what the servers read, what becomes of the memory, and whose memory it is."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing import reductions

from megatron_dppo.errors import ConfigError
from megatron_dppo.weights.ipc import MemorySharing
from megatron_dppo.weights.sharing import RankLocation, find_owners, find_sharing, is_local
from megatron_dppo_engines.serving import VLLM_EXTENSION
from megatron_dppo_engines.shared_memory import DeviceHandle, SharedBucket, as_flattened_bucket, as_json
from tests.unit.configs import config as config_of
from tests.unit.weight_server import CPU, FakeServer, files_of, make, weights

EXTENSION = VLLM_EXTENSION / "megatron_dppo_memory.py"


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


@pytest.fixture
def pair() -> list[FakeServer]:
    return [FakeServer("a:1"), FakeServer("b:2")]


def alone(servers: Sequence[FakeServer], *, tied: bool = False) -> MemorySharing:
    """One rank, whose memory all of them read."""
    owners = {server.url: [0] for server in servers}
    return MemorySharing(owners, bucket_bytes=2 * 2**20, dtype=torch.float32, tied=tied, group=None)


def test_servers_read_exactly_the_weights_and_nothing_is_left_of_the_memory(
    pair: list[FakeServer], model_folder: Path
) -> None:
    sync = make(pair, model_folder, sharing=alone(pair))
    for version in (0, 1):
        result = sync.send(iter(weights(version).items()), version)
        assert result.good.keys() == {"http://a:1", "http://b:2"} and not result.notes, "proved byte by byte"
        for server in pair:
            assert server.holds(weights(version)) and server.version == version and not server.paused
            assert server.calls.count("receive_handles") == 5 * (version + 1)  # 1.2 MB each: no two fit into 2 MiB
        assert not files_of(os.getpid())


def test_buckets_have_the_dtype_that_is_sent_and_a_tied_output_layer_twice(
    pair: list[FakeServer], model_folder: Path
) -> None:
    sharing = MemorySharing({pair[0].url: [0]}, bucket_bytes=2 * 2**20, dtype=torch.bfloat16, tied=True, group=None)
    stream = {"model.embed_tokens.weight": torch.randn(300, 1000), **weights(0)}
    make(pair[:1], model_folder, torch.bfloat16, sharing, checksum_every=0).send(iter(stream.items()), 0)
    assert pair[0].calls.count("receive_handles") == 3  # 0.6 MB each: three, three and one
    expected = {**stream, "lm_head.weight": stream["model.embed_tokens.weight"]}
    assert pair[0].holds({name: tensor.bfloat16() for name, tensor in expected.items()})


@pytest.mark.parametrize("call", ["pause", "begin_update", "receive_handles", "end_update", "weight_digests", "resume"])
def test_a_server_that_fails_anywhere_leaves_no_memory_and_gets_the_next_weights(
    pair: list[FakeServer], model_folder: Path, call: str
) -> None:
    pair[0].fails = {call: 1}
    stream, sync = iter(weights(0).items()), make(pair, model_folder, sharing=alone(pair))
    result = sync.send(stream, 0)
    assert list(result.good) == ["http://b:2"] and "refused" in result.failed["http://a:1"]
    assert pair[1].holds(weights(0)) and next(stream, None) is None
    assert len(sync.send(iter(weights(1).items()), 1).good) == 2 and pair[0].holds(weights(1))
    assert not files_of(os.getpid())


def test_a_server_that_changes_what_it_read_is_found(pair: list[FakeServer], model_folder: Path) -> None:
    pair[0].corrupts = {"w3"}
    result = make(pair[:1], model_folder, sharing=alone(pair[:1])).send(iter(weights(0).items()), 0)
    assert not result.good and "w3: not what was sent" in result.failed["http://a:1"]


def test_one_bucket_is_read_while_the_next_is_gathered_and_there_are_no_more(model_folder: Path) -> None:
    gathered, seen = 0, []

    def gathering() -> Iterator[tuple[str, Tensor]]:
        nonlocal gathered
        for item in weights(0).items():
            gathered += 1
            yield item

    class Slow(FakeServer):
        async def receive_handles(self, *arguments: Any) -> None:
            await asyncio.sleep(0.01)
            seen.append((gathered, len(files_of(os.getpid()))))
            await super().receive_handles(*arguments)

    server = Slow("a:1")
    assert make([server], model_folder, sharing=alone([server])).send(gathering(), 0).good
    # When bucket i is read, i + 1 is there, and the first tensor after it; of bucket i alone there is a shared copy.
    assert seen == [(3, 1), (4, 1), (5, 1), (5, 1), (5, 1)]


def test_a_server_of_another_size_than_the_configuration_says_is_left_alone(
    pair: list[FakeServer], model_folder: Path
) -> None:
    sharing = MemorySharing({pair[0].url: [0], pair[1].url: [0, 0]}, 2**21, torch.float32, tied=False, group=None)
    result = make(pair, model_folder, sharing=sharing).send(iter(weights(0).items()), 0)
    assert "has 1 ranks, but 2 by its section" in result.failed[pair[1].url] and list(result.good) == [pair[0].url]
    assert "begin_update" not in pair[1].calls


def test_memory_of_a_killed_trainer_is_freed_although_a_reader_has_it_open() -> None:
    program = """
import os, sys, time, torch
from megatron_dppo_engines.shared_memory import SharedBucket, as_flattened_bucket
bucket = SharedBucket(torch.arange(200, dtype=torch.uint8), readers=1)
sys.stdout.buffer.write(as_flattened_bucket(bucket.handle, ["a"], ["uint8"], [[200]]))
sys.stdout.buffer.flush(); os.close(1); time.sleep(60)
"""
    trainer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert trainer.stdout is not None and trainer.stderr is not None
    read = pickle.loads(trainer.stdout.read())["flattened_tensor"]
    assert len(files_of(trainer.pid)) == 1
    trainer.kill()
    trainer.stderr.read()  # ends: nothing that outlives the trainer has it
    trainer.wait()
    assert not files_of(trainer.pid) and read.tolist() == list(range(200))


class OnDevice:
    """A tensor of 640 bytes on GPU 3 as torch shares it; not the device itself."""

    device = torch.device("cuda", 3)
    requires_grad = is_nested = False
    _backward_hooks = None
    layout, dtype = torch.strided, torch.uint8
    shared = (3, b"ipc-handle", 640, 4096, b"counter", 7, b"event", True)

    def untyped_storage(self) -> Any:
        return SimpleNamespace(_share_cuda_=lambda: self.shared, device=self.device)

    def _typed_storage(self) -> Any:
        storage = torch.storage.TypedStorage(dtype=torch.uint8, device="meta")
        storage._untyped_storage = self.untyped_storage()
        return storage

    def size(self) -> torch.Size:
        return torch.Size([640])

    def stride(self) -> tuple[int, ...]:
        return (1,)

    def storage_offset(self) -> int:
        return 0


def extension() -> Any:
    """The part of the worker extension that opens memory; it needs torch alone."""
    spec = importlib.util.spec_from_file_location("megatron_dppo_memory", EXTENSION)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> OnDevice:
    names = SimpleNamespace(uuid="GPU-0a1b")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: names)
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    return OnDevice()


def test_memory_of_a_gpu_is_opened_with_what_torch_itself_would_send(
    device: OnDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reductions, "StorageWeakRef", lambda storage: storage)
    monkeypatch.setattr(reductions, "shared_cache", reductions.SharedCache())
    function, expected = reductions.reduce_tensor(device)
    assert function is reductions.rebuild_cuda_tensor
    kind, index = torch.Tensor, 6
    expected = (kind, *expected[1:])  # of the stand-in's class
    handle = SharedBucket(device, readers=1).handle  # type: ignore[arg-type]

    opened: list[tuple[Any, ...]] = []

    def rebuild_cuda_tensor(*arguments: Any) -> Tensor:
        opened.append(arguments)
        return torch.zeros(640, dtype=torch.uint8)

    rebuild_cuda_tensor.__module__, rebuild_cuda_tensor.__qualname__ = function.__module__, function.__qualname__
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", rebuild_cuda_tensor)
    pickle.loads(as_flattened_bucket(handle, ["w"], ["uint8"], [[640]]))
    assert opened.pop() == (*expected[:index], "GPU-0a1b", *expected[index + 1 :])
    module = extension()  # of vLLM; its worker sees the GPU as number 0
    assert len(module.copy_from_handle(as_json(handle), torch.device("cuda", 0))) == 640
    assert opened.pop() == (*expected[:index], 0, *expected[index + 1 :])


@pytest.mark.parametrize("taken", [True, False])
def test_gpu_memory_is_freed_if_its_reader_died(device: OnDevice, monkeypatch: pytest.MonkeyPatch, taken: bool) -> None:
    said: list[tuple[bytes, int]] = []
    release = staticmethod(lambda *counter: said.append(counter))
    monkeypatch.setattr(torch.UntypedStorage, "_release_ipc_counter_cuda", release)
    SharedBucket(device, readers=1).free(taken=taken)  # type: ignore[arg-type]
    assert said == ([] if taken else [(b"counter", 7)])


def test_a_vllm_worker_names_both_gpus_when_the_memory_is_on_another_one(device: OnDevice) -> None:
    module, handle = extension(), DeviceHandle("GPU-ffff", b"", 1, 0, b"", 0, b"", True)
    with pytest.raises(ValueError, match=r"GPU-ffff, .*GPU-0a1b.*CUDA_VISIBLE_DEVICES"):
        module.copy_from_handle(as_json(handle), torch.device("cuda", 0))
    with pytest.raises(ValueError, match=r"GPU-ffff, .*the CPU"):
        module.copy_from_handle(as_json(handle), CPU)


def test_a_vllm_worker_copies_before_it_responds() -> None:
    data = torch.arange(100, dtype=torch.uint8)
    shared = SharedBucket(data, readers=1)
    read = extension().copy_from_handle(as_json(shared.handle), CPU)
    data.fill_(255)
    shared.free(taken=True)
    assert read.tolist() == list(range(100))


def places(*hosts: str) -> list[RankLocation]:
    """Two ranks on each host, the second one first; a host is reached by its own name, each by the loopback's."""
    return [RankLocation(host, rank, frozenset({f"http://{host}:1", f"http://{host}:2", "http://127.0.0.1:1"}))
            for host in hosts for rank in (1, 0)]  # fmt: skip


def test_each_server_reads_the_memory_of_the_ranks_on_its_gpus() -> None:
    two = places("n0", "n1")
    urls = ["http://n1:2", "http://n0:1", "http://n1:1", "http://n0:2"]
    expected = {"http://n1:2": [3], "http://n0:1": [1], "http://n1:1": [2], "http://n0:2": [0]}
    assert find_owners(urls, 1, two, on_gpus=True) == expected
    assert find_owners(["http://n1:1"], 2, two, on_gpus=True) == {"http://n1:1": [3, 2]}
    assert find_owners(["http://127.0.0.1:1"], 2, two, on_gpus=True) == {"http://127.0.0.1:1": [1, 0]}, (
        "rank 0's machine"
    )
    assert find_owners(urls[:3], 1, two, on_gpus=False) == {urls[0]: [3], urls[1]: [1], urls[2]: [3]}
    with pytest.raises(ConfigError, match=r"n0, .*http://n0:2, .*4 GPUs, .*has 2"):
        find_owners(urls, 2, [*places("n0"), *(p for p in places("n1", "n1"))], on_gpus=True)
    with pytest.raises(ConfigError, match=r"servers.urls: http://n2:1 .*\(n0, n1\)"):
        find_owners([*urls, "http://n2:1"], 1, two, on_gpus=True)


def sharing_of(config: Any, platform: Any, *, tied: bool) -> MemorySharing:
    return find_sharing(config.rollout, gpus_per_server=1, platform=platform, world=None, tied=tied)


def test_memory_that_cannot_be_shared_is_refused_before_any_work() -> None:
    assert is_local("http://127.0.0.1:1") and is_local("http://localhost") and not is_local("http://192.0.2.1:30000")
    rollout = {"engine": "sglang", "weight_sync": {"method": "ipc"}}
    config, on_gpu = config_of(rollout=rollout), SimpleNamespace(is_cuda=True)
    with pytest.raises(ConfigError, match=r"method = 'ipc' with rollout.servers.colocated = false"):
        sharing_of(config, on_gpu, tied=False)
    far = config_of(rollout=rollout | {"servers": {"urls": ["http://192.0.2.1:30000"]}})
    with pytest.raises(ConfigError, match=r"http://192.0.2.1:30000 is on none"):
        sharing_of(far, SimpleNamespace(is_cuda=False), tied=False)
    both = config_of(rollout=rollout | {"servers": {"count": 2, "colocated": True}})
    with pytest.raises(ConfigError, match=r"http://127.0.0.1:30001, .*2 GPUs, .*has 1"):
        sharing_of(both, on_gpu, tied=False)
    result = sharing_of(both, SimpleNamespace(is_cuda=False), tied=True)
    assert result.tied and result.owners == {f"http://127.0.0.1:3000{i}": [0] for i in (0, 1)}
