"""HTTP endpoint of the Tinker API: routes, key, limits, and errors in the shape that the SDK reads.

Everything before a valid key is limited by ``LimitedServer``. A body is read in full, up to its limit, only after the
key. Long requests are polled: ``retrieve_future`` answers when the result is there, or after some seconds with 408, on
which the SDK asks again.
"""

import asyncio
import hmac
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from megatron_dppo.engines.responder import LoopThread
from megatron_dppo.errors import UserError
from megatron_dppo_agents.limited_server import LimitedServer, digest_key
from megatron_dppo_conversations.formats.json_values import inflate, parse_json
from megatron_dppo_tinker import bodies
from megatron_dppo_tinker.bodies import read_body
from megatron_dppo_tinker.errors import RequestError
from megatron_dppo_tinker.futures import Request
from megatron_dppo_tinker.service import Service
from megatron_dppo_tinker.wire import read_forward_backward

_POLL_SECONDS = 20.0
"""Time for which ``retrieve_future`` waits for a result. The SDK waits 45 seconds."""
_TRANSFER_SECONDS = 60.0
"""Time in which a body must arrive."""
_PROTOBUF = "application/x-protobuf"
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class TinkerServer:
    """HTTP server in its own thread, until ``close``. Port 0 takes a free one.

    Every request must carry the key. An address that cannot be used raises ``OSError``.
    """

    def __init__(self, service: Service, key: str, host: str, port: int, max_body_bytes: int) -> None:
        self._service = service
        # A digest, so that the time of the comparison tells nothing about the key, and no traceback shows it.
        self._key = digest_key(key)
        self._max_body_bytes = max_body_bytes
        self._thread = LoopThread("tinker")
        try:
            self._server = self._thread.run(self._start(host, port))
        except BaseException:
            self._thread.close()
            raise

    @property
    def url(self) -> str:
        """Value of ``TINKER_BASE_URL``."""
        return self._server.url

    def announce(self, request: Request) -> None:
        """Wake those who wait for a request; called by the thread of the model."""
        self._loop.call_soon_threadsafe(request.done.set)

    def close(self) -> None:
        """Stop listening."""
        self._thread.run(self._server.stop())
        self._thread.close()

    async def _start(self, host: str, port: int) -> LimitedServer:
        self._loop = asyncio.get_running_loop()
        app = web.Application(client_max_size=self._max_body_bytes, middlewares=[self._authorized, _errors_as_json])
        service = self._service
        answered_by: dict[str, tuple[type[bodies.Body], Callable[[Any], dict[str, Any]]]] = {
            "create_session": (bodies.CreateSession, service.create_session),
            "session_heartbeat": (bodies.SessionRequest, service.heartbeat),
            "create_model": (bodies.CreateModel, service.submit_create_model),
            "get_info": (bodies.ModelRequest, service.info),
            "load_weights": (bodies.LoadWeights, service.submit_load),
            "optim_step": (bodies.OptimStep, service.submit_optim_step),
            "save_weights": (bodies.SaveWeights, service.submit_save),
            "save_weights_for_sampler": (bodies.SaveForSampler, service.submit_save_for_sampler),
            "create_sampling_session": (bodies.CreateSampler, service.create_sampler),
            "asample": (bodies.Sample, service.submit_sample),
            "weights_info": (bodies.WeightsInfo, service.weights_info),
        }
        flags = {
            "pjwt_auth_enabled": False,
            "proto_compress_fwdbwd": False,
            # One part after another, in the order of their numbers, each within the limit of a body.
            "parallel_fwdbwd_chunks": False,
            "fwdbwd_max_chunk_bytes_count": self._max_body_bytes // 4,
            "use_pyqwest_transport": False,
            # A sampler serves one batch after another: a late one is not stuck.
            "sample_enable_stuck_detection": False,
        }
        routes = [web.post(f"/api/v1/{name}", self._json_handler(*each)) for name, each in answered_by.items()]
        routes += [
            web.post("/api/v1/forward_backward", self._forward_backward),
            web.post("/api/v1/retrieve_future", self._retrieve),
            web.post("/api/v1/client/config", _constant(flags)),
            web.post("/api/v1/client/dynamic_config", _constant({"sample_cancel_enabled": False})),
            web.post("/api/v1/telemetry", _constant({"status": "accepted"})),
            web.post("/api/v1/sessions/{name}/finish", self._finish),
            web.get("/api/v1/healthz", _constant({"status": "ok"})),
            web.get("/api/v1/get_server_capabilities", _constant(service.capabilities())),
            web.get("/api/v1/samplers/{name}", self._sampler),
        ]
        app.add_routes(routes)
        server = LimitedServer(app, host, port, error_body=lambda message: {"detail": message})
        await server.start()
        return server

    def _json_handler(self, kind: type[bodies.Body], answer: Callable[[Any], dict[str, Any]]) -> _Handler:
        """Return the handler of a request whose answer takes no time."""

        async def handle(request: web.Request) -> web.StreamResponse:
            return web.json_response(answer(read_body(kind, await self._read_json(request))))

        return handle

    async def _forward_backward(self, request: web.Request) -> web.StreamResponse:
        if request.content_type != _PROTOBUF:
            raise RequestError(f"Content-Type {request.content_type!r:.80}, expected {_PROTOBUF}", 415)
        body = await self._read(request)
        # A large batch takes long to read: other requests go on meanwhile.
        parsed = await asyncio.get_running_loop().run_in_executor(None, read_forward_backward, body)
        return web.json_response(self._service.submit_forward_backward(parsed, len(body)))

    async def _retrieve(self, request: web.Request) -> web.StreamResponse:
        body = read_body(bodies.RetrieveFuture, await self._read_json(request))
        waiting = self._service.queue.get(body.request_id)
        try:
            await asyncio.wait_for(waiting.done.wait(), _POLL_SECONDS)
        except TimeoutError:
            return web.json_response({"request_id": body.request_id, "queue_state": "active"}, status=408)
        result = waiting.result
        waiting.is_fetched = True
        if isinstance(result, bytes):
            return web.Response(body=result, content_type=_PROTOBUF)
        return web.json_response(result)

    async def _finish(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(self._service.finish_session(request.match_info["name"]))

    async def _sampler(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(self._service.sampler_info(request.match_info["name"]))

    async def _read_json(self, request: web.Request) -> object:
        content = await self._read(request)
        try:
            return parse_json(content or b"{}")
        except ValueError as error:
            raise RequestError(f"the body is no JSON: {error!s:.200}") from error

    async def _read(self, request: web.Request) -> bytes:
        try:
            async with asyncio.timeout(_TRANSFER_SECONDS):
                content = await request.read()
        except TimeoutError as error:
            raise RequestError(f"the body did not arrive within {_TRANSFER_SECONDS:g} seconds", 400) from error
        try:
            return inflate(content, request.headers.get("Content-Encoding", ""), self._max_body_bytes)
        except OverflowError as error:
            raise RequestError(f"{error} (--max-body-mb)", 413) from error
        except ValueError as error:
            raise RequestError(str(error)) from error

    @web.middleware
    async def _authorized(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Refuse a request without the key before its body is read."""
        if not hmac.compare_digest(digest_key(request.headers.get("X-API-Key", "")), self._key):
            return _error_response("the API key (TINKER_API_KEY) is not that of this server", 401)
        with self._server.connections.processing(request, self):
            return await handler(request)


def _constant(values: dict[str, Any]) -> _Handler:
    """Return a handler that drops the body and always gives the same answer."""

    async def handle(request: web.Request) -> web.StreamResponse:
        await request.read()
        return web.json_response(values)

    return handle


@web.middleware
async def _errors_as_json(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except RequestError as error:
        return _error_response(str(error), error.status)
    except UserError as error:
        return _error_response(str(error), 400)
    except web.HTTPException as error:
        reason = "is not served (packages/tinker/README.md)" if error.status == 404 else error.text or error.reason
        return _error_response(f"{request.method} {request.path}: {reason}", error.status)
    except ConnectionError:
        # The client has closed the connection, so no error can be sent.
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error!s:.200}"
        print(f"warning  tinker: {request.method} {request.path!r:.80} failed: {reason}", file=sys.stderr, flush=True)
        return _error_response(f"the server failed: {reason}", 500)


def _error_response(message: str, status: int) -> web.Response:
    return web.json_response({"detail": message}, status=status)
