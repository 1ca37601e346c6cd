"""Weight sync of inference servers, run by rank 0: find, pause, send, verify, resume.

One call of ``WeightSync.send`` is one attempt. It never leaves a server that generates with incomplete weights: a
server that fails in between stays paused or reports version -1, and is not part of the result.
"""

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from megatron_dppo.config.servers import WeightSyncConfig
from megatron_dppo.errors import CheckpointError, DiskError, ServerError
from megatron_dppo.export.adapter_folder import copy_to_cpu, write_adapter
from megatron_dppo.export.hf_folder import save_hf_folder
from megatron_dppo.export.quantization import Quantization, quantize_stream
from megatron_dppo.files import disk_errors
from megatron_dppo.hf.folder import Weights, drain
from megatron_dppo.weights.attempt import Attempt, SyncResult
from megatron_dppo.weights.ipc import HandleTransfer, MemorySharing, SharedStream, cast_for_sending
from megatron_dppo.weights.proof import SyncProof, WeightProofs, read_num_kv_heads
from megatron_dppo.weights.transfer import BroadcastTransfer
from megatron_dppo.weights.transfer_group import TorchTransport
from megatron_dppo_engines.server import InferenceServer, ServerInfo

T = TypeVar("T")
INFO_SECONDS = 10.0
"""Time until a server that does not respond counts as absent."""
ABSENT_INFO_SECONDS = 2.0
"""The same for a server that was absent in the last attempt."""
_RETAINED_FOLDERS = 2
"""Versions on disk: a server may still read the previous one."""


