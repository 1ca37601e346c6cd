"""A process that asks servers, decodes their answers and checks them, so that the trainer's own process need not.

An answer is several times as large as what it says, and takes longer to decode than to send on: see
``benchmarks/data_plane.py``. Requests come from ``answers.AnswerProcesses`` and go back to it as columns; control calls
stay with the trainer. Started as ``python -m megatron_dppo.engines.answer_process DESCRIPTOR``; it ends when the other
end of that connection does.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import traceback
from typing import Any

from torch import Tensor

from megatron_dppo.engines.servers.contract import Contract, checked
from megatron_dppo.engines.servers.frames import Frames
from megatron_dppo.engines.servers.http import Deadlines
from megatron_dppo.engines.sglang import SGLangServer
from megatron_dppo.engines.vllm import VLLMServer
from megatron_dppo.errors import UserError
from megatron_dppo.rollout.server import GenerateRequest, Generation, InferenceServer
from megatron_dppo.types import RoutingShape, SamplingParams
from megatron_dppo.types.token_columns import response_to_tensors

_CLIENTS: dict[str, Any] = {"sglang": SGLangServer, "vllm": VLLMServer}


class _Process:
    """The work of the process.

    Args:
        ended: set when there is nothing more to do.
    """

    def __init__(self, ended: asyncio.Event) -> None:
        self.frames = Frames(self._received, ended.set)
        self._servers: list[InferenceServer] = []
        self._running: dict[int, asyncio.Task[None]] = {}

    async def close(self) -> None:
        """Drop what runs."""
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        for server in self._servers:
            await server.close()

    def _received(self, message: dict[str, Any], columns: dict[str, Tensor]) -> None:
        if (settings := message.get("settings")) is not None:
            self._begin(settings)
        elif message.get("cancel"):
            if (task := self._running.get(message["id"])) is not None:
                task.cancel()
        else:
            number: int = message["id"]
            task = asyncio.create_task(self._answer(number, message, tuple(columns["token_ids"].tolist())))
            self._running[number] = task
            task.add_done_callback(lambda _: self._running.pop(number))

    def _begin(self, settings: dict[str, Any]) -> None:
        client, deadlines = _CLIENTS[settings["engine"]], Deadlines(**settings["deadlines"])
        common = {"api_key": settings["api_key"], "deadlines": deadlines, "adapter": settings["adapter"]}
        self._servers = [client(url, **common) for url in settings["urls"]]
        contract = settings["contract"]
        self._ask = checked(Contract(**{**contract, "end_tokens": tuple(contract["end_tokens"])}))

    async def _answer(self, number: int, message: dict[str, Any], token_ids: tuple[int, ...]) -> None:
        try:
            generation = await self._ask(self._servers[message["server"]], _request(message["request"], token_ids))
        except UserError as error:
            failure = {"kind": type(error).__name__, "text": str(error), "fields": vars(error)}
            self.frames.send({"id": number, "error": failure}, {})
        except Exception:
            failure = {"kind": "RuntimeError", "text": traceback.format_exc(), "fields": {}}
            self.frames.send({"id": number, "error": failure}, {})
        else:
            self.frames.send({"id": number, **_head(generation)}, response_to_tensors(generation))


def _request(fields: dict[str, Any], token_ids: tuple[int, ...]) -> GenerateRequest:
    routing = fields["routing"]
    if routing is not None:
        routing = RoutingShape(**{**routing, "dense_layers": frozenset(routing["dense_layers"])})
    return GenerateRequest(
        request_id=fields["request_id"],
        token_ids=token_ids,
        params=SamplingParams(**fields["params"]),
        stop_token_ids=tuple(fields["stop_token_ids"]),
        routing=routing,
        routing_start=fields["routing_start"],
    )


def _head(generation: Generation) -> dict[str, Any]:
    return {"finish_reason": str(generation.finish_reason), "versions": [list(span) for span in generation.versions]}


async def _serve(descriptor: int) -> None:
    ended = asyncio.Event()
    process = _Process(ended)
    loop = asyncio.get_running_loop()
    await loop.create_unix_connection(lambda: process.frames, sock=socket.socket(fileno=descriptor))
    await ended.wait()
    await process.close()


def main() -> None:
    """Serve until the connection ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # they are for the trainer, which may have things to finish
    asyncio.run(_serve(int(sys.argv[1])))


if __name__ == "__main__":
    main()
