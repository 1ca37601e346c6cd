"""Processes that send requests to servers in place of the trainer: see ``client_process``."""

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
from megatron_dppo.errors import ResponseLost
from megatron_dppo.types import FinishReason, VersionSpan
from megatron_dppo.types.token_columns import response_from_tensors
from megatron_dppo_engines.sampling_sums import RankSums
from megatron_dppo_engines.server import GenerateRequest, Generation, InferenceServer
from megatron_dppo_engines.servers.contract import Contract
from megatron_dppo_engines.servers.frames import Frames
from megatron_dppo_engines.servers.http import Deadlines

EXIT_SECONDS = 5.0
"""Time that a process gets to exit before it is killed."""
_OVERDUE_SECONDS = 60.0
"""Time beyond the deadline of a request after which the process itself counts as hanging."""


@dataclass(frozen=True, kw_only=True)
class ClientProcessSettings:
    """Settings of the clients in the processes."""

    engine: Literal["sglang", "vllm"]
    urls: Sequence[str]
    api_key: str | None
    deadlines: Deadlines
    contract: Contract
    adapter: bool = False
    """True if requests are for the run's LoRA adapter; see the clients."""


class _Process:
    """One process and its requests. Belongs to an event loop."""

    def __init__(self, settings: ClientProcessSettings) -> None:
        trainer_end, process_end = socket.socketpair()
        # The child has its own copy. Ours is closed, so that the end of the child ends the connection.
        with process_end:
            # The process computes nothing with several threads and uses no GPU.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "megatron_dppo.engines.client_process", str(process_end.fileno())],
                pass_fds=[process_end.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            )
        self._socket = trainer_end
        self._settings = settings
        self._frames = Frames(self._on_message, self._on_close)
        self._numbers = itertools.count()
        self.pending: dict[int, asyncio.Future[Generation]] = {}
        self.is_connected = False
        self.has_exited = False

    async def connect(self) -> None:
        """Connect to the process; call it once, before any other method."""
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: self._frames, sock=self._socket)
        self.is_connected = True
        # The API key goes through the socket: other users of the machine can read command lines.
        settings = asdict(replace(self._settings, urls=list(self._settings.urls)))
        self._frames.send({"settings": settings}, {})

    async def generate(self, server: int, request: GenerateRequest) -> Generation:
        """Send a request to the server with an index, and return its checked response."""
        number = next(self._numbers)
        self.pending[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "server": server, "request": request_to_json(request)}
        self._frames.send(message, {"token_ids": torch.tensor(request.token_ids, dtype=torch.int32)})
        # It may have exited before this request was pending, and then nothing else would end the wait.
        if self.has_exited:
            self._on_close()
        try:
            async with asyncio.timeout(self._settings.deadlines.generate + _OVERDUE_SECONDS):
                return await self.pending[number]
        except TimeoutError:
            detail = "the process that reads the server's responses hangs"
            raise ResponseLost(self._settings.urls[server], detail) from None
        except asyncio.CancelledError:
            self._frames.send({"id": number, "cancel": True}, {})
            raise
        finally:
            del self.pending[number]

    async def close(self) -> None:
        """End the process; kill it if it does not exit in time."""
        if self.is_connected:
            self._frames.close()
        else:
            self._socket.close()
        try:
            # The closed connection makes the process exit.
            await asyncio.to_thread(self._process.wait, EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _on_message(self, message: dict[str, Any], columns: dict[str, Tensor]) -> None:
        future = self.pending.get(message["id"])
        if future is None or future.done():  # the caller was cancelled meanwhile
            return
        if (failure := message.get("error")) is not None:
            future.set_exception(_rebuild_error(**failure))
            return
        fields: dict[str, Any] = response_from_tensors(columns)
        generation = Generation(
            finish_reason=FinishReason(message["finish_reason"]),
            versions=tuple(VersionSpan(*span) for span in message["versions"]),
            ranks=RankSums(**message["ranks"]),
            **fields,
        )
        future.set_result(generation)

    def _on_close(self) -> None:
        self.has_exited = True
        for future in self.pending.values():
            if not future.done():
                code = self._process.poll()
                state = "closed its connection" if code is None else f"ended with exit code {code}"
                detail = f"the process that reads the servers' responses {state}"
                future.set_exception(ResponseLost(", ".join(self._settings.urls), detail))


class ClientProcesses:
    """Clients of the servers in separate processes. Belongs to the event loop that first uses it.

    A process that exits (out of memory) is started again; the pool sends its lost requests (``ResponseLost``) again.
    """

    def __init__(self, count: int, settings: ClientProcessSettings) -> None:
        self._settings = settings
        self._server_indices = {url: i for i, url in enumerate(settings.urls)}
        # They import their modules while the first weights are sent.
        self.processes = [_Process(settings) for _ in range(count)]
        self._start_lock = asyncio.Lock()

    async def generate(self, server: InferenceServer, request: GenerateRequest) -> Generation:
        """Return the checked result of ``server.generate``."""
        await self._start()
        process = min(self.processes, key=lambda p: len(p.pending))
        return await process.generate(self._server_indices[server.url], request)

    async def close(self) -> None:
        """End the processes."""
        await asyncio.gather(*(process.close() for process in self.processes))

    async def _start(self) -> None:
        """Connect to new processes and replace those that have exited."""
        if all(p.is_connected and not p.has_exited for p in self.processes):
            return
        async with self._start_lock:
            # Checked again: another request may have replaced it while this one waited for the lock.
            for i, process in enumerate(self.processes):
                if process.has_exited:
                    await process.close()
                    process = self.processes[i] = _Process(self._settings)
                if not process.is_connected:
                    await process.connect()


def request_to_json(request: GenerateRequest) -> dict[str, Any]:
    """Return all fields but the token ids, which are sent as a column."""
    routing = request.routing
    return {
        "request_id": request.request_id,
        "params": vars(request.params),
        "stop_token_ids": request.stop_token_ids,
        "routing": None if routing is None else {**vars(routing), "dense_layers": sorted(routing.dense_layers)},
        "routing_start": request.routing_start,
    }


def _rebuild_error(kind: str, text: str, fields: dict[str, Any]) -> Exception:
    """Return the error of the process. A class outside ``errors`` is a bug there; its text holds the traceback."""
    cls = getattr(errors, kind, RuntimeError)
    error: Exception = cls.__new__(cls)
    # Not cls(...): the constructors of our errors take other arguments than the finished text.
    Exception.__init__(error, text)
    vars(error).update(fields)
    return error
