"""A real server that confirms an update of its weights and does something else is found out in that sync."""

from __future__ import annotations

import base64
import io
import math
import pickle
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dppo.config.servers import WeightSyncConfig
from megatron_dppo.weights.attempt import SyncResult
from megatron_dppo.weights.ipc import MemorySharing
from megatron_dppo.weights.sync import WeightSync
from megatron_dppo.weights.transfer_group import TensorBucket, flatten_bucket
from megatron_dppo_engines.sglang import SGLangServer
from megatron_dppo_engines.shared_memory import HostHandle, SharedBucket, as_flattened_bucket, as_json
from megatron_dppo_engines.vllm import VLLMServer
from tests.engines.proxy import Exchange, Proxy
from tests.engines.servers import Engine
from tests.engines.tiny import Reference

Lie = Callable[[Exchange], Awaitable[bool]]
K_PROJ, GATE = "model.layers.1.self_attn.k_proj.weight", "model.layers.{}.mlp.gate.weight"
EXPERT = "model.layers.0.mlp.experts.3.down_proj.weight"


def swallow(path: str) -> Lie:
    """The call is confirmed and never made."""

    async def before(exchange: Exchange) -> bool:
        exchange.answer = {"success": True, "message": "Success"}
        return not exchange.path.endswith(path)

    return before


class HandleReader(pickle.Unpickler):
    """Reads the handle of a ``flattened_bucket``, and does not open its memory."""

    def find_class(self, module: str, name: str) -> Any:
        replacements: dict[str, Callable[..., Any]] = {
            "rebuild_storage_filename": lambda _kind, _manager, file, size: HostHandle(file, size),
            "rebuild_typed_storage": lambda handle, _dtype: handle,
            "rebuild_tensor": lambda _kind, handle, _metadata: handle,
        }
        return replacements.get(name) or super().find_class(module, name)


def read_tensors(
    handle: HostHandle, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
) -> dict[str, torch.Tensor]:
    """Copies of the tensors in shared memory."""
    file = Path("/dev/shm") / handle.name.decode().lstrip("/")
    # Before the bytes torch keeps a count of the readers.
    data = torch.frombuffer(bytearray(file.read_bytes()[-handle.size :]), dtype=torch.uint8)
    tensors, start = {}, 0
    for name, kind, shape in zip(names, dtypes, shapes, strict=True):
        dtype = getattr(torch, kind)
        size = math.prod(shape) * dtype.itemsize
        tensors[name] = data[start : start + size].view(dtype).view(tuple(shape))
        start += size
    return tensors


SHARED: list[SharedBucket] = []
"""Memory that servers were given in place of the trainer's; held until they have read it."""


def in_memory(change: Callable[[dict[str, torch.Tensor]], None]) -> Lie:
    """The server is given other memory than the trainer's, with other tensors in it."""

    def other(tensors: dict[str, torch.Tensor]) -> TensorBucket:
        change(tensors)
        bucket = flatten_bucket(list(tensors.items()))
        while SHARED:
            SHARED.pop().free(taken=True)
        SHARED.append(SharedBucket(bucket.data, readers=1))
        return bucket

    async def before(exchange: Exchange) -> bool:
        if exchange.path == "/update_weights_from_tensor":
            # What this test's own client has packed.
            payload = base64.b64decode(exchange.request["serialized_named_tensors"][0])
            sent = HandleReader(io.BytesIO(payload)).load()
            described = [(m.name, str(m.dtype).removeprefix("torch."), m.shape) for m in sent["metadata"]]
            bucket = other(read_tensors(sent["flattened_tensor"], *zip(*described, strict=True)))
            packed = as_flattened_bucket(SHARED[0].handle, bucket.names, bucket.dtypes, bucket.shapes)
            exchange.request["serialized_named_tensors"] = [base64.b64encode(packed).decode()]
        elif exchange.path == "/update_weights":
            (info,) = exchange.request["update_info"]
            handle = HostHandle(base64.b64decode(info["memory"]["name"]), info["memory"]["size"])
            bucket = other(read_tensors(handle, info["names"], info["dtypes"], info["shapes"]))
            info |= {"names": bucket.names, "dtypes": bucket.dtypes, "shapes": bucket.shapes}
            info["memory"] = as_json(SHARED[0].handle)
        return True

    return before


def one_element(tensors: dict[str, torch.Tensor]) -> None:
    if K_PROJ in tensors:
        tensors[K_PROJ] = tensors[K_PROJ].clone()
        tensors[K_PROJ][3, 5] += 0.5


