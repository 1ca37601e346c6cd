"""Weight updates of a vLLM server: from disk, by reference or by broadcast.

All but the first need ``serving/vllm_extension`` in the server. A trainer's torch group cannot be the peer of vLLM's
own NCCL backend. That backend waits at ``host:port`` for a pickled object of a vLLM class, or needs an NCCL id, which
torch does not expose, and then calls NCCL outside of torch.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

from megatron_dppo_engines.errors import ConfigError, ServerError
from megatron_dppo_engines.server import transfer_group_name
from megatron_dppo_engines.servers.client import ServerClient, bucket_to_json
from megatron_dppo_engines.servers.fields import INCOMPLETE
from megatron_dppo_engines.servers.updates import ADAPTER, MemoryTag
from megatron_dppo_engines.serving import VLLM_EXTENSION
from megatron_dppo_engines.shared_memory import Handle, as_json
from megatron_dppo_engines.weight_digests import RankDigests, WeightLayout

_EXTENSION = "megatron_dppo_vllm.WorkerExtension"
_BACKEND = "megatron_dppo"
_EMPTY_DIGEST = hashlib.sha256().hexdigest()
"""Digest of a tensor that vLLM has packed out of reach, on a CPU."""


class VLLMWeightUpdates(ServerClient):
    """The part of ``VLLMServer`` that changes weights."""

    _untouched_text = "weights not touched"  # the extension could not open the folder, so it changed nothing
    _missing_call_fix = "no such call: start vLLM (0.32 or later) with VLLM_SERVER_DEV_MODE=1 in its environment"
    _has_joined = False
    _cached_config: dict[str, Any] | None = None

    async def _config(self) -> dict[str, Any]:
        """Return the server's configuration; it is requested once."""
        if self._cached_config is None:
            path = "/server_info?config_format=json"
            response = await self._get(path)
            config = response.get("vllm_config")
            if not isinstance(config, dict) or "model_config" not in config:
                raise ServerError(
                    self.url + path, f"expected the response of a vLLM server, got {str(response)[:200]!r}"
                )
            self._cached_config = config
        return self._cached_config

    async def _has_extension(self) -> bool:
        config = await self._config()
        return (config.get("parallel_config") or {}).get("worker_extension_cls") == _EXTENSION

    async def _require_transfer(self) -> None:
        """Raise ConfigError if the server cannot receive weights from a torch process group."""
        backend = ((await self._config()).get("weight_transfer_config") or {}).get("backend")
        if backend != _BACKEND or not await self._has_extension():
            raise ConfigError(
                f"{self.url} takes no weights from a torch process group (its weight transfer backend is {backend!r}; "
                f"vLLM's own ones need vLLM in the trainer). Start it with {VLLM_EXTENSION} in PYTHONPATH, "
                f"--worker-extension-cls {_EXTENSION} and --weight-transfer-config "
                f'\'{{"backend": "{_BACKEND}"}}\', or use the weight sync method disk'
            )

    async def pause(self) -> None:
        """See ``InferenceServer``: running requests are kept, their caches dropped."""
        await self._control("/pause?mode=keep&clear_cache=true", {}, repeat=True)
        self._is_paused = True

    async def resume(self) -> None:
        """Generate again. An update that was left open is closed first: vLLM would crash on the next request."""
        await self._wake_cache()
        if await self._weight_version() == INCOMPLETE and await self._has_extension():
            await self._close_update()
        await self._control("/resume", {}, repeat=True)
        self._is_paused = False

    async def _load_weights(self, folder: str) -> None:
        body: dict[str, object] = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        if await self._has_extension():
            body = {"method": "megatron_dppo_load", "kwargs": {"folder": folder}}
        await self._update("/collective_rpc", body)

    async def _load_adapter(self, folder: str) -> None:
        body = {"lora_name": ADAPTER, "lora_path": folder, "load_inplace": True}
        await self._update("/v1/load_lora_adapter", body)

    async def begin_update(self) -> None:
        """See ``InferenceServer``."""
        if not self._is_paused:
            raise RuntimeError(f"{self.url}: begin_update without pause")
        await self._require_transfer()
        await self._set_version(self._unfinished_version)
        await self._close_update()
        await self._update("/start_weight_update", {})

    async def receive_handles(
        self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], handles: Sequence[Handle]
    ) -> None:
        """See ``InferenceServer``."""
        bucket = bucket_to_json(names, dtypes, shapes)
        # vLLM gives each worker its entry of a list.
        await self._update("/update_weights", {"update_info": [{**bucket, "memory": as_json(h)} for h in handles]})

    async def join_group(self, host: str, port: int, rank_offset: int, world_size: int, backend: str) -> None:
        """See ``InferenceServer``."""
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
        self._has_joined = True

    async def receive_broadcast(
        self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
    ) -> None:
        """See ``InferenceServer``."""
        if not self._has_joined:
            raise RuntimeError(f"{self.url}: receive_broadcast without join_group")
        await self._update("/update_weights", {"update_info": bucket_to_json(names, dtypes, shapes)})

    async def end_update(self, version: int) -> None:
        """See ``InferenceServer``."""
        await self._update("/finish_weight_update", {})
        await self._finish_update(version)

    async def leave_group(self) -> None:
        """Leave the broadcast group, if there is one."""
        had_joined = self._has_joined
        self._has_joined = False
        if had_joined:
            await self._control("/shutdown_weight_transfer_engine", {})

    async def weight_layout(self) -> WeightLayout:
        """See ``InferenceServer``."""
        config = await self._config()
        parallel = config.get("parallel_config") or {}
        is_quantized = bool(config["model_config"].get("quantization"))
        is_plain = not is_quantized and not parallel.get("enable_expert_parallel")
        has_extension = await self._has_extension()
        algorithm = "sha256"
        if has_extension:
            # All workers of a server have the same kind of device.
            algorithm = (await self._call_workers("megatron_dppo_algorithm"))[0]
        return WeightLayout(
            algorithm="words" if algorithm == "words" else "sha256",
            tp_size=int(parallel.get("tensor_parallel_size") or 1),
            plain=is_plain,
            complete=has_extension and is_plain,
        )

    async def weight_digests(self) -> tuple[RankDigests, ...]:
        """See ``InferenceServer``.

        On a CPU vLLM's own checksum leaves out the tensors that it has packed; the worker extension includes them.
        """
        try:
            if await self._has_extension():
                ranks = await self._call_workers("megatron_dppo_sums")
                return tuple(RankDigests(tp_rank=r["tp_rank"], digests=r["sums"], loaded=r["loaded"]) for r in ranks)
            response = await self._control("/weight_checker", {"action": "checksum"}, repeat=True)
            return _read_stock_sums(response["checksums"])
        except (KeyError, TypeError, AttributeError, ValueError):
            raise ServerError(self.url, "no checksums of the weights in its response") from None

    async def _call_workers(self, method: str) -> list[Any]:
        """Call a method of the worker extension and return the result of each worker, at least one."""
        response = await self._control("/collective_rpc", {"method": method}, repeat=True)
        results = response.get("results")
        if not results:
            raise ServerError(self.url + "/collective_rpc", f"{method}: no result in {str(response)[:200]!r}")
        return results

    async def _finish_update(self, version: int) -> None:
        """Drop the caches of the old weights, and only then set the new version."""
        await self._wake_cache()
        await self._control("/reset_prefix_cache?reset_running_requests=true&reset_external=true", {}, repeat=True)
        await self._set_version(str(version))

    async def _missing_flag(self) -> str | None:
        # On a CPU vLLM rejects the flag, accepts the calls, and releases nothing.
        config = await self._config()
        is_on_cpu = (config.get("device_config") or {}).get("device") == "cpu"
        can_release = is_on_cpu or config["model_config"].get("enable_sleep_mode") is not False
        return None if can_release else "--enable-sleep-mode"

    async def _abort_and_pause(self) -> None:
        await self._control("/pause?mode=abort&clear_cache=true", {}, repeat=True)

    async def _release_all(self) -> None:
        # Level 2: the next weights come from the trainer, so the server keeps no copy of the old ones.
        await self._update("/sleep?level=2&mode=abort", {})

    async def _allocate(self, tag: MemoryTag) -> None:
        # After the last part vLLM generates again by itself. That is the cache, when the weights are complete.
        await self._update(f"/wake_up?tags={tag}", {})

    async def _close_update(self) -> None:
        """End an update that was left open, by this client or one that died."""
        await self._update("/collective_rpc", {"method": "megatron_dppo_close_update"})

    async def _weight_version(self) -> str:
        return str((await self._get("/weight_info")).get("weight_version"))

    async def _set_version(self, version: str) -> None:
        await self._control("/update_weight_version", {"new_version": version}, repeat=True)

    async def _get(self, path: str) -> dict[str, Any]:
        with self._missing_call_explained():
            response = await self._admin.get(path, timeout=self._deadlines.alive)
        if not isinstance(response, dict):
            raise ServerError(self.url + path, f"expected the response of a vLLM server, got {str(response)[:200]!r}")
        return response


def _read_stock_sums(checksums: dict[str, str]) -> tuple[RankDigests, ...]:
    """Return vLLM's own digests, whose names begin with the rank: ``dp0:pp0:pcp0:tp0:model.norm.weight``."""
    ranks: dict[str, dict[str, str]] = {}
    for key, digest in checksums.items():
        rank, _, name = key.rpartition(":")
        if digest != _EMPTY_DIGEST:
            ranks.setdefault(rank, {})[name.replace(".routed_experts.", ".")] = digest
    if not ranks:
        raise ValueError("no checksums")
    return tuple(RankDigests(tp_rank=int(rank.rpartition(":tp")[2]), digests=ranks[rank]) for rank in sorted(ranks))
