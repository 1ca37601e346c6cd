"""New weights for inference servers, from rank 0: who is there, pause, send, end, compare, resume.

One call of ``WeightSync.send`` is one attempt. It never leaves a server that generates with half of the new weights:
one that fails in between stays paused or under version -1, and is not in the result.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from megatron_dppo.config.servers import WeightSyncConfig
from megatron_dppo.errors import CheckpointError, DiskError, ServerError
from megatron_dppo.files import disk_errors
from megatron_dppo.hf.folder import drain
from megatron_dppo.rollout.server import InferenceServer, ServerInfo
from megatron_dppo.weights.adapter_folder import on_cpu, write_adapter
from megatron_dppo.weights.attempt import Attempt, SyncResult
from megatron_dppo.weights.handles import HandleTransfer, SharedStream, Sharing, as_sent
from megatron_dppo.weights.hf_folder import save_hf_folder
from megatron_dppo.weights.proof import SyncProof, WeightProofs, kv_heads
from megatron_dppo.weights.quantization import Quantization, quantized
from megatron_dppo.weights.transfer import BucketTransfer, Weights
from megatron_dppo.weights.transfer_group import GroupTransport, TorchTransport

T = TypeVar("T")
_ALIVE_SECONDS = 10.0
"""A server that says nothing of itself for so long is absent."""
_BACK_SECONDS = 2.0
"""The same of one that was absent before."""
_KEPT_FOLDERS = 2
"""Versions on disk: a server that still reads the last one must not lose it."""


class WeightSync:
    """Sends the trainer's weights to all servers.

    Args:
        servers: clients of their own, used by nothing else.
        config: method and sizes.
        model_folder: whose config and tokenizer go with the weights to ``disk``.
        weights_folder: where ``disk`` writes.
        dtype: that the weights are sent in.
        device: of the buckets; a CUDA device makes the group an NCCL one.
        tied: the output layer is the embedding. It is sent under both names: SGLang has an output layer of its own for
            a tied Qwen3-MoE, which a tied model's weights alone never fill.
        transport: how a bucket reaches the members of a group; None = a process group of torch.
        sharing: of the method ``ipc``, for which the other ranks take part; None with the other methods.
        quantization: of ``disk``: how ``model_folder`` is quantised, and each version of the weights with it; None = it
            is not.
        adapter: of the method ``adapter``, PEFT's configuration: the weights that are sent are adapters. None with the
            other methods.
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
        transport: GroupTransport | None = None,
        sharing: Sharing | None = None,
        adapter: Mapping[str, Any] | None = None,
        quantization: Quantization | None = None,
    ) -> None:
        self._servers, self._config, self._tied = list(servers), config, tied
        self._model_folder, self._folder, self._dtype = model_folder, weights_folder, dtype
        self._runner = asyncio.Runner()
        self._buckets = BucketTransfer(self._servers, config, device, transport or TorchTransport())
        self._sharing, self._adapter, self._quantization = sharing, adapter, quantization
        self._handles = None if sharing is None else HandleTransfer(self._servers, sharing)
        self._proofs = WeightProofs(kv_heads(model_folder))
        self._versions: list[int] = []
        self._absent: set[str] = set()
        self._given = dict[str, int]()
        """by URL: the version that it was given last"""
        self._broke = set[str]()
        """who broke an earlier attempt at this version"""

    def send(self, weights: Weights, version: int, kept: Mapping[str, ServerInfo] | None = None) -> SyncResult:
        """One attempt; always takes the stream to its end, since the other ranks run it too.

        Args:
            weights: full tensors by Hugging Face name.
            version: of these weights.
            kept: servers that are good by an attempt before at this version: another one touches them no more.
        """
        return self._runner.run(self.send_async(weights, version, kept))

    async def send_async(
        self, weights: Weights, version: int, kept: Mapping[str, ServerInfo] | None = None
    ) -> SyncResult:
        """``send`` on the caller's event loop. With the methods ``disk`` and ``tensor`` it uses no thread."""
        attempt = Attempt(version, kept or {})
        again = self._versions[-1:] == [version]
        if not again:
            self._versions.append(version)
            self._broke = set()
        proof = None
        sent = as_sent(weights, self._dtype, tied=self._tied) if self._sharing is None else self._sharing.open(weights)
        if self._quantization is not None:
            sent = quantized(sent, self._quantization)
        try:
            proof = await self._send(sent, attempt, again)
        finally:
            if isinstance(sent, SharedStream):
                sent.end()
            drain(weights)
        result = attempt.result()
        self._absent = set(result.absent)
        self._given |= dict.fromkeys(result.good, version)
        self._broke |= attempt.culprits()
        self._proofs.done(list(result.good), version, proof)
        return result

    def prove_base(self, weights: Weights, urls: Collection[str]) -> SyncResult:
        """Whether servers have these weights, without sending them: those that adapters are added to."""
        return self._runner.run(self._prove_base(weights, urls))

    async def _prove_base(self, weights: Weights, urls: Collection[str]) -> SyncResult:
        attempt = Attempt(self._versions[-1], {})
        servers = [server for server in self._servers if server.url in urls]
        try:
            await attempt.each(servers, lambda server: _info(server, _ALIVE_SECONDS), absent=True)
            proof = await self._proofs.begin(attempt.left(servers), attempt, again=False, sends=False)
            for _ in proof.watch(as_sent(weights, self._dtype, tied=self._tied)):
                pass
            await proof.judge(attempt.left(servers), attempt)
        finally:
            drain(weights)
        return attempt.result()

    def run(
        self, work: Callable[[list[InferenceServer]], Coroutine[Any, Any, T]], urls: Iterable[str] | None = None
    ) -> T:
        """What the work with all servers, or those at these URLs, gives: their clients live on this event loop."""
        wanted = {server.url for server in self._servers} if urls is None else set(urls)
        return self._runner.run(work([server for server in self._servers if server.url in wanted]))

    def close(self) -> None:
        """Leave the servers as they are."""
        self._runner.run(self._close())
        self._runner.close()

    async def _close(self) -> None:
        await self._buckets.leave()
        for server in self._servers:
            await server.close()

    async def _send(self, weights: Weights, attempt: Attempt, again: bool) -> SyncProof | None:
        if again:
            # Whoever came back since the last attempt, as a new process, knows of no group.
            await self._buckets.leave()
        await self._find(attempt, again)
        # A server whose trainer died in a sync is paused: it answers, but its health check fails.
        await attempt.each(attempt.left(self._servers), lambda server: server.pause())
        await attempt.each(attempt.left(self._servers), lambda server: server.wake_weights())
        every = 0 if self._adapter is not None else self._config.checksum_every
        proof = None
        # Another attempt at the same weights is checked as the one before.
        if every and (len(self._versions) - 1) % every == 0:
            proof = await self._proofs.begin(attempt.left(self._servers), attempt, again=again)
        watched = proof.watch(weights) if proof is not None else weights
        if self._config.method in ("disk", "adapter"):
            await self._through_folder(watched, attempt)
        elif self._handles is not None and isinstance(weights, SharedStream):
            await self._handles.send(watched, weights, attempt)
        else:
            await self._buckets.send(watched, attempt, self._given)
        if proof is not None:
            await proof.judge(attempt.left(self._servers), attempt)
        await attempt.each(attempt.left(self._servers), lambda server: server.resume())
        if attempt.failed.keys() & set(self._buckets.members):
            await self._buckets.leave()
        return proof

    async def _find(self, attempt: Attempt, again: bool) -> None:
        """Who is there. A server that answers nothing costs its seconds once, and then little until it answers."""
        servers = attempt.left(self._servers)
        known = [server for server in servers if server.url not in self._absent]
        lost = [server for server in servers if server.url in self._absent]
        if again and (known or attempt.kept):
            attempt.absent |= {server.url: f"{server.url}: did not answer in the attempt before" for server in lost}
            lost = []
        await asyncio.gather(
            attempt.each(known, lambda server: _info(server, _ALIVE_SECONDS), absent=True),
            attempt.each(lost, lambda server: _info(server, _BACK_SECONDS), absent=True),
        )
        if self._config.method == "distributed":
            # One member that fails makes all fail. Those that did so wait until the others have the weights.
            broke = [server for server in attempt.left(self._servers) if server.url in self._broke]
            if len(broke) < len(attempt.left(self._servers)):
                attempt.fail_all(broke, "gets the weights after the others: it broke off an attempt before")

    async def _through_folder(self, weights: Weights, attempt: Attempt) -> None:
        folder = self._folder / f"version_{attempt.version:06d}"
        try:
            with disk_errors(folder, "the weights for the servers"):
                self._folder.mkdir(parents=True, exist_ok=True)
                if self._adapter is None:
                    save_hf_folder(folder, self._model_folder, weights, self._dtype)
                else:
                    write_adapter(folder, on_cpu(weights), self._adapter)
        except (OSError, DiskError, CheckpointError) as error:
            servers = attempt.left(self._servers)
            return attempt.fail_all(servers, f"the weights could not be written to {folder}: {error}")
        path, by_adapter = str(folder.resolve()), self._adapter is not None

        def read(server: InferenceServer) -> Awaitable[None]:
            update = server.update_adapter if by_adapter else server.update_from_disk
            return update(path, attempt.version)

        await attempt.each(attempt.left(self._servers), read)
        for old in sorted(self._folder.glob("version_*"))[:-_KEPT_FOLDERS]:
            shutil.rmtree(old)


async def _info(server: InferenceServer, seconds: float) -> ServerInfo:
    try:
        async with asyncio.timeout(seconds):
            return await server.info()
    except TimeoutError:
        raise ServerError(server.url, f"no response within {seconds:g} seconds") from None
