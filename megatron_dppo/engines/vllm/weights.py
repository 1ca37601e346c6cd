"""New weights for a vLLM server: from disk, by value, reference or broadcast.

All but the first need ``megatron_dppo/engines/serving/vllm_extension`` in the server. vLLM's own NCCL backend waits at
``host:port`` for a pickled object of a vLLM class, or is given an NCCL id, which torch keeps to itself; then calls NCCL
outside of torch. A trainer's torch group cannot be its peer.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from typing import Any

from safetensors.torch import save
from torch import Tensor

from megatron_dppo.engines.servers.fields import INCOMPLETE, checked_success, version_name
from megatron_dppo.engines.servers.http import Deadlines, HttpClient
from megatron_dppo.engines.servers.updates import ADAPTER, FolderUpdates, Part
from megatron_dppo.errors import ConfigError, ServerError
from megatron_dppo.rollout.handles import Handle, as_json
from megatron_dppo.rollout.server import transfer_group_name
from megatron_dppo.rollout.weight_digests import RankDigests, WeightLayout

_EXTENSION, _BACKEND = "megatron_dppo_vllm.WorkerExtension", "megatron_dppo"
_EMPTY = hashlib.sha256().hexdigest()
"""of a tensor that vLLM has packed out of reach, on a CPU"""
_UNTOUCHED = "weights not touched"
"""Stands in the extension's message when it could not open the folder, so that it changed nothing."""


