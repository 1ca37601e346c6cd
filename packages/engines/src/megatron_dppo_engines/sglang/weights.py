"""Weight updates of an SGLang server: from disk, by reference or by broadcast.

There are two generations of the protocol. Since 0.5.21 tensors are accepted only between ``/begin_weight_update`` and
``/end_weight_update``, which do not exist before. No call here lets the server flush its caches or set its version
during an update: both happen once, at the end.
"""

import base64
from collections.abc import Sequence
from typing import Any

from megatron_dppo_engines.errors import ConfigError, ServerError
from megatron_dppo_engines.server import transfer_group_name
from megatron_dppo_engines.servers.client import ServerClient, bucket_to_json
from megatron_dppo_engines.servers.fields import require_object
from megatron_dppo_engines.servers.updates import ADAPTER, MemoryTag
from megatron_dppo_engines.sglang.wire import parse_engine_version
from megatron_dppo_engines.shared_memory import DeviceHandle, Handle, as_flattened_bucket
from megatron_dppo_engines.weight_digests import RankDigests, WeightLayout

_UPDATE_SESSION_VERSION = (0, 5, 21)
"""First version with /begin_weight_update. It is also the first to flush its caches while retracted requests wait."""
_DIGEST_VERSIONS = ((0, 5, 19), (0, 6))
"""First version, and first later version, whose digests are not those of ``megatron_dppo_digest``."""
_NO_ADAPTER_TEXT = "does not exist"
"""Part of SGLang's error text if it has no adapter to unload."""
_KEEP_CACHES = {"flush_cache": False, "abort_all_requests": False}