def one_missing(tensors: dict[str, torch.Tensor]) -> None:
    tensors.pop(EXPERT, None)


def swapped_names(path: str) -> Lie:
    """In a broadcast: two tensors of one shape change places."""

    async def before(exchange: Exchange) -> bool:
        if exchange.path == path:
            names = (exchange.request.get("update_info") or exchange.request)["names"]
            if GATE.format(0) in names and GATE.format(1) in names:
                i, j = (names.index(GATE.format(layer)) for layer in (0, 1))
                names[i], names[j] = names[j], names[i]
        return True

    return before


def other_folder(folder: Path) -> Lie:
    async def before(exchange: Exchange) -> bool:
        request = exchange.request or {}
        if exchange.path == "/update_weights_from_disk":
            request["model_path"] = str(folder)
        elif "folder" in request.get("kwargs", {}):
            request["kwargs"]["folder"] = str(folder)
        return True

    return before


def syncs(
    engine: Engine,
    model: Reference,
    other: Reference,
    weights_folder: Path,
    method: str,
    dtype: torch.dtype,
    lies: list[Lie],
) -> Iterator[tuple[SyncResult, SyncResult]]:
    """For each lie: a sync under it, and one more attempt without it. The weights change each time."""
    with Proxy(engine.url) as proxy:
        client: Any = SGLangServer(proxy.url) if engine.kind == "sglang" else VLLMServer(proxy.url)
        config = WeightSyncConfig(method=method, timeout_seconds=60)  # type: ignore[arg-type]
        device = torch.device("cpu")
        where = {"model_folder": model.folder, "weights_folder": weights_folder}
        sharing = None
        if method == "ipc":
            sharing = MemorySharing({client.url: [0]}, 2**20, dtype, tied=False, group=None)
        sync = WeightSync([client], config, **where, dtype=dtype, device=device, sharing=sharing)
        try:
            assert sync.send(iter(other.weights()), 0).good
            for version, lie in enumerate(lies, 1):
                weights = [(n, w * (1 + version / 8)) for n, w in (model if version % 2 else other).weights()]
                proxy.before = lie
                lied = sync.send(iter(weights), version)
                proxy.before = None
                yield lied, sync.send(iter(weights), version)
        finally:
            sync.close()


def check(results: Iterator[tuple[SyncResult, SyncResult]], named: list[str]) -> None:
    for (lied, mended), name in zip(results, named, strict=True):
        (complaint,) = lied.failed.values()
        assert not lied.good and "not what was sent" in complaint and name in complaint, complaint
        assert mended.good and not mended.notes


QKV = "model.layers.1.self_attn.{q,k,v}_proj.weight"
DOWN = "model.layers.0.mlp.experts.*.down_proj.weight"


def by_reference(kind: str) -> list[Lie]:
    path = "/update_weights_from_tensor" if kind == "sglang" else "/update_weights"
    return [swallow(path), in_memory(one_element), in_memory(one_missing)]


NAMED = ["model.embed_tokens.weight", QKV, DOWN]
"""Messages for the corruptions of ``by_reference``."""


def test_each_corruption_is_detected_for_each_version_of_sglang(
    sglang: Engine, old_model: Reference, new_model: Reference, tmp_path: Path
) -> None:
    where = (sglang, new_model, old_model, tmp_path)
    check(syncs(*where, "ipc", torch.float32, by_reference("sglang")), NAMED)


@pytest.mark.parametrize(("engine", "dtype"), [("sglang_bf16", torch.bfloat16), ("vllm", torch.float32)])
def test_a_confirmed_update_that_is_missing_or_has_a_wrong_tensor_is_reported(
    engine: str,
    dtype: torch.dtype,
    request: pytest.FixtureRequest,
    old_model: Reference,
    new_model: Reference,
    tmp_path: Path,
) -> None:
    server: Engine = request.getfixturevalue(engine)
    where = (server, new_model, old_model, tmp_path)
    check(syncs(*where, "ipc", dtype, by_reference(server.kind)), NAMED)
    path = "/update_weights_from_distributed" if server.kind == "sglang" else "/update_weights"
    check(syncs(*where, "distributed", dtype, [swapped_names(path)]), [f"{GATE.format(0)}, {GATE.format(1)}"])
    lies = [other_folder(old_model.folder)]
    if server.kind == "sglang":
        lies.append(swallow("/update_weights_from_disk"))
    check(syncs(*where, "disk", dtype, lies), [NAMED[0]] * len(lies))
