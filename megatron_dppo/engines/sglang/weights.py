"""New weights for an SGLang server: from disk, by value, reference or broadcast; both generations of its protocol.

Since 0.5.21 tensors are only taken between ``/begin_weight_update`` and ``/end_weight_update``; before, those do not
exist. No call here lets the server flush its caches or set its version on the way: both happen once, at the end.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from megatron_dppo.engines.servers.fields import checked_success, part, version_name
from megatron_dppo.engines.servers.http import Deadlines, HttpClient
from megatron_dppo.engines.servers.updates import ADAPTER, FolderUpdates, Part
from megatron_dppo.engines.sglang.wire import version_parts
from megatron_dppo.errors import ConfigError, ServerError
from megatron_dppo.rollout.handles import DeviceHandle, Handle, as_flattened_bucket
from megatron_dppo.rollout.server import transfer_group_name
from megatron_dppo.rollout.weight_digests import RankDigests, WeightLayout

_SESSIONS = (0, 5, 21)
"""The first version with begin_weight_update, and that flushes its caches while retracted requests wait."""
_DIGESTS = ((0, 5, 19), (0, 6))
"""Versions whose digests are those that ``megatron_dppo_digest`` computes: from, and below."""
_NO_ADAPTER = "does not exist"
"""Stands in SGLang's message when it has no adapter that it could unload."""
_UNTOUCHED = "weights iterator"
"""Stands in SGLang's message when it could not even list the folder's weights, so that it changed none."""