class WeightSync:
    """Sends the trainer's weights to all servers, by clients that nothing else uses.

    ``disk`` copies config and tokenizer of ``model_folder``; ``disk`` and ``adapter`` write to ``weights_folder``.
    Weights are sent in ``dtype``, in buckets on ``device``; CUDA makes the broadcast group an NCCL one.

    ``tied``: the output layer is the embedding. It is sent under both names: SGLang has a separate output layer for a
    tied Qwen3-MoE, which the weights of a tied model alone never fill.

    ``sharing`` is the memory of the method ``ipc``, for which all ranks run; ``adapter`` the PEFT configuration of the
    method ``adapter``; ``quantization`` that of ``model_folder``, which ``disk`` applies to each version.
    """

    def __init__(
        self,
        servers: Sequence[InferenceServer],
        config: WeightSyncConfig,
        *,
        model_folder: Path,
        weights_folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        tied: bool = False,
        transport: TorchTransport | None = None,
        sharing: MemorySharing | None = None,
        adapter: Mapping[str, object] | None = None,
        quantization: Quantization | None = None,
    ) -> None:
        self._servers = list(servers)
        self._config = config
        self._tied = tied
        self._model_folder = model_folder
        self._folder = weights_folder
        self._dtype = dtype
        self._runner = asyncio.Runner()
        self._broadcasts = BroadcastTransfer(self._servers, config, device, transport or TorchTransport())
        self._sharing = sharing
        self._adapter = adapter
        self._quantization = quantization
        self._handles = None if sharing is None else HandleTransfer(self._servers, sharing)
        self._proofs = WeightProofs(read_num_kv_heads(model_folder))
        self._versions: list[int] = []
        self._absent: set[str] = set()
        self._last_versions = dict[str, int]()
        """Version that each server got last, by URL."""
        self._culprits = set[str]()
        """Servers that broke off an earlier attempt at this version."""
        self._excluded = dict[str, str]()
        """Reasons of the servers that get no more weights, by URL."""

    def exclude(self, servers: Mapping[str, str]) -> None:
        """Send servers no more weights in this run. ``servers`` has the reason by URL."""
        self._excluded |= servers

    def send(self, weights: Weights, version: int, synced: Mapping[str, ServerInfo] | None = None) -> SyncResult:
        """Run one attempt, without servers that are ``synced`` already; other ranks run the stream to its end too."""
        return self._runner.run(self.send_async(weights, version, synced))

    async def send_async(
        self, weights: Weights, version: int, synced: Mapping[str, ServerInfo] | None = None
    ) -> SyncResult:
        """Run ``send`` on the caller's event loop. The methods ``disk`` and ``ipc`` use no thread."""
        attempt = Attempt(version, synced or {})
        attempt.absent |= self._excluded
        # One call is one attempt, so the same version again is a retry.
        is_retry = self._versions[-1:] == [version]
        if not is_retry:
            self._versions.append(version)
            self._culprits = set()
        proof = None
        if self._sharing is None:
            stream = cast_for_sending(weights, self._dtype, tied=self._tied)
        else:
            stream = self._sharing.open(weights)
        if self._quantization is not None:
            stream = quantize_stream(stream, self._quantization)
        try:
            proof = await self._send(stream, attempt, is_retry)
        finally:
            # The other ranks wait in the stream's collectives, so it ends even if all servers fail.
            if isinstance(stream, SharedStream):
                stream.end()
            drain(weights)
        result = attempt.result()
        # The user was told why when the server was excluded.
        result = replace(result, absent={k: v for k, v in result.absent.items() if k not in self._excluded})
        self._absent = set(result.absent)
        self._last_versions |= dict.fromkeys(result.good, version)
        self._culprits |= attempt.find_culprits()
        self._proofs.record(list(result.good), version, proof)
        return result

    def prove_base(self, weights: Weights, urls: Collection[str]) -> SyncResult:
        """Verify that servers hold the base weights that adapters are added to; sends nothing."""
        return self._runner.run(self._prove_base(weights, urls))

    async def _prove_base(self, weights: Weights, urls: Collection[str]) -> SyncResult:
        attempt = Attempt(self._versions[-1], {})
        servers = [server for server in self._servers if server.url in urls]
        try:
            await attempt.call_each(servers, lambda server: request_info(server, INFO_SECONDS), absent=True)
            proof = await self._proofs.begin(attempt.remaining(servers), attempt, is_full=True, sends=False)
            for _ in proof.stream.watch(cast_for_sending(weights, self._dtype, tied=self._tied)):
                pass
            await proof.verify(attempt.remaining(servers), attempt)
        finally:
            drain(weights)
        return attempt.result()

    def run(
        self, work: Callable[[list[InferenceServer]], Coroutine[object, None, T]], urls: Iterable[str] | None = None
    ) -> T:
        """Run a coroutine with all servers, or those at ``urls``, on the event loop of their clients."""
        selected = {server.url for server in self._servers} if urls is None else set(urls)
        return self._runner.run(work([server for server in self._servers if server.url in selected]))

    def close(self) -> None:
        """Close the connections; the servers keep running."""
        self._runner.run(self._close())
        self._runner.close()

    async def _close(self) -> None:
        await self._broadcasts.leave_group()
        for server in self._servers:
            await server.close()

    async def _send(self, weights: Weights, attempt: Attempt, is_retry: bool) -> SyncProof | None:
        if is_retry:
            # A server that restarted since the last attempt is a new process and not in the group.
            await self._broadcasts.leave_group()
        await self._find_servers(attempt, is_retry)

        # Pause before anything else: a server whose trainer died in a sync is still paused and fails its health check.
        await attempt.call_each(attempt.remaining(self._servers), lambda server: server.pause())
        await attempt.call_each(attempt.remaining(self._servers), lambda server: server.wake_weights())

        # Take the digests from before the sync, if servers are verified.
        every = 0 if self._adapter is not None else self._config.checksum_every
        proof = None
        if every:
            # A retry adds no version. It follows a failure, so all tensors are checked.
            is_full = is_retry or (len(self._versions) - 1) % every == 0
            servers = attempt.remaining(self._servers)
            proof = await self._proofs.begin(servers, attempt, is_full=is_full, is_retry=is_retry)
        watched = proof.stream.watch(weights) if proof is not None else weights

        # Send.
        if self._config.method in ("disk", "adapter"):
            await self._send_folder(watched, attempt)
        elif self._handles is not None and isinstance(weights, SharedStream):
            await self._handles.send(watched, weights, attempt)
        else:
            await self._broadcasts.send(watched, attempt, self._last_versions)

        # Verify, then resume the servers that passed.
        if proof is not None:
            await proof.verify(attempt.remaining(self._servers), attempt)
        await attempt.call_each(attempt.remaining(self._servers), lambda server: server.resume())
        # A member that failed may have left the group, so the next sync forms a new one.
        if attempt.failed.keys() & set(self._broadcasts.members):
            await self._broadcasts.leave_group()
        return proof

    async def _find_servers(self, attempt: Attempt, is_retry: bool) -> None:
        """Find the servers that respond; one that was absent before gets a short timeout."""
        servers = attempt.remaining(self._servers)
        present = [server for server in servers if server.url not in self._absent]
        absent = [server for server in servers if server.url in self._absent]
        if is_retry and (present or attempt.synced):
            # Other servers work, so a retry does not wait for the absent ones.
            attempt.absent |= {
                server.url: f"{server.url}: did not respond in the previous attempt" for server in absent
            }
            absent = []
        await asyncio.gather(
            attempt.call_each(present, lambda server: request_info(server, INFO_SECONDS), absent=True),
            attempt.call_each(absent, lambda server: request_info(server, ABSENT_INFO_SECONDS), absent=True),
        )
        if self._config.method == "distributed":
            # One failing member breaks the broadcast for all. Servers that did so wait until the others are synced.
            culprits = [server for server in attempt.remaining(self._servers) if server.url in self._culprits]
            if len(culprits) < len(attempt.remaining(self._servers)):
                attempt.fail_all(culprits, "gets the weights after the others: it broke off an earlier attempt")

    async def _send_folder(self, weights: Weights, attempt: Attempt) -> None:
        folder = self._folder / f"version_{attempt.version:06d}"
        try:
            with disk_errors(folder, "the weights for the servers"):
                self._folder.mkdir(parents=True, exist_ok=True)
                if self._adapter is None:
                    save_hf_folder(folder, self._model_folder, weights, self._dtype)
                else:
                    write_adapter(folder, copy_to_cpu(weights), self._adapter)
        except (OSError, DiskError, CheckpointError) as error:
            servers = attempt.remaining(self._servers)
            return attempt.fail_all(servers, f"the weights could not be written to {folder}: {error}")
        # Absolute, because a server has a working directory of its own.
        path = str(folder.resolve())
        is_adapter = self._adapter is not None

        def load(server: InferenceServer) -> Awaitable[None]:
            update = server.update_adapter if is_adapter else server.update_from_disk
            return update(path, attempt.version)

        await attempt.call_each(attempt.remaining(self._servers), load)
        # By name, which is by version, since the numbers are padded with zeros.
        for old in sorted(self._folder.glob("version_*"))[:-_RETAINED_FOLDERS]:
            shutil.rmtree(old)


async def request_info(server: InferenceServer, seconds: float) -> ServerInfo:
    """Return what a server says of itself within a time limit."""
    try:
        async with asyncio.timeout(seconds):
            return await server.info()
    except TimeoutError:
        raise ServerError(server.url, f"no response within {seconds:g} seconds") from None
