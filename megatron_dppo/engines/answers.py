"""Processes that ask servers in the trainer's place: see ``answer_process``."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_dppo import errors
from megatron_dppo.engines.servers.contract import Contract
from megatron_dppo.engines.servers.frames import Frames
from megatron_dppo.engines.servers.http import Deadlines
from megatron_dppo.errors import ResponseLost
from megatron_dppo.rollout.server import GenerateRequest, Generation, InferenceServer
from megatron_dppo.types import FinishReason, VersionSpan
from megatron_dppo.types.token_columns import response_from_tensors

_EXIT_SECONDS = 5.0
_LATE_SECONDS = 60.0
"""A process that says nothing for so much longer than the deadline of the request hangs itself."""


@dataclass(frozen=True, kw_only=True)
class AnswerSettings:
    """What the processes have to know of the servers."""

    engine: Literal["sglang", "vllm"]
    urls: Sequence[str]
    api_key: str | None
    deadlines: Deadlines
    contract: Contract
    adapter: bool = False
    """see the clients"""


class _Process:
    """One process and the requests that it has. Belongs to an event loop."""

    def __init__(self, settings: AnswerSettings) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            # Nothing of it computes with several threads, and it draws no numbers.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "megatron_dppo.engines.answer_process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            )
        self._socket, self._settings = ours, settings
        self._frames = Frames(self._received, self._lost)
        self._numbers = itertools.count()
        self.waiting: dict[int, asyncio.Future[Generation]] = {}
        self.is_connected = self.has_ended = False

    async def connect(self) -> None:
        """To be called once, before all others."""
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: self._frames, sock=self._socket)
        self.is_connected = True
        # The key goes this way: other users of the machine see command lines.
        settings = asdict(replace(self._settings, urls=list(self._settings.urls)))
        self._frames.send({"settings": settings}, {})

    async def ask(self, server: int, request: GenerateRequest) -> Generation:
        number = next(self._numbers)
        self.waiting[number] = asyncio.get_running_loop().create_future()
        self._frames.send({"id": number, "server": server, "request": _fields(request)}, {"token_ids": _ids(request)})
        if self.has_ended:
            self._lost()
        try:
            async with asyncio.timeout(self._settings.deadlines.generate + _LATE_SECONDS):
                return await self.waiting[number]
        except TimeoutError:
            raise ResponseLost(self._settings.urls[server], "the process that reads its answers hangs") from None
        except asyncio.CancelledError:
            self._frames.send({"id": number, "cancel": True}, {})
            raise
        finally:
            del self.waiting[number]

    async def close(self) -> None:
        """End the process."""
        if self.is_connected:
            self._frames.close()
        else:
            self._socket.close()
        try:
            await asyncio.to_thread(self._process.wait, _EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _received(self, message: dict[str, Any], columns: dict[str, Tensor]) -> None:
        future = self.waiting.get(message["id"])
        if future is None or future.done():
            return
        if (failure := message.get("error")) is not None:
            future.set_exception(_error(**failure))
            return
        reason, versions = FinishReason(message["finish_reason"]), tuple(VersionSpan(*v) for v in message["versions"])
        future.set_result(Generation(finish_reason=reason, versions=versions, **response_from_tensors(columns)))

    def _lost(self) -> None:
        self.has_ended = True
        for future in self.waiting.values():
            if not future.done():
                code = self._process.poll()
                how = "is gone" if code is None else f"ended with exit code {code}"
                future.set_exception(
                    ResponseLost(", ".join(self._settings.urls), f"the process that reads the answers {how}")
                )


class AnswerProcesses:
    """Asks servers through processes of its own. Belongs to the event loop that first uses it.

    A process that ends, as when the machine has no memory left, is started again; what it had is asked for again.

    Args:
        count: of processes, at least one.
        settings: of the servers.
    """

    def __init__(self, count: int, settings: AnswerSettings) -> None:
        self._settings = settings
        self._places = {url: i for i, url in enumerate(settings.urls)}
        self._processes = [_Process(settings) for _ in range(count)]  # they import while the first weights are sent
        self._starting = asyncio.Lock()

    async def ask(self, server: InferenceServer, request: GenerateRequest) -> Generation:
        """What ``server.generate`` gives, checked.

        Raises:
            ServerError: as ``generate``; ``ContractViolation`` where the answer breaks the contract.
            ResponseLost: the process ended.
        """
        await self._start()
        process = min(self._processes, key=lambda p: len(p.waiting))
        return await process.ask(self._places[server.url], request)

    async def close(self) -> None:
        """End the processes."""
        await asyncio.gather(*(process.close() for process in self._processes))

    async def _start(self) -> None:
        if all(p.is_connected and not p.has_ended for p in self._processes):
            return
        async with self._starting:
            for i, process in enumerate(self._processes):
                if process.has_ended:
                    await process.close()
                    process = self._processes[i] = _Process(self._settings)
                if not process.is_connected:
                    await process.connect()


def _ids(request: GenerateRequest) -> Tensor:
    return torch.tensor(request.token_ids, dtype=torch.int32)


def _fields(request: GenerateRequest) -> dict[str, Any]:
    routing = request.routing
    return {
        "request_id": request.request_id,
        "params": vars(request.params),
        "stop_token_ids": request.stop_token_ids,
        "routing": None if routing is None else {**vars(routing), "dense_layers": sorted(routing.dense_layers)},
        "routing_start": request.routing_start,
    }


def _error(kind: str, text: str, fields: dict[str, Any]) -> Exception:
    """The error that the process met; what is not one of ours is a bug there, told with its traceback."""
    cls = getattr(errors, kind, RuntimeError)
    error: Exception = cls.__new__(cls)
    Exception.__init__(error, text)
    vars(error).update(fields)
    return error
