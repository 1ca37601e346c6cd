"""Requests below the APIs: malformed HTTP, ``Expect: 100-continue``, and JSON that means different things."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from megatron_dppo_agents.runner import AgentTask
from test_agents import chat, user
from tests.unit.scripted import World

GET = b"GET /v1/models HTTP/1.1\r\n"
MALFORMED = {
    "no HTTP": b"hello\r\n\r\n",
    "another protocol": b"\x16\x03\x01\x02\x00\x01\r\n\r\n",
    "an unknown version": b"GET /v1/models HTTP/9.9\r\nHost: x\r\n\r\n",
    "a blank before a colon": GET + b"Host : x\r\n\r\n",
    "a NUL in a header": GET + b"Host: x\r\nA: b\x00c\r\n\r\n",
    "a header without colon": GET + b"Host: x\r\nnothing\r\n\r\n",
    "a length that is no number": b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: ten\r\n\r\n",
    "a long header": GET + b"A: " + b"x" * 9000 + b"\r\n\r\n",
}


async def exchange(task: AgentTask, *parts: bytes) -> list[tuple[int, dict[str, str], bytes]]:
    """Send each part when the one before has a response, and return status, headers and body of all."""
    port = int(task.base_url.split(":")[2].split("/")[0])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    responses = []
    for part in parts:
        writer.write(part)
        responses.append(await read_response(reader))
    writer.close()
    return responses


async def read_response(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)).decode()
    first, *lines = head.strip().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(first.split()[1]), headers, await reader.readexactly(int(headers.get("content-length", 0)))


def test_malformed_http_is_answered_in_the_form_of_every_api(world: World) -> None:
    responses: dict[str, Any] = {}

    async def agent(task: AgentTask) -> None:
        for name, sent in MALFORMED.items():
            responses[name] = await exchange(task, sent)
        responses["after another request"] = await exchange(task, GET + b"Host: x\r\n\r\n", b"\x00\x01\r\n\r\n")
        await chat(task, [user("a")])

    world.play(agent)
    assert [each[0] for each in responses["after another request"]] == [401, 400]
    for name, received in responses.items():
        status, headers, content = received[-1]
        body = json.loads(content)
        assert (status, headers["content-type"]) == (400, "application/json; charset=utf-8"), name
        # OpenAI's clients read "error.message" and "error.code", and Anthropic's "type" and "error.type".
        assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error", name
        assert "no valid HTTP" in body["error"]["message"] and "code" in body["error"], name


@pytest.mark.parametrize(
    ("path", "version", "key", "expect", "statuses"),
    [
        ("/v1/chat/completions", "1.1", True, "100-continue", [100, 200]),
        ("/v1/reward", "1.1", True, "100-Continue", [100, 403]),
        ("/v1/messages/count_tokens", "1.1", True, "100-continue", [100, 200]),
        ("/v1/chat/completions", "1.1", False, "100-continue", [401]),
        ("/v1/segment", "1.1", False, "100-continue", [401]),
        ("/v1/chat/completions", "1.1", True, "200-ok", [417]),
        ("/v1/chat/completions", "1.1", False, "200-ok", [401]),
        ("/v1/chat/completions", "1.0", True, "100-continue", []),
    ],
)
def test_the_body_is_asked_for_behind_the_key(
    world: World, path: str, version: str, *, key: bool, expect: str, statuses: list[int]
) -> None:
    responses: list[tuple[int, dict[str, str], bytes]] = []

    async def agent(task: AgentTask) -> None:
        body = b'{"messages": [{"role": "user", "content": "a"}], "reward": 1}'
        body = b'{"reward": 1}' if path == "/v1/reward" else body
        lines = [f"POST {path} HTTP/{version}", "Host: x", f"Content-Length: {len(body)}", f"Expect: {expect}"]
        lines += [f"Authorization: Bearer {task.api_key}"] if key else []
        head = "\r\n".join([*lines, "", ""]).encode()
        # HTTP 1.0 has no "100 Continue": a client sends the body at once.
        parts = [head, body] if statuses[:1] == [100] else [head] if statuses else [head + body]
        responses.extend(await exchange(task, *parts))
        await chat(task, [user("b")])

    world.play(agent)
    assert [status for status, _, _ in responses] == (statuses or [200])
    assert json.loads(responses[-1][2])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/chat/completions", '{"messages": [{"role": "user", "content": "a"}], "messages": []}'),
        ("/chat/completions", '{"messages": [{"role": "user", "content": "a", "role": "system"}]}'),
        ("/responses", '{"input": "a", "metadata": {"deep": {"k": 1, "\\u006b": 1}}}'),
        ("/messages", '{"max_tokens": 9, "messages": [{"role": "user", "content": "a"}], "max_tokens": 9}'),
        ("/reward", '{"reward": 1, "reward": 0}'),
    ],
)
def test_a_key_that_is_there_twice_is_refused(world: World, path: str, body: str) -> None:
    answers: list[tuple[int, Any]] = []

    async def agent(task: AgentTask) -> None:
        answers.append(await post_text(task, path, body))
        await chat(task, [user("a")])

    world.play(agent)
    ((status, answer),) = answers
    assert status == 400 and "twice; write it once" in answer["error"]["message"]


async def post_text(task: AgentTask, path: str, body: str) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {task.api_key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(task.base_url + path, data=body.encode()) as response,
    ):
        return response.status, await response.json()
