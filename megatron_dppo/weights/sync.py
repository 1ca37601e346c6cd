"""New weights for inference servers, from rank 0: who is there, pause, send, end, compare, resume.

One call of ``WeightSync.send`` is one attempt. It never leaves a server that generates with half of the new weights:
one that fails in between stays paused or under version -1, and is not in the result.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron_dppo.config.servers import WeightSyncConfig
from megatron_dppo.errors import ConfigError, DiskError, ServerError
from megatron_dppo.files.disk import disk_errors
from megatron_dppo.hf import drain, save_hf_folder
from megatron_dppo.rollout.attempt import Attempt, SyncResult, caught
from megatron_dppo.rollout.server import InferenceServer, ServerInfo, transfer_group_name
from megatron_dppo.weights.proof import SyncProof, WeightProofs, kv_heads
from megatron_dppo.weights.transfer_group import GroupTransport, TorchTransport, flatten_bucket, in_buckets

T = TypeVar("T")
Weights = Iterator[tuple[str, Tensor]]
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
    ) -> None:
        self._servers, self._config, self._tied = list(servers), config, tied
        self._model_folder, self._folder, self._dtype, self._device = model_folder, weights_folder, dtype, device
        self._runner = asyncio.Runner()
        self._transport: GroupTransport = transport or TorchTransport()
        self._group: Any = None
        self._members: tuple[str, ...] = ()
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
        try:
            proof = await self._send(_with_output_layer(weights) if self._tied else weights, attempt, again)
        finally:
            drain(weights)
        result = attempt.result()
        self._absent = set(result.absent)
        self._given |= dict.fromkeys(result.good, version)
        self._broke |= attempt.culprits()
        self._proofs.done(list(result.good), version, proof)
        return result

    def run(self, work: Callable[[list[InferenceServer]], Coroutine[Any, Any, T]], urls: Iterable[str]) -> T:
        """What the work with the servers at these URLs gives: their clients live on this sync's event loop."""
        wanted = set(urls)
        return self._runner.run(work([server for server in self._servers if server.url in wanted]))

    def close(self) -> None:
        """Leave the servers as they are."""
        self._runner.run(self._close())
        self._runner.close()

    async def _close(self) -> None:
        await self._leave()
        for server in self._servers:
            await server.close()

    async def _send(self, weights: Weights, attempt: Attempt, again: bool) -> SyncProof | None:
        if again:
            # Whoever came back since the last attempt, as a new process, knows of no group.
            await self._leave()
        await self._find(attempt, again)
        # A server whose trainer died in a sync is paused: it answers, but its health check fails.
        await attempt.each(attempt.left(self._servers), lambda server: server.pause())
        every = self._config.checksum_every
        proof = None
        # Another attempt at the same weights is checked as the one before.
        if every and (len(self._versions) - 1) % every == 0:
            proof = await self._proofs.begin(attempt.left(self._servers), attempt, again=again)
        sent = ((name, tensor.detach().to(self._dtype, copy=True)) for name, tensor in weights)
        watched = proof.watch(sent) if proof is not None else sent
        if self._config.method == "disk":
            await self._through_disk(watched, attempt)
        else:
            await self._in_buckets(watched, attempt)
        if proof is not None:
            await proof.judge(attempt.left(self._servers), attempt)
        await attempt.each(attempt.left(self._servers), lambda server: server.resume())
        if attempt.failed.keys() & set(self._members):
            await self._leave()
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

    async def _through_disk(self, weights: Weights, attempt: Attempt) -> None:
        folder = self._folder / f"version_{attempt.version:06d}"
        try:
            with disk_errors(folder, "the weights for the servers"):
                self._folder.mkdir(parents=True, exist_ok=True)
                save_hf_folder(folder, self._model_folder, weights, self._dtype)
        except (OSError, DiskError) as error:
            servers = attempt.left(self._servers)
            return attempt.fail_all(servers, f"the weights could not be written to {folder}: {error}")
        await attempt.each(
            attempt.left(self._servers),
            lambda server: server.update_from_disk(str(folder.resolve()), attempt.version),
        )
        for old in sorted(self._folder.glob("version_*"))[:-_KEPT_FOLDERS]:
            shutil.rmtree(old)

    async def _in_buckets(self, weights: Weights, attempt: Attempt) -> None:
        if self._config.method == "distributed":
            await self._join(attempt)
        await attempt.each(attempt.left(self._servers), lambda server: server.begin_update())
        for tensors in in_buckets(weights, self._config.bucket_megabytes * 2**20):
            servers = attempt.left(self._servers)
            if not servers:
                return
            if self._config.method == "tensor":
                await attempt.each(servers, lambda server, sent=tensors: server.receive_tensors(sent))  # type: ignore[misc]
            else:
                await self._broadcast(tensors, servers, attempt)
        await attempt.each(attempt.left(self._servers), lambda server: server.end_update(attempt.version))

    async def _join(self, attempt: Attempt) -> None:
        """A group of rank 0 and the servers that are there; kept until one of them is another process, which knows of
        no group and has not the version that its URL was given."""
        servers = attempt.left(self._servers)
        same = all(attempt.infos[s.url].policy_version == self._given.get(s.url) for s in servers)
        if self._group is not None and self._members == tuple(server.url for server in servers) and same:
            return
        await self._leave()
        if not servers:
            return
        host = self._config.host
        try:
            listener, port = self._transport.listen(host)
        except OSError as error:
            raise ConfigError(
                f"rollout.weight_sync.host = {host!r} is no address of this machine, where rank 0 runs ({error}); set "
                "it to the one that the servers reach"
            ) from error
        sizes = [attempt.infos[server.url].world_size for server in servers]
        offsets = {server.url: 1 + sum(sizes[:i]) for i, server in enumerate(servers)}
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        size = 1 + sum(sizes)
        ours = asyncio.create_task(
            self._transport.open(
                listener,
                name=transfer_group_name(host, port),
                world_size=size,
                backend=backend,
                timeout=self._config.timeout_seconds,
            )
        )
        await attempt.each(servers, lambda server: server.join_group(host, port, offsets[server.url], size, backend))
        try:
            self._group = await ours
        except (RuntimeError, ValueError) as error:
            attempt.fail_all(servers, f"the group for the weights at {host}:{port} was not complete: {error}")
            return
        self._members = tuple(server.url for server in servers)

    async def _broadcast(
        self, tensors: Sequence[tuple[str, Tensor]], servers: Sequence[InferenceServer], attempt: Attempt
    ) -> None:
        if set(self._members) != {server.url for server in servers}:
            # Nothing passes through a group of which a member does not take part: it would be waited for.
            return attempt.fail_all(servers, "another server of the broadcast failed")
        bucket = flatten_bucket(tensors)

        async def broadcast() -> None:
            assert self._group is not None
            try:
                await self._transport.broadcast(bucket, self._group)
            except RuntimeError as error:
                attempt.fail_all(servers, f"the broadcast broke off: {error}")
                self._close_group()

        # A server may wait for what another one should pass on. Closing our end tells it that nothing will come.
        await asyncio.gather(
            broadcast(),
            attempt.each(
                servers,
                lambda server: server.receive_broadcast(bucket.names, bucket.dtypes, bucket.shapes),
                on_failure=self._close_group,
            ),
        )
        if attempt.failed.keys() & {server.url for server in servers}:
            # One member less: whoever is left has to meet in a new group, from the first tensor on.
            attempt.fail_all(servers, "another server of the broadcast failed")

    async def _leave(self) -> None:
        members, self._members = self._members, ()
        self._close_group()
        await asyncio.gather(*(_goodbye(s) for s in self._servers if s.url in members))

    def _close_group(self) -> None:
        if self._group is not None:
            self._transport.close(self._group)
            self._group = None


async def _goodbye(server: InferenceServer) -> None:
    """Let it leave the group; one that does not answer leaves when it joins the next."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_ALIVE_SECONDS):
            await caught(server.leave_group())


async def _info(server: InferenceServer, seconds: float) -> ServerInfo:
    try:
        async with asyncio.timeout(seconds):
            return await server.info()
    except TimeoutError:
        raise ServerError(server.url, f"no answer within {seconds:g} seconds") from None


def _with_output_layer(weights: Weights) -> Weights:
    for name, tensor in weights:
        yield name, tensor
        if name == "model.embed_tokens.weight":
            yield "lm_head.weight", tensor
