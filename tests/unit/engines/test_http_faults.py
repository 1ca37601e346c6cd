"""What stands between trainer and server: overload, junk, silence."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import time
from email.utils import formatdate
from typing import Any

import pytest
from aiohttp import web

from megatron_dppo.engines.servers.http import Deadlines, HttpClient
from megatron_dppo.engines.sglang import SGLangServer
from megatron_dppo.engines.vllm import VLLMServer
from megatron_dppo.errors import ServerError
from megatron_dppo.rollout.server import GenerateRequest
from megatron_dppo.types import SamplingParams
from tests.unit.http_stub import Call, Stub, with_stub

REQUEST = GenerateRequest(request_id="r", token_ids=(5, 6), params=SamplingParams(max_new_tokens=3))


def refusing(code: int, times: int, wait: str | None = None) -> tuple[Any, list[float]]:
    """A handler that says no some times, and the times at which it was asked."""
    asked: list[float] = []

    async def handle(call: Call) -> Any:
        asked.append(time.monotonic())
        if len(asked) > times:
            return {"good": True}
        headers = {} if wait is None else {"Retry-After": wait}
        return web.json_response({"detail": "later"}, status=code, headers=headers)

    return handle, asked


def use(handle: Any, *, repeat: bool, timeout: float = 5.0) -> Any:
    async def run() -> Any:
        async def serve(request: web.Request) -> Any:
            answer = await handle(Call(request.path, None, {}))
            return answer if isinstance(answer, web.Response) else web.json_response(answer)

        app = web.Application()
        app.router.add_post("/x", serve)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, shutdown_timeout=0.1)
        await site.start()
        client = HttpClient(f"http://127.0.0.1:{runner.addresses[0][1]}")
        try:
            return await client.post("/x", timeout=timeout, repeat=repeat)
        finally:
            await client.close()
            await runner.cleanup()

    return asyncio.run(run())


@pytest.mark.parametrize("code", [408, 425, 429])
def test_a_call_that_may_run_twice_is_repeated_when_the_server_says_later(code: int) -> None:
    handle, asked = refusing(code, times=2)
    assert use(handle, repeat=True) == {"good": True} and len(asked) == 3
    handle, asked = refusing(code, times=2)
    with pytest.raises(ServerError, match=f"HTTP {code}: later") as caught:
        use(handle, repeat=False)
    assert len(asked) == 1 and caught.value.is_transient and caught.value.retry_after is None


def test_the_servers_own_wish_is_waited_for_within_the_deadline() -> None:
    handle, asked = refusing(429, times=1, wait="1")
    assert use(handle, repeat=True) == {"good": True} and asked[1] - asked[0] >= 1
    handle, asked = refusing(429, times=1, wait="100")
    with pytest.raises(ServerError) as caught:
        use(handle, repeat=True)
    assert caught.value.retry_after == 100 and len(asked) == 1
    handle, asked = refusing(503, times=1, wait=formatdate(time.time() + 60, usegmt=True))
    with pytest.raises(ServerError) as caught:
        use(handle, repeat=True)
    assert 50 < (caught.value.retry_after or 0) <= 60
    for junk in ("soon", "nan", "-5", "1e999", ""):
        handle, asked = refusing(503, times=1, wait=junk)
        with pytest.raises(ServerError) as caught:
            use(handle, repeat=True)
        assert caught.value.retry_after in (None, 0.0)


_OK = b"HTTP/1.1 200 OK\r\n"
RAW = (
    b"",
    b"\x00\xff" * 100,
    b"junk\r\n\r\n",
    b"HTTP/1.1\r\n\r\n",
    b"HTTP/1.1 99999 what\r\n\r\n",
    b"HTTP/9.9 200 OK\r\n\r\n",
    _OK,
    _OK + b"Content-Length: -5\r\n\r\n{}",
    _OK + b"Content-Length: 100\r\n\r\n{",
    _OK + b"Content-Length: " + b"9" * 400 + b"\r\n\r\n{}",
    _OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}",
    _OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n",
    _OK + b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\njunk",
    _OK + b"Content-Encoding: gzip\r\nContent-Length: 10\r\n\r\n" + gzip.compress(b"{}")[:10],
    _OK + b"X" * 100_000 + b"\r\n\r\n",
    *(
        _OK + b"Content-Length: %d\r\n\r\n" % len(body) + body
        for body in (
            b"<html>502 Bad Gateway</html>",
            b"\xff\xfe\x00",
            b"[" * 100_000,
            b'{"meta_info": ' * 3000,
            b'{"output_ids": [1',
            b'{"output_ids": ' + b"9" * 10_000 + b"}",
            b"null",
            b"0",
            b'"text"',
            b"[]",
            b"{}",
            b'{"choices": [{}]}',
            b'{"output_ids": [], "meta_info": {}}',
        )
    ),
)


@pytest.mark.parametrize("kind", [SGLangServer, VLLMServer])
def test_any_bytes_for_an_answer_are_an_error_of_the_server(kind: Any) -> None:
    async def run() -> None:
        raw = b""

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                head = await reader.readuntil(b"\r\n\r\n")
                if b"/server_info" in head:
                    writer.write(_OK + b'Content-Length: 21\r\n\r\n{"version": "0.5.23"}')
                else:
                    writer.write(raw)
                await writer.drain()
            writer.close()

        listener = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1 << 20)
        server = kind(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
        for raw in RAW:
            with pytest.raises(ServerError) as caught:
                await asyncio.wait_for(server.generate(REQUEST), 10)
            assert server.url in str(caught.value) and len(str(caught.value)) < 3000, raw[:80]
            assert caught.value.status is None or caught.value.is_transient, "no request is to blame"
        await server.close()
        listener.close()

    asyncio.run(run())


@pytest.mark.parametrize("kind", [SGLangServer, VLLMServer])
def test_a_silent_server_costs_its_deadline_once_and_little_from_then_on(kind: Any) -> None:
    frozen = True
    path = {SGLangServer: "/model_info", VLLMServer: "/version"}[kind]

    async def answer(call: Call) -> Any:
        while frozen:
            await asyncio.sleep(0.01)
        return {"version": "0.5.23"}

    async def run(url: str) -> None:
        nonlocal frozen
        server = kind(url, deadlines=Deadlines(alive=1.5, silent=0.2))
        for least, most in ((1.5, 5.0), (0.2, 1.4), (0.2, 1.4)):
            start = time.monotonic()
            assert not await server.alive()
            assert least <= time.monotonic() - start < most
        start = time.monotonic()
        with pytest.raises(ServerError, match=rf"{path}: no response within 0\.2 seconds"):
            await server.info()
        assert time.monotonic() - start < 1.4
        frozen = False
        assert await server.alive()
        frozen, start = True, time.monotonic()
        assert not await server.alive()
        assert time.monotonic() - start >= 1.5, "it was awake meanwhile"
        await server.close()

    with_stub(Stub({path: answer}), run)


def test_a_refusal_is_an_answer_too() -> None:
    """A server that says 503 is not silent: the next call gets the whole deadline."""

    async def run(url: str) -> None:
        server = SGLangServer(url, deadlines=Deadlines(alive=1.0, silent=0.01))
        assert not await server.alive()
        assert not server._admin._is_silent
        await server.close()

    with_stub(Stub({"/model_info": (503, {})}), run)