class VLLMWeightUpdates(FolderUpdates):
    """The part of ``VLLMServer`` that changes weights."""

    _untouched = _UNTOUCHED
    _admin: HttpClient
    _deadlines: Deadlines
    _joined = False
    _known_config: dict[str, Any] | None = None

    async def _config(self) -> dict[str, Any]:
        """The server's configuration, asked once."""
        if self._known_config is None:
            path = "/server_info?config_format=json"
            answer = await self._get(path)
            config = answer.get("vllm_config")
            if not isinstance(config, dict) or "model_config" not in config:
                raise ServerError(self.url + path, f"expected a vLLM server's, got {str(answer)[:200]!r}")
            self._known_config = config
        return self._known_config

    async def _extended(self) -> bool:
        """Whether our worker extension is in the server."""
        config = await self._config()
        return (config.get("parallel_config") or {}).get("worker_extension_cls") == _EXTENSION

    async def _require_transfer(self) -> None:
        backend = ((await self._config()).get("weight_transfer_config") or {}).get("backend")
        if backend != _BACKEND or not await self._extended():
            raise ConfigError(
                f"{self.url} takes no weights from a torch process group (its weight transfer backend is {backend!r}; "
                "vLLM's own ones need vLLM in the trainer). Start it with "
                "megatron_dppo/engines/serving/vllm_extension in PYTHONPATH, "
                f"--worker-extension-cls {_EXTENSION} and --weight-transfer-config "
                f'\'{{"backend": "{_BACKEND}"}}\', or use the weight sync method disk'
            )

    async def pause(self) -> None:
        """See ``InferenceServer``: running requests are kept, their caches dropped."""
        await self._control("/pause?mode=keep&clear_cache=true", {}, repeat=True)
        self._paused = True

    async def resume(self) -> None:
        """Generate again. An update that was left open is closed: vLLM would die of the first request."""
        await self._wake_cache()
        if await self._weight_version() == INCOMPLETE and await self._extended():
            await self._close_update()
        await self._control("/resume", {}, repeat=True)
        self._paused = False

    async def _read_folder(self, folder: str) -> None:
        body: dict[str, Any] = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        if await self._extended():
            body = {"method": "megatron_dppo_load", "kwargs": {"folder": folder}}
        await self._update("/collective_rpc", body)

    async def _read_adapter(self, folder: str) -> None:
        body = {"lora_name": ADAPTER, "lora_path": folder, "load_inplace": True}
        await self._update("/v1/load_lora_adapter", body)

    async def begin_update(self) -> None:
        """See ``InferenceServer``.

        Raises:
            RuntimeError: not paused: vLLM would compute with weights that are not there.
            ConfigError: the server lacks our worker extension.
        """
        if not self._paused:
            raise RuntimeError(f"{self.url}: begin_update without pause")
        await self._require_transfer()
        await self._set_version(self._unfinished)
        await self._close_update()
        await self._update("/start_weight_update", {})

    async def receive_tensors(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Take weights by value, as a safetensors file in the request."""
        # safetensors refuses views that share memory.
        owned = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors}
        body = {"update_info": {"safetensors": base64.b64encode(save(owned)).decode()}}
        await self._update("/update_weights", body)

    async def receive_handles(
        self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], handles: Sequence[Handle]
    ) -> None:
        """See ``InferenceServer``."""
        bucket = {"names": list(names), "dtypes": list(dtypes), "shapes": [list(shape) for shape in shapes]}
        # vLLM gives each worker its entry of a list.
        await self._update("/update_weights", {"update_info": [bucket | {"memory": as_json(h)} for h in handles]})

    async def join_group(self, host: str, port: int, rank_offset: int, world_size: int, backend: str) -> None:
        """See ``InferenceServer``.

        Raises:
            ConfigError: the server lacks our worker extension.
        """
        await self._require_transfer()
        info = {
            "host": host,
            "port": port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": transfer_group_name(host, port),
            "backend": backend,
            "timeout": self._deadlines.update,
        }
        await self._update("/init_weight_transfer_engine", {"init_info": info})
        self._joined = True

    async def receive_broadcast(
        self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
    ) -> None:
        """Receive the bytes of the named tensors, one after the other, from rank 0 of the group."""
        if not self._joined:
            raise RuntimeError(f"{self.url}: receive_broadcast without join_group")
        info = {"names": list(names), "dtypes": list(dtypes), "shapes": [list(shape) for shape in shapes]}
        await self._update("/update_weights", {"update_info": info})

    async def end_update(self, version: int) -> None:
        """See ``InferenceServer``."""
        await self._update("/finish_weight_update", {})
        await self._finish(version)

    async def leave_group(self) -> None:
        """Leave the broadcast group; nothing to do when there is none."""
        joined, self._joined = self._joined, False
        if joined:
            await self._control("/shutdown_weight_transfer_engine", {})

    async def weight_layout(self) -> WeightLayout:
        """See ``InferenceServer``."""
        config = await self._config()
        parallel, quantized = config.get("parallel_config") or {}, config["model_config"].get("quantization")
        plain = not quantized and not parallel.get("enable_expert_parallel")
        extended = await self._extended()
        algorithm = "sha256"
        if extended:
            algorithm = (await self._ask_workers("megatron_dppo_algorithm"))[0]
        return WeightLayout(
            algorithm="words" if algorithm == "words" else "sha256",
            tp_size=int(parallel.get("tensor_parallel_size") or 1),
            plain=plain,
            complete=extended and plain,
        )

    async def weight_digests(self) -> tuple[RankDigests, ...]:
        """See ``InferenceServer``.

        On a CPU vLLM's own checksum leaves out what it has packed; that of the worker extension does not.
        """
        try:
            if await self._extended():
                ranks = await self._ask_workers("megatron_dppo_sums")
                return tuple(RankDigests(tp_rank=r["tp_rank"], digests=r["sums"], loaded=r["loaded"]) for r in ranks)
            answer = await self._control("/weight_checker", {"action": "checksum"}, repeat=True)
            return _stock_sums(answer["checksums"])
        except (KeyError, TypeError, AttributeError, ValueError):
            raise ServerError(self.url, "no checksums of the weights in its answer") from None

    async def _ask_workers(self, method: str) -> Any:
        """What each worker returns; at least one."""
        answer = await self._control("/collective_rpc", {"method": method}, repeat=True)
        results = answer.get("results") if isinstance(answer, dict) else None
        if not results:
            raise ServerError(self.url + "/collective_rpc", f"{method}: no result in {str(answer)[:200]!r}")
        return results

    async def _finish(self, version: int) -> None:
        """Drop what the old weights cached, then, and only then, carry the new version."""
        await self._wake_cache()
        await self._control("/reset_prefix_cache?reset_running_requests=true&reset_external=true", {}, repeat=True)
        await self._set_version(version_name(version))

    async def _missing_flag(self) -> str | None:
        """On a CPU vLLM refuses the flag; it answers the calls, and releases nothing."""
        config = await self._config()
        on_cpu = (config.get("device_config") or {}).get("device") == "cpu"
        can = on_cpu or config["model_config"].get("enable_sleep_mode") is not False
        return None if can else "--enable-sleep-mode"

    async def _stop(self) -> None:
        await self._control("/pause?mode=abort&clear_cache=true", {}, repeat=True)

    async def _release_all(self) -> None:
        """Level 2: the next weights come from the trainer, so that the server keeps no copy of the old ones."""
        await self._update("/sleep?level=2&mode=abort", {})

    async def _take_part(self, part: Part) -> None:
        """With the last part vLLM generates again by itself: that of the cache, when the weights are complete."""
        await self._update(f"/wake_up?tags={part}", {})

    async def _close_update(self) -> None:
        """End an update that was left open, by this client or one that died."""
        await self._update("/collective_rpc", {"method": "megatron_dppo_close_update"})

    async def _weight_version(self) -> str:
        return str((await self._get("/weight_info")).get("weight_version"))

    async def _set_version(self, name: str) -> None:
        await self._control("/update_weight_version", {"new_version": name}, repeat=True)

    async def _get(self, path: str) -> dict[str, Any]:
        try:
            answer = await self._admin.get(path, timeout=self._deadlines.alive)
        except ServerError as error:
            raise _without_control(error) from error
        if not isinstance(answer, dict):
            raise ServerError(self.url + path, f"expected a vLLM server's, got {str(answer)[:200]!r}")
        return answer

    async def _control(self, path: str, body: dict[str, Any], *, repeat: bool = False) -> Any:
        return await self._post(path, body, self._deadlines.control, repeat)

    async def _update(self, path: str, body: dict[str, Any]) -> None:
        await self._post(path, body, self._deadlines.update, False)

    async def _post(self, path: str, body: dict[str, Any], timeout: float, repeat: bool) -> Any:
        try:
            answer = await self._admin.post(path, body, timeout=timeout, repeat=repeat)
        except ServerError as error:
            raise _without_control(error) from error
        return checked_success(answer, self.url + path)


def _stock_sums(checksums: dict[str, str]) -> tuple[RankDigests, ...]:
    """vLLM's own digests, whose names begin with the rank: ``dp0:pp0:pcp0:tp0:model.norm.weight``."""
    ranks: dict[str, dict[str, str]] = {}
    for key, digest in checksums.items():
        rank, _, name = key.rpartition(":")
        if digest != _EMPTY:
            ranks.setdefault(rank, {})[name.replace(".routed_experts.", ".")] = digest
    if not ranks:
        raise ValueError("no checksums")
    return tuple(RankDigests(tp_rank=int(rank.rpartition(":tp")[2]), digests=ranks[rank]) for rank in sorted(ranks))


def _without_control(error: ServerError) -> ServerError:
    """Say what is missing where the control calls are."""
    if error.status != 404:
        return error
    fix = "no such call: start vLLM (0.32 or later) with VLLM_SERVER_DEV_MODE=1 in its environment"
    return ServerError(error.url, f"{error.detail}: {fix}", error.status)