class SGLangWeightUpdates(ServerClient):
    """The part of ``SGLangServer`` that changes weights."""

    _untouched_text = "weights iterator"  # SGLang could not list the weights of the folder, so it changed none
    _group: str | None = None
    _cached_version: tuple[int, ...] | None = None

    async def _engine_version(self) -> tuple[int, ...]:
        """Return the version of SGLang; it is requested once."""
        if self._cached_version is None:
            self._cached_version = parse_engine_version((await self._server_info()).get("version"))
        return self._cached_version

    async def _server_info(self) -> dict[str, Any]:
        response = await self._admin.get("/server_info", timeout=self._deadlines.alive)
        if not isinstance(response, dict) or "version" not in response:
            raise ServerError(
                f"{self.url}/server_info", f"expected the response of an SGLang server, got {str(response)[:200]!r}"
            )
        return response

    async def pause(self) -> None:
        """See ``InferenceServer``: since 0.5.21 running requests are kept.

        Before, SGLang flushes no cache while a request waits, so all of them return as ``abort``.
        """
        mode = "retract" if await self._engine_version() >= _UPDATE_SESSION_VERSION else "abort"
        await self._control("/pause_generation", {"mode": mode}, repeat=True)
        self._is_paused = True

    async def resume(self) -> None:
        """Generate again."""
        await self._wake_cache()
        await self._control("/continue_generation", {}, repeat=True)
        self._is_paused = False

    async def _weight_version(self) -> str:
        info = await self._admin.get("/model_info", timeout=self._deadlines.alive)
        return str(require_object(info, self.url + "/model_info").get("weight_version"))

    async def _load_weights(self, folder: str) -> None:
        # Without load_format the server would use that of its start, which may be "dummy".
        body = {"model_path": folder, "load_format": "auto", **_KEEP_CACHES}
        await self._update("/update_weights_from_disk", body)

    async def _load_adapter(self, folder: str) -> None:
        # SGLang replaces no adapter in place. After the unload, a request that names the adapter would load the old
        # files again; the server is paused meanwhile.
        try:
            await self._update("/unload_lora_adapter", {"lora_name": ADAPTER})
        except ServerError as error:
            if _NO_ADAPTER_TEXT not in error.detail:
                raise
        await self._update("/load_lora_adapter", {"lora_name": ADAPTER, "lora_path": folder})

    async def begin_update(self) -> None:
        """See ``InferenceServer``."""
        if not self._is_paused:
            raise RuntimeError(f"{self.url}: begin_update without pause")
        await self._set_version(self._unfinished_version)
        if await self._engine_version() < _UPDATE_SESSION_VERSION:
            return
        try:
            await self._update("/begin_weight_update", {})
        except ServerError as error:
            # A client that died left its update open.
            if "already open" not in error.detail:
                raise
            await self._update("/end_weight_update", {})
            await self._update("/begin_weight_update", {})

    async def receive_handles(
        self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], handles: Sequence[Handle]
    ) -> None:
        """See ``InferenceServer``. SGLang exits if it cannot open a handle."""
        # For its check only.
        await self._tp_size()
        # One pickle for each rank of the server. Nothing is ever unpickled in this process.
        buckets = [as_flattened_bucket(handle, names, dtypes, shapes) for handle in handles]
        encoded = [base64.b64encode(bucket).decode() for bucket in buckets]
        body = {"serialized_named_tensors": encoded, "load_format": "flattened_bucket", **_KEEP_CACHES}
        try:
            await self._update("/update_weights_from_tensor", body)
        except ServerError as error:
            # Without a status the server has not responded: it may have exited.
            if error.status is not None:
                raise
            gpus = ", ".join(handle.device for handle in handles if isinstance(handle, DeviceHandle))
            cause = f"one of the GPUs {gpus} is not the one of its rank" if gpus else "it was gone"
            hint = f"if it has ended, it could not open the trainer's memory, as when {cause} (its log has the reason)"
            raise ServerError(error.url, f"{error.detail}; {hint}") from error

    async def join_group(self, host: str, port: int, rank_offset: int, world_size: int, backend: str) -> None:
        """See ``InferenceServer``."""
        # For its check only.
        await self._tp_size()
        name = transfer_group_name(host, port)
        body = {
            "master_address": host,
            "master_port": port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": name,
            "backend": backend,
        }
        await self._update("/init_weights_update_group", body)
        self._group = name

    async def receive_broadcast(
        self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
    ) -> None:
        """See ``InferenceServer``."""
        if self._group is None:
            raise RuntimeError(f"{self.url}: receive_broadcast without join_group")
        bucket = bucket_to_json(names, dtypes, shapes)
        body = {**bucket, "group_name": self._group, "load_format": "flattened_bucket", **_KEEP_CACHES}
        await self._update("/update_weights_from_distributed", body)

    async def end_update(self, version: int) -> None:
        """See ``InferenceServer``."""
        if await self._engine_version() >= _UPDATE_SESSION_VERSION:
            await self._update("/end_weight_update", {})
        await self._finish_update(version)

    async def leave_group(self) -> None:
        """Leave the broadcast group, if there is one."""
        group = self._group
        self._group = None
        if group is not None:
            await self._update("/destroy_weights_update_group", {"group_name": group})

    async def weight_layout(self) -> WeightLayout:
        """See ``InferenceServer``. On GPUs SGLang sums words; on a CPU it uses the first half of a sha256."""
        info = await self._server_info()
        device = info.get("device")
        sizes = ("ep_size", "dp_size", "attn_dp_size", "attn_cp_size", "moe_dp_size")
        has_only_tp = all(info.get(key) in (None, 1) for key in sizes)
        is_unchanged = not (info.get("quantization") or info.get("torchao_config") or info.get("enable_eplb"))
        first, end = _DIGEST_VERSIONS
        has_known_digests = first <= await self._engine_version() < end
        return WeightLayout(
            algorithm="sha256" if device == "cpu" else "words",
            tp_size=int(info.get("tp_size", 1)),
            plain=has_known_digests and device in ("cpu", "cuda") and has_only_tp and is_unchanged,
        )

    async def weight_digests(self) -> tuple[RankDigests, ...]:
        """See ``InferenceServer``."""
        path = "/weights_checker"
        response = await self._control(path, {"action": "checksum"}, repeat=True)
        try:
            ranks = sorted(response["ranks"], key=lambda rank: _parallelism_info(rank)["rank"])
            return tuple(
                RankDigests(
                    tp_rank=_parallelism_info(rank)["tp_rank"],
                    # By the names that vLLM gives the same tensors.
                    digests={
                        name.replace(".fused_qkv_a_proj_with_mqa.", ".fused_qkv_a_proj."): digest
                        for name, digest in rank["checksums"].items()
                    },
                )
                for rank in ranks
            )
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            raise ServerError(
                self.url + path, f"expected checksums of the weights, got {str(response)[:200]}"
            ) from None

    async def _finish_update(self, version: int) -> None:
        """Drop the caches of the old weights, and only then set the new version."""
        await self._wake_cache()
        await self._control("/flush_cache", {}, repeat=True)
        await self._set_version(str(version))

    async def _set_version(self, version: str) -> None:
        # By default this call aborts all requests.
        body = {"new_version": version, "abort_all_requests": False}
        await self._control("/update_weight_version", body, repeat=True)

    async def _missing_flag(self) -> str | None:
        # On a CPU SGLang has no memory saver: it accepts the calls and releases nothing.
        info = await self._server_info()
        can_release = info.get("enable_memory_saver") is not False or info.get("device") == "cpu"
        return None if can_release else "--enable-memory-saver"

    async def _abort_and_pause(self) -> None:
        # SGLang's scheduler exits if memory is released while it has a request or the result of one.
        await self._control("/pause_generation", {"mode": "abort"}, repeat=True)
        await self._control("/flush_cache?timeout=60", {}, repeat=True)  # waits until it has none

    async def _release_all(self) -> None:
        await self._update("/release_memory_occupation", {"tags": ["kv_cache", "weights"]})

    async def _allocate(self, tag: MemoryTag) -> None:
        await self._update("/resume_memory_occupation", {"tags": [tag]})

    async def _tp_size(self) -> int:
        """Return the number of ranks; refuse replicas and pipeline stages, which SGLang cannot tell apart here.

        With data-parallel attention the replicas are inside of the tensor-parallel ranks.
        """
        info = await self._server_info()
        for key, flag in (("dp_size", "--dp-size"), ("pp_size", "--pp-size")):
            if info.get(key, 1) > 1 and not (key == "dp_size" and info.get("enable_dp_attention")):
                raise ConfigError(
                    f"{self.url} runs with {flag} {info[key]}: SGLang then accepts new weights from disk only. Start "
                    "one server per replica, or set rollout.weight_sync.method = 'disk'"
                )
        return int(info.get("tp_size", 1))


def _parallelism_info(rank: dict[str, Any]) -> dict[str, int]:
    """Return the ranks of a process in the server; since 0.5.21 they are in a list with those of draft models."""
    info = rank["parallelism_info"]
    return info[0] if isinstance(info, list) else info
