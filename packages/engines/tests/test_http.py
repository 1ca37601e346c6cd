from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from aiohttp import web

from http_stub import Call, Stub, with_stub
from megatron_dppo_engines.errors import ConfigError, ServerError
from megatron_dppo_engines.servers.http import HttpClient

KEY = "sk-not-to-be-seen"


def post(stub: Stub, path: str, **options: Any) -> Any:
    async def use(url: str) -> Any:
        client = HttpClient(url, api_key=KEY)
        try:
            return await client.post(path, {"a": 1}, **{"timeout": 5.0, **options})
        finally:
            await client.close()

    return with_stub(stub, use)


def test_json_text_and_empty_responses_are_returned_and_the_key_is_sent() -> None:
    stub = Stub({"/json": {"b": [1, 2]}, "/text": "Cache flushed.", "/empty": None})
    assert post(stub, "/json") == {"b": [1, 2]}
    assert post(stub, "/text") == "Cache flushed."
    assert post(stub, "/empty") is None
    assert stub.calls[0].body == {"a": 1}
    assert stub.calls[0].headers["Authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"error": {"message": "too long", "code": 400}}, "too long"),
        ({"object": "error", "message": "bad field"}, "bad field"),
        ({"detail": "Not Found"}, "Not Found"),
        ({"detail": [{"loc": ["body"], "msg": "field required"}]}, "field required"),
        ("plain words", "plain words"),
        ({"success": False, "message": "no such folder"}, "no such folder"),
    ],
)
def test_an_http_error_has_url_status_and_the_servers_text_but_not_the_key(body: Any, said: str) -> None:
    stub = Stub({"/x": (400, body)})
    with pytest.raises(ServerError, match=said) as caught:
        post(stub, "/x")
    assert caught.value.url == stub.url + "/x" and caught.value.status == 400
    assert f"{stub.url}/x: HTTP 400: " in str(caught.value)
    assert KEY not in str(caught.value) and KEY not in repr(caught.value)
    assert not caught.value.is_transient and len(stub.calls) == 1


def test_a_call_ends_at_its_deadline() -> None:
    async def slow(call: Call) -> None:
        await asyncio.Event().wait()

    with pytest.raises(ServerError, match=r"/x: no response within 0\.3") as caught:
        post(Stub({"/x": slow}), "/x", timeout=0.3)
    assert caught.value.status is None


def test_a_redirect_is_not_followed_since_it_would_send_the_key() -> None:
    async def elsewhere(call: Call) -> Any:
        raise web.HTTPFound("/other")

    stub = Stub({"/x": elsewhere, "/other": {}})
    with pytest.raises(ServerError, match="HTTP 302"):
        post(stub, "/x")
    assert stub.paths == ["/x"]


def test_a_refused_connection_is_an_error_that_names_the_address() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}"

        async def use() -> None:
            client = HttpClient(url)
            try:
                await client.get("/info", timeout=5)
            finally:
                await client.close()

        with pytest.raises(ServerError, match="Cannot connect") as caught:
            asyncio.run(use())
        assert url in str(caught.value) and caught.value.status is None


@pytest.mark.parametrize(("repeat", "calls"), [(True, 2), (False, 1)])
def test_a_broken_connection_is_retried_only_where_a_repeat_is_safe(repeat: bool, calls: int) -> None:
    came: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.append(await reader.readuntil(b"\r\n\r\n"))
        if len(came) > 1:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
            await writer.drain()
        writer.close()

    async def run() -> Any:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        client = HttpClient(f"http://{host}:{port}")
        try:
            return await client.post("/x", timeout=5, repeat=repeat)
        finally:
            await client.close()
            server.close()

    if repeat:
        assert asyncio.run(run()) == {}
    else:
        with pytest.raises(ServerError, match="disconnected"):
            asyncio.run(run())
    assert len(came) == calls


def test_hundreds_of_calls_are_in_flight_at_once() -> None:
    arrived = 0

    async def wait(call: Call) -> dict[str, int]:
        nonlocal arrived
        arrived += 1
        while arrived < 400:  # no call is answered before all are here
            await asyncio.sleep(0.01)
        return {"n": call.body["n"]}

    async def use(url: str) -> list[Any]:
        client = HttpClient(url)
        try:
            return await asyncio.gather(*(client.post("/x", {"n": n}, timeout=60) for n in range(400)))
        finally:
            await client.close()

    assert with_stub(Stub({"/x": wait}), use) == [{"n": n} for n in range(400)]


@pytest.mark.parametrize("url", ["127.0.0.1:30000", "http://", "http://host:1/v1", "ftp://host:1"])
def test_a_url_of_another_form_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="expected http://HOST:PORT"):
        HttpClient(url)


def test_a_password_in_the_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError, match="holds a password") as caught:
        HttpClient("http://user:hunter2@host:1")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(("keep_alive", "connections"), [(True, 1), (False, 3)])
def test_a_connection_is_reused_unless_keep_alive_is_off(keep_alive: bool, connections: int) -> None:
    async def run() -> int:
        peers = set()

        async def answer(request: web.Request) -> web.Response:
            assert request.transport is not None
            peers.add(request.transport.get_extra_info("peername"))
            return web.json_response({})

        app = web.Application()
        app.router.add_get("/a", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        client = HttpClient(f"http://127.0.0.1:{runner.addresses[0][1]}", keep_alive=keep_alive)
        for _ in range(3):
            await client.get("/a", timeout=5)
        await client.close()
        await runner.cleanup()
        return len(peers)

    assert asyncio.run(run()) == connections
