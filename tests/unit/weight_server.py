"""An inference server in this process, which keeps the rules that real ones enforce."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_dppo.config.servers import WeightSyncConfig
from megatron_dppo.errors import ServerError
from megatron_dppo.export.quantization import Quantization
from megatron_dppo.weights.ipc import MemorySharing
from megatron_dppo.weights.sync import WeightSync
from megatron_dppo_engines.server import ServerInfo
from megatron_dppo_engines.serving.vllm_extension.megatron_dppo_digest import tensor_digest
from megatron_dppo_engines.shared_memory import Handle, as_flattened_bucket
from megatron_dppo_engines.weight_digests import RankDigests, WeightLayout

CPU = torch.device("cpu")


def weights(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"w{i}": torch.randn(300, 1000, generator=generator) for i in range(5)}


def make(
    servers: list[FakeServer],
    folder: Path,
    dtype: torch.dtype = torch.float32,
    sharing: MemorySharing | None = None,
    adapter: dict[str, object] | None = None,
    quantization: Quantization | None = None,
    **keys: object,
) -> WeightSync:
    """A sync of these servers; with the method ``ipc``, the default, they read this process's memory."""
    method = "adapter" if adapter is not None else "disk" if quantization is not None else "ipc"
    config = WeightSyncConfig(**{"method": method, "bucket_megabytes": 2, **keys})  # type: ignore[arg-type]
    if sharing is None and config.method == "ipc":
        owners = {server.url: [0] for server in servers}
        sharing = MemorySharing(owners, config.bucket_megabytes * 2**20, dtype, tied=False, group=None)
    place = folder.parent / "weights"
    return WeightSync(
        servers,  # type: ignore[arg-type]
        config,
        model_folder=folder,
        weights_folder=place,
        dtype=dtype,
        device=CPU,
        sharing=sharing,
        adapter=adapter,
        quantization=quantization,
    )


def files_of(*processes: int) -> list[str]:
    """The shared memory that these processes have made for others."""
    names = [file.name for file in Path("/dev/shm").glob("torch_*")]
    return [name for name in names if int(name.split("_")[1]) in processes]


class FakeServer:
    """Takes weights by the order of ``InferenceServer``; ``fails`` names calls that are refused, each so many times.

    ``ignores`` are names of tensors that it confirms and does not load, ``corrupts`` those that it loads with one wrong
    element, ``packs`` those that it keeps in a form of its own.
    """

    def __init__(self, name: str, engine_version: str = "1.0") -> None:
        self.url = f"http://{name}"
        self.engine_version = engine_version
        self.version, self.weights, self.calls = -1, dict[str, Tensor](), list[str]()
        self.paused = self.updating = self.released = False
        self.fails: dict[str, int] = {}
        self.ignores, self.corrupts, self.packs = set[str](), set[str](), set[str]()
        self.plain, self.frozen = True, False
        self.adapter = dict[str, Tensor]()

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if self.fails.get(name, 0) > 0:
            self.fails[name] -= 1
            raise ServerError(self.url, f"{name} refused")

    async def info(self) -> ServerInfo:
        self._called("info")
        if self.frozen:
            await asyncio.Event().wait()
        return ServerInfo(
            engine="sglang",
            engine_version=self.engine_version,
            model="m",
            policy_version=self.version,
            max_context=0,
            world_size=1,
        )

    async def pause(self) -> None:
        self._called("pause")
        self.paused = True

    async def resume(self) -> None:
        self._called("resume")
        self.paused = False

    async def alive(self) -> bool:
        return not self.frozen

    async def release_memory(self) -> None:
        self._called("release_memory")
        self.version, self.released = -1, True

    async def wake_weights(self) -> None:
        self._called("wake_weights")
        assert self.paused
        self.released = False

    async def begin_update(self) -> None:
        self._called("begin_update")
        assert self.paused
        self.version, self.updating = -1, True

    async def receive_handles(
        self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], handles: Sequence[Handle]
    ) -> None:
        self._called("receive_handles")
        assert self.updating
        (handle,) = handles
        # As SGLang takes it.
        bucket = pickle.loads(as_flattened_bucket(handle, names, dtypes, shapes))
        data, places = bucket["flattened_tensor"], bucket["metadata"]
        self._load({p.name: data[p.start_idx : p.end_idx].view(p.dtype).view(p.shape) for p in places})

    async def end_update(self, version: int) -> None:
        self._called("end_update")
        assert self.updating
        self.version, self.updating = version, False

    async def update_from_disk(self, folder: str, version: int) -> None:
        self._called("update_from_disk")
        assert self.paused
        self._load({k: v for file in Path(folder).glob("*.safetensors") for k, v in load_file(file).items()})
        self.version = version

    async def update_adapter(self, folder: str, version: int) -> None:
        self._called("update_adapter")
        assert self.paused
        self.adapter = load_file(Path(folder) / "adapter_model.safetensors")
        self.version = version

    def _load(self, tensors: dict[str, Tensor]) -> None:
        assert not self.released
        for name, tensor in tensors.items():
            if name not in self.ignores:
                self.weights[name] = tensor.clone()
            if name in self.corrupts:
                self.weights[name].view(-1)[0] += 1

    async def weight_layout(self) -> WeightLayout:
        self._called("weight_layout")
        return WeightLayout(algorithm="sha256", tp_size=1, plain=self.plain)

    async def weight_digests(self) -> tuple[RankDigests, ...]:
        self._called("weight_digests")
        assert not self.released
        kept = {name: w.flip(0).clone() if name in self.packs else w for name, w in self.weights.items()}
        return (RankDigests(tp_rank=0, digests={k: tensor_digest(w).partition(":")[2] for k, w in kept.items()}),)

    async def close(self) -> None:
        self._called("close")

    def holds(self, weights: dict[str, Tensor]) -> bool:
        return self.weights.keys() == weights.keys() and all(
            torch.equal(self.weights[k], w) for k, w in weights.items()
        )