class SGLangWeightUpdates(FolderUpdates):
    """The part of ``SGLangServer`` that changes weights."""

    _untouched = _UNTOUCHED
    _admin: HttpClient
    _deadlines: Deadlines
    _group: str | None = None
    _known_version: tuple[int, ...] | None = None

    async def _version(self) -> tuple[int, ...]:
        """Of SGLang, asked once."""
        if self._known_version is None:
            self._known_version = version_parts((await self._server_info()).get("version"))
        return self._known_version

    async def _server_info(self) -> dict[str, Any]:
        answer = await self._admin.get("/server_info", timeout=self._deadlines.alive)
        if not isinstance(answer, dict) or "version" not in answer:
            raise ServerError(f"{self.url}/server_info", f"expected an SGLang server's, got {str(answer)[:200]!r}")
        return answer

    async def pause(self) -> None:
        """See ``InferenceServer``: since 0.5.21 running requests are kept.

        Before, SGLang flushes no cache while a request waits, so all of them return as ``abort``.
        """
        mode = "retract" if await self._version() >= _SESSIONS else "abort"
        await self._control("/pause_generation", {"mode": mode}, repeat=True)
        self._paused = True

    async def resume(self) -> None:
        """Generate again."""
        await self._wake_cache()
        await self._control("/continue_generation", {}, repeat=True)
        self._paused = False

    async def _weight_version(self) -> str:
        info = await self._admin.get("/model_info", timeout=self._deadlines.alive)
        return str(part(info, self.url + "/model_info", "the answer").get("weight_version"))

    async def _read_folder(self, folder: str) -> None:
        # The format is named because the server would otherwise repeat that of its start, which may be "dummy".
        body = {"model_path": folder, "load_format": "auto", "flush_cache": False, "abort_all_requests": False}
        await self._update("/update_weights_from_disk", body)

    async def _read_adapter(self, folder: str) -> None:
        """SGLang replaces none in place. What it has unloaded it would load again for a request that names it."""
        try:
            await self._update("/unload_lora_adapter", {"lora_name": ADAPTER})
        except ServerError as error:
            if _NO_ADAPTER not in error.detail:
                raise
        await self._update("/load_lora_adapter", {"lora_name": ADAPTER, "lora_path": folder})

    async def begin_update(self) -> None:
        """See ``InferenceServer``.

        Raises:
            RuntimeError: not paused: requests would be answered with half of the new weights.
        """
        if not self._paused:
            raise RuntimeError(f"{self.url}: begin_update without pause")
        await self._set_version(self._unfinished)
        if await self._version() < _SESSIONS:
            return
        try:
            await self._update("/begin_weight_update", {})
        except ServerError as error:
            if "already open" not in error.detail:
                raise
            await self._update("/end_weight_update", {})
            await self._update("/begin_weight_update", {})

    async def receive_tensors(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Take weights by value. The server reads a pickle of plain CPU tensors; nothing is ever unpickled here."""
        payload = pickle.dumps([(name, _owned(tensor)) for name, tensor in tensors])
        await self._receive([payload] * await self._ranks(), None)

    async def receive_handles(
        self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], handles: Sequence[Handle]
    ) -> None:
        """See ``InferenceServer``. SGLang ends when it cannot open one."""
        await self._ranks()
        try:
            buckets = [as_flattened_bucket(handle, names, dtypes, shapes) for handle in handles]
            await self._receive(buckets, "flattened_bucket")
        except ServerError as error:
            if error.status is not None:
                raise
            gpus = ", ".join(handle.device for handle in handles if isinstance(handle, DeviceHandle))
            why = f"one of the GPUs {gpus} is not the one of its rank" if gpus else "it was gone"
            hint = f"if it has ended, it could not open the trainer's memory, as when {why} (its log has the reason)"
            raise ServerError(error.url, f"{error.detail}; {hint}") from error

    async def _receive(self, payloads: Sequence[bytes], load_format: str | None) -> None:
        """A pickle for each rank of the server."""
        encoded = [base64.b64encode(payload).decode() for payload in payloads]
        body = {"serialized_named_tensors": encoded, "load_format": load_format}
        await self._update("/update_weights_from_tensor", body | {"flush_cache": False, "abort_all_requests": False})

    async def join_group(self, host: str, port: int, rank_offset: int, world_size: int, backend: str) -> None:
        """See ``InferenceServer``.

        Raises:
            ConfigError: a server with data or pipeline parallelism, whose ranks SGLang cannot tell apart here.
        """
        await self._ranks()
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
        """Receive the bytes of the named tensors, one after the other, from rank 0 of the group."""
        if self._group is None:
            raise RuntimeError(f"{self.url}: receive_broadcast without join_group")
        body = {
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(shape) for shape in shapes],
            "group_name": self._group,
            "load_format": "flattened_bucket",
        }
        body |= {"flush_cache": False, "abort_all_requests": False}
        await self._update("/update_weights_from_distributed", body)

    async def end_update(self, version: int) -> None:
        """See ``InferenceServer``."""
        if await self._version() >= _SESSIONS:
            await self._update("/end_weight_update", {})
        await self._finish(version)

    async def leave_group(self) -> None:
        """Leave the broadcast group; nothing to do when there is none."""
        group, self._group = self._group, None
        if group is not None:
            await self._update("/destroy_weights_update_group", {"group_name": group})

    async def weight_layout(self) -> WeightLayout:
        """See ``InferenceServer``. On GPUs SGLang sums words, on a CPU it takes the first half of a sha256."""
        info = await self._server_info()
        device = info.get("device")
        alone = all(info.get(key) in (None, 1) for key in ("ep_size", "dp_size", "attn_cp_size", "moe_dp_size"))
        as_sent = not (info.get("quantization") or info.get("torchao_config") or info.get("enable_eplb"))
        known = _DIGESTS[0] <= await self._version() < _DIGESTS[1]
        return WeightLayout(
            algorithm="sha256" if device == "cpu" else "words",
            tp_size=int(info.get("tp_size", 1)),
            plain=known and device in ("cpu", "cuda") and alone and as_sent,
        )

    async def weight_digests(self) -> tuple[RankDigests, ...]:
        """See ``InferenceServer``."""
        path = "/weights_checker"
        answer = await self._control(path, {"action": "checksum"}, repeat=True)
        try:
            return tuple(
                RankDigests(tp_rank=_placement(rank)["tp_rank"], digests=dict(rank["checksums"]))
                for rank in sorted(answer["ranks"], key=lambda rank: _placement(rank)["rank"])
            )
        except (KeyError, IndexError, TypeError, ValueError):
            raise ServerError(self.url + path, f"no checksums of the weights: {str(answer)[:200]}") from None

    async def _finish(self, version: int) -> None:
        """Drop what the old weights cached, then, and only then, carry the new version."""
        await self._wake_cache()
        await self._control("/flush_cache", {}, repeat=True)
        await self._set_version(version_name(version))

    async def _set_version(self, name: str) -> None:
        # By default this call aborts all requests.
        await self._control("/update_weight_version", {"new_version": name, "abort_all_requests": False}, repeat=True)

    async def _missing_flag(self) -> str | None:
        """On a CPU SGLang has no memory saver: it answers the calls, and releases nothing."""
        info = await self._server_info()
        can = info.get("enable_memory_saver") is not False or info.get("device") == "cpu"
        return None if can else "--enable-memory-saver"

    async def _stop(self) -> None:
        """SGLang's scheduler ends when memory is to be released while it has a request or the result of one."""
        await self._control("/pause_generation", {"mode": "abort"}, repeat=True)
        await self._control("/flush_cache?timeout=60", {}, repeat=True)  # waits until it has none

    async def _release_all(self) -> None:
        await self._update("/release_memory_occupation", {"tags": ["kv_cache", "weights"]})

    async def _take_part(self, part: Part) -> None:
        await self._update("/resume_memory_occupation", {"tags": [part]})

    async def _ranks(self) -> int:
        info = await self._server_info()
        for key, flag in (("dp_size", "--dp-size"), ("pp_size", "--pp-size")):
            if info.get(key, 1) > 1:
                raise ConfigError(
                    f"{self.url} runs with {flag} {info[key]}: SGLang takes weights otherwise than from disk only "
                    f"without it. Start one server a replica, or use the weight sync method disk"
                )
        return int(info.get("tp_size", 1))

    async def _control(self, path: str, body: dict[str, Any], *, repeat: bool = False) -> Any:
        answer = await self._admin.post(path, body, timeout=self._deadlines.control, repeat=repeat)
        return checked_success(answer, self.url + path)

    async def _update(self, path: str, body: dict[str, Any]) -> None:
        answer = await self._admin.post(path, body, timeout=self._deadlines.update)
        checked_success(answer, self.url + path)


def _placement(rank: dict[str, Any]) -> dict[str, int]:
    """Of a rank of the server; since 0.5.21 in a list with those of draft models."""
    info = rank["parallelism_info"]
    return info[0] if isinstance(info, list) else info


def _owned(tensor: Tensor) -> Tensor:
    """A CPU tensor with a storage of its own: pickling a view would send all that it is a view of."""
    result = tensor.detach().cpu().contiguous()
    return result.clone() if result.untyped_storage().nbytes() > result.nbytes else result
