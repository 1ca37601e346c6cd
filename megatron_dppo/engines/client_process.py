"""A process that sends requests to servers, decodes the responses and checks them, so that the trainer need not.

A response is several times as large as its content, and takes longer to decode than to pass on: see
``benchmarks/data_plane.py``. Requests come from ``client_processes.ClientProcesses``, and the responses go back to it
as columns. Control calls stay with the trainer. Started as ``python -m megatron_dppo.engines.client_process
DESCRIPTOR``; it exits when the other end of that connection closes.
"""

import asyncio
import signal
import socket
import sys
import traceback
from typing import Any

from torch import Tensor

from megatron_dppo.errors import UserError
from megatron_dppo.types import RoutingShape, SamplingParams
from megatron_dppo.types.token_columns import response_to_tensors
from megatron_dppo_engines.server import GenerateRequest, InferenceServer
from megatron_dppo_engines.servers.contract import Contract, checked
from megatron_dppo_engines.servers.frames import Frames
from megatron_dppo_engines.servers.http import Deadlines
from megatron_dppo_engines.sglang import SGLangServer
from megatron_dppo_engines.vllm import VLLMServer

_CLIENTS: dict[str, type[SGLangServer] | type[VLLMServer]] = {"sglang": SGLangServer, "vllm": VLLMServer}


class _RequestHandler:
    """The handler of the trainer's messages."""

    def __init__(self, closed: asyncio.Event) -> None:
        self.frames = Frames(self._on_message, closed.set)
        self._servers: list[InferenceServer] = []
        self._running: dict[int, asyncio.Task[None]] = {}

    async def close(self) -> None:
        """Cancel all requests and close the connections."""
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        for server in self._servers:
            await server.close()

    def _on_message(self, message: dict[str, Any], columns: dict[str, Tensor]) -> None:
        if (settings := message.get("settings")) is not None:
            self._configure(settings)
        elif message.get("cancel"):
            if (task := self._running.get(message["id"])) is not None:
                task.cancel()
        else:
            number: int = message["id"]
            task = asyncio.create_task(self._respond(number, message, tuple(columns["token_ids"].tolist())))
            # The event loop holds its tasks weakly, so a reference is kept.
            self._running[number] = task
            task.add_done_callback(lambda _: self._running.pop(number))

    def _configure(self, settings: dict[str, Any]) -> None:
        """Create the clients; the settings are those of ``ClientProcessSettings``."""
        client = _CLIENTS[settings["engine"]]
        deadlines = Deadlines(**settings["deadlines"])
        self._servers = [
            client(url, api_key=settings["api_key"], deadlines=deadlines, adapter=settings["adapter"])
            for url in settings["urls"]
        ]
        contract = settings["contract"]
        tokens = {name: tuple(contract[name]) for name in ("end_tokens", "special_tokens")}
        self._generate = checked(Contract(**{**contract, **tokens}))

    async def _respond(self, number: int, message: dict[str, Any], token_ids: tuple[int, ...]) -> None:
        """Run one request and send its generation or its error to the trainer."""
        try:
            server = self._servers[message["server"]]
            generation = await self._generate(server, request_from_json(message["request"], token_ids))
        except UserError as error:
            # The trainer rebuilds the error from its class name and fields: no pickle.
            failure = {"kind": type(error).__name__, "text": str(error), "fields": vars(error)}
            self.frames.send({"id": number, "error": failure}, {})
        except Exception:
            failure = {"kind": "RuntimeError", "text": traceback.format_exc(), "fields": {}}
            self.frames.send({"id": number, "error": failure}, {})
        else:
            response = {
                "id": number,
                "finish_reason": str(generation.finish_reason),
                "versions": [list(span) for span in generation.versions],
                "ranks": vars(generation.ranks),
            }
            self.frames.send(response, response_to_tensors(generation))


def request_from_json(fields: dict[str, Any], token_ids: tuple[int, ...]) -> GenerateRequest:
    """Return the request of a message; its token ids arrive as a column."""
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


async def _serve(descriptor: int) -> None:
    closed = asyncio.Event()
    handler = _RequestHandler(closed)
    loop = asyncio.get_running_loop()
    await loop.create_unix_connection(lambda: handler.frames, sock=socket.socket(fileno=descriptor))
    await closed.wait()
    await handler.close()


def main() -> None:
    """Serve until the connection ends."""
    # These signals go to the whole process group, but the trainer may have work to finish.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    asyncio.run(_serve(int(sys.argv[1])))


if __name__ == "__main__":
    main()
