"""An inference server in this process, which keeps the rules that real ones enforce."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_dppo.errors import ServerError
from megatron_dppo.rollout.server import ServerInfo


class FakeServer:
    """Takes weights by the order of ``InferenceServer``; ``fails`` names calls that are refused, each so many times."""

    def __init__(self, name: str, engine_version: str = "1.0") -> None:
        self.url = f"http://{name}"
        self.engine_version = engine_version
        self.version, self.weights, self.calls = -1, dict[str, Tensor](), list[str]()
        self.paused = self.updating = False
        self.fails: dict[str, int] = {}
        self.corrupts = False

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if self.fails.get(name, 0) > 0:
            self.fails[name] -= 1
            raise ServerError(self.url, f"{name} refused")

    async def info(self) -> ServerInfo:
        self._called("info")
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

    async def begin_update(self) -> None:
        self._called("begin_update")
        assert self.paused
        self.version, self.updating = -1, True

    async def receive_tensors(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        self._called("receive_tensors")
        assert self.updating
        self.weights |= {name: tensor.clone() for name, tensor in tensors}

    async def end_update(self, version: int) -> None:
        self._called("end_update")
        assert self.updating
        self.version, self.updating = version, False

    async def update_from_disk(self, folder: str, version: int) -> None:
        self._called("update_from_disk")
        assert self.paused
        self.weights = {k: v for file in Path(folder).glob("*.safetensors") for k, v in load_file(file).items()}
        self.version = version

    async def checksum(self) -> str:
        self._called("checksum")
        total = sum(float(w.double().sum()) for w in self.weights.values())
        return f"{total + self.corrupts:.6f}"

    async def close(self) -> None:
        self._called("close")

    def holds(self, weights: dict[str, Tensor]) -> bool:
        return self.weights.keys() == weights.keys() and all(
            torch.equal(self.weights[k], w) for k, w in weights.items()
        )
