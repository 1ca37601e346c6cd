"""Faults between trainer and server: overload, junk, silence."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import itertools
import json
import time
import tracemalloc
import zlib
from collections.abc import Iterator
from email.utils import formatdate
from typing import Any

import pytest
from aiohttp import web

from http_stub import Call, Stub, with_stub
from megatron_dppo_engines.errors import ServerError
from megatron_dppo_engines.responses import SamplingParams
from megatron_dppo_engines.routes import RoutingShape
from megatron_dppo_engines.server import GenerateRequest
from megatron_dppo_engines.servers.http import Deadlines, HttpClient
from megatron_dppo_engines.servers.wire import max_response_bytes
from megatron_dppo_engines.sglang import SGLangServer
from megatron_dppo_engines.vllm import VLLMServer

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
        with pytest.raises(ServerError, match=rf"{path}: no response within 0\.2"):
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
        assert not server._admin._is_silent  # reaches: the deadline of a next call would take a second to see
        await server.close()

    with_stub(Stub({"/model_info": (503, {})}), run)


def _chunked(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def _call_raw(head: bytes, bodies: Iterator[bytes], max_bytes: int) -> tuple[Any, int, int]:
    """The result or error of one call to a server that sends ``bodies``; the bytes that it sent, and the peak here."""
    sent = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(head + b"Transfer-Encoding: chunked\r\n\r\n")
            for body in bodies:
                writer.write(_chunked(body))
                await writer.drain()
                sent += len(body)
            writer.write(b"0\r\n\r\n")
            await writer.drain()
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = HttpClient(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
    tracemalloc.start()
    try:
        result: Any = await asyncio.wait_for(client.post("/x", timeout=60, max_bytes=max_bytes), 60)
    except ServerError as error:
        result = error
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        await client.close()
        listener.close()
    return result, sent, peak


def test_a_response_is_read_up_to_its_limit_whatever_its_length_and_compression() -> None:
    limit = 100_000
    text = json.dumps("x" * (limit - 2)).encode()
    long = text[:-1] + b'x"'
    for name, compress in (("identity", bytes), ("gzip", gzip.compress), ("deflate", zlib.compress)):
        head = _OK + b"Content-Encoding: %s\r\n" % name.encode()
        result, *_ = asyncio.run(_call_raw(head, iter([compress(text)]), limit))
        assert result == "x" * (limit - 2), name
        result, *_ = asyncio.run(_call_raw(head, iter([compress(long)]), limit))
        assert isinstance(result, ServerError) and "more than 100,000 bytes" in str(result) and result.is_transient
        # Byte by byte, as a slow network brings it.
        slow = (bytes([byte]) for byte in compress(json.dumps("y" * 100).encode()))
        assert asyncio.run(_call_raw(head, slow, limit))[0] == "y" * 100
    unasked, *_ = asyncio.run(_call_raw(_OK + b"Content-Encoding: br\r\n", iter([text]), limit))
    assert isinstance(unasked, ServerError) and "without compression, got 'br'" in str(unasked)


@pytest.mark.parametrize("status", [b"200 OK", b"500 Broken"])
def test_a_response_without_end_costs_no_more_memory_than_its_limit(status: bytes) -> None:
    limit = 4 << 20
    head = b"HTTP/1.1 " + status + b"\r\n"
    bomb = gzip.compress(bytes(400 << 20), 9)
    assert len(bomb) < 1 << 20
    for extra, bodies in ((b"", itertools.repeat(bytes(1 << 16))), (b"Content-Encoding: gzip\r\n", iter([bomb]))):
        result, sent, peak = asyncio.run(_call_raw(head + extra, bodies, limit))
        assert isinstance(result, ServerError)
        assert ("more than 4,194,304 bytes" in str(result)) == (status == b"200 OK")
        assert sent < 64 << 20 and peak < 40 << 20


@pytest.mark.parametrize("kind", [SGLangServer, VLLMServer])
def test_a_generation_is_limited_by_what_was_asked_for(kind: Any) -> None:
    """The largest honest answers fit; one of a few tokens that never ends is left after some MiB."""
    params = SamplingParams(max_new_tokens=500, topk_logprobs=20, routed_experts=True)
    routing = RoutingShape(num_layers=48, num_experts=512, topk=10)
    asked = GenerateRequest(request_id="r", token_ids=tuple(range(100_000, 100_300)), params=params, routing=routing)
    entry = [-12.345678901234567, 151_935, "\u0645" * 20]
    answer = {
        "text": "\u0645" * 20 * 500,
        "output_ids": [151_935] * 500,
        "prompt_token_ids": list(asked.token_ids),
        "output_token_logprobs": [entry] * 500,
        "output_top_logprobs": [[entry] * 21] * 500,
        "routed_experts": "A" * (4 * 800 * 48 * 10 * 4 // 3),
    }
    assert len(json.dumps(answer)) < max_response_bytes(asked) < 64 << 20
    sent = 0

    async def run() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal sent
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                head = await reader.readuntil(b"\r\n\r\n")
                if b"/server_info" in head:
                    writer.write(_OK + b'Content-Length: 21\r\n\r\n{"version": "0.5.23"}')
                    await writer.drain()
                else:
                    writer.write(_OK + b"Transfer-Encoding: chunked\r\n\r\n")
                    while True:
                        writer.write(_chunked(b" " * (1 << 16)))
                        await writer.drain()
                        sent += 1 << 16
            writer.close()

        listener = await asyncio.start_server(serve, "127.0.0.1", 0)
        server = kind(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
        with pytest.raises(ServerError, match="call can need"):
            await asyncio.wait_for(server.generate(REQUEST), 30)
        await server.close()
        listener.close()

    asyncio.run(run())
    assert sent < 32 << 20
