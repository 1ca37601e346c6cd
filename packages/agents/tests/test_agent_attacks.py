"""Attacks on the endpoint of agents, each beside an honest episode that must get the same answers as without them."""

from __future__ import annotations

import asyncio
import gzip
import json
import queue
import secrets
import socket
import threading
import time
import tracemalloc
import zlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from types import SimpleNamespace
from typing import Any, NamedTuple

import aiohttp
import psutil
import pytest

from columns import same
from megatron_dppo.rollout.engine import GroupRequest
from megatron_dppo.types import Completion, Prompt, SamplingParams
from megatron_dppo_agents import endpoint, limited_server
from megatron_dppo_agents.agent_request import CallError
from megatron_dppo_agents.connections import ConnectionLimit, reserve_descriptors
from megatron_dppo_agents.endpoint import parse_body
from megatron_dppo_agents.runner import AgentTask
from tests.unit.scripted import TASK, World

MAX_BODY = 2_000_000
MAX_TOKENS = 6000
MAX_CONNECTIONS = 100
SECONDS = 3.0
"""Every time limit of the endpoint in these tests."""


class Attacker:
    """A program with the key of an episode of its own. The requests that it sends are as it likes."""

    def __init__(self, task: AgentTask) -> None:
        self.task = task
        self.port = int(task.base_url.split(":")[2].split("/")[0])

    async def post(self, body: Any = None, *, path: str = "/chat/completions", **more: Any) -> tuple[int, str]:
        """Send JSON, or the bytes as they are, and return the status and the body of the response."""
        headers = {"Authorization": f"Bearer {more.pop('key', self.task.api_key)}", **more.pop("headers", {})}
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with (
            aiohttp.ClientSession(headers=headers, auto_decompress=False) as session,
            session.post(self.task.base_url + path, data=more.pop("data", data), **more) as response,
        ):
            return response.status, await response.text()

    async def messages(
        self, body: Any, *, path: str = "/messages", gzip: bool = False, key: str | None = None
    ) -> tuple[int, str]:
        """Send a body of Anthropic's Messages with the key in its own header."""
        headers = {"Authorization": "none", "x-api-key": self.task.api_key if key is None else key}
        return await self.post(body, path=path, headers=headers | ({"Content-Encoding": "gzip"} if gzip else {}))

    async def raw(self, *parts: bytes, pause: float = 0.0) -> tuple[int, str]:
        """Send bytes on a connection, and return the status and text of all that comes back; 0 if nothing does."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(pause)
            text = (await asyncio.wait_for(reader.read(), 60)).decode(errors="replace")
        except ConnectionError:
            text = ""
        finally:
            writer.close()
        return (int(text.split()[1]) if text.startswith("HTTP/") else 0), text

    def head(self, *lines: str, method: str = "POST", key: str | None = None) -> bytes:
        """Return the headers of a call."""
        first = f"{method} /v1/chat/completions HTTP/1.1"
        known = [] if key is None else [f"Authorization: Bearer {key}"]
        return "\r\n".join([first, "Host: x", "Connection: close", *known, *lines, "", ""]).encode()

    async def open(self, count: int, data: bytes) -> tuple[int, str]:
        """Open connections that send this and nothing more; return 0 if the endpoint never holds many of them."""
        held = 0
        with ExitStack() as stack:
            for index in range(count):
                link = stack.enter_context(socket.create_connection(("127.0.0.1", self.port)))
                with suppress(ConnectionError):
                    link.sendall(data)
                held = max(held, self.num_held()) if index % 20 == 19 else held
        # Some of the sockets are being closed.
        return (0 if held <= MAX_CONNECTIONS + 5 else held), ""

    def num_held(self) -> int:
        """Return the number of sockets of the endpoint."""
        sockets = psutil.Process().net_connections("tcp4")
        return sum(each.laddr.port == self.port and each.status != "LISTEN" for each in sockets)

    async def at_once(self, count: int, *args: Any, **more: Any) -> tuple[int, str]:
        """Return the highest status of requests that are sent at the same time; some may get no response."""
        results = await asyncio.gather(*(self.post(*args, **more) for _ in range(count)), return_exceptions=True)
        assert all(isinstance(result, tuple | aiohttp.ClientError) for result in results), results
        return max(result for result in results if isinstance(result, tuple))


class Attack(NamedTuple):
    """Attacks, and their results."""

    name: str
    run: Callable[[Attacker], Awaitable[tuple[int, str]]]
    status: int
    """Status of the response; 0 if the connection is closed without one."""
    words: str = ""


def nested(depth: int) -> bytes:
    return b'{"messages": ' + b"[" * depth + b"]" * depth + b"}"


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x", **fields}]}


def bomb(compressor: Any) -> bytes:
    """A compressed body of 50 MB."""
    return b"".join([*(compressor.compress(b" " * 1_000_000) for _ in range(50)), compressor.flush()])


def encoded(body: bytes, name: str, **more: Any) -> Callable[[Attacker], Awaitable[tuple[int, str]]]:
    return lambda a: a.post(body, headers={"Content-Encoding": name}, **more)


async def drop_stream(a: Attacker) -> tuple[int, str]:
    """Close the connection while the response of a stream is sampled."""
    body = json.dumps(message() | {"stream": True}).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", a.port)
    writer.write(a.head(f"Content-Length: {len(body)}", key=a.task.api_key) + body)
    await writer.drain()
    writer.close()
    return 0, ""


async def drop_body(a: Attacker) -> tuple[int, str]:
    """Close the connection within a body."""
    _, writer = await asyncio.open_connection("127.0.0.1", a.port)
    writer.write(a.head("Content-Length: 100", key=a.task.api_key) + b"{")
    await writer.drain()
    writer.close()
    return 0, ""


async def use_up_calls(a: Attacker) -> tuple[int, str]:
    """Make calls that are rejected, until no further call is admitted."""
    for _ in range(300):
        status, text = await a.post({})
        if "max_calls" in text:
            break
    return status, text


async def chunks(size: int, count: int) -> Any:
    for _ in range(count):
        yield b" " * size


def keep_open(key: str) -> bytes:
    """Return a request after which the connection stays open."""
    return f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n\r\n".encode()


HOW = SamplingParams(max_new_tokens=MAX_TOKENS, seed=1)
KEEP_OPEN = keep_open("sk-none")
CHUNKED = "Transfer-Encoding: chunked"
GZIP_BOMB = bomb(zlib.compressobj(9, wbits=31))
DEEP_CALL = {"id": "c", "function": {"name": "f", "arguments": "[" * 3000}}
DIGITS = int("9" * 400)
GENERATE = "/../inference/v1/generate"
COUNT = "/messages/count_tokens"
QUESTION = {"role": "user", "content": "x"}
NOTE = {"role": "system", "content": "x" * 40}
CALL_OF_5 = {"type": "tool_use", "id": "x", "name": "f", "input": 5}
CALL_ITEM = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
LONG_THOUGHT = {"role": "assistant", "content": [{"type": "thinking", "thinking": "x" * 10**6, "signature": ""}]}
STOPS = {"token_ids": [7], "sampling_params": {"stop_token_ids": [DIGITS]}}
SLOW_ATTACKS = [
    Attack("half a request line", lambda a: a.raw(b"POST /v1/ch"), 0),
    Attack("half of the headers", lambda a: a.raw(a.head()[:-2]), 0),
    Attack("a byte of a header at a time", lambda a: a.raw(a.head()[:-2], *[b"x"] * 50, pause=0.1), 0),
    Attack("a huge length", lambda a: a.raw(a.head("Content-Length: 99999999999")), 401, "invalid_api_key"),
    Attack("a huge chunk", lambda a: a.raw(a.head(CHUNKED), b"fffffff\r\n" + b" " * 200_000), 401),
    Attack("a body without a key", lambda a: a.raw(a.head("Content-Length: 5000000"), b" " * 5_000_000), 401),
    Attack("a wait for 100 Continue", lambda a: a.raw(a.head("Content-Length: 9", "Expect: 100-continue")), 401),
    Attack("a slow body", lambda a: a.raw(a.head("Content-Length: 9", key=a.task.api_key), b"{"), 408),
]  # fmt: skip
"""Attacks that last until a time limit. They run at the same time."""
EMPTY = {"role": "user", "content": ""}
RESULT = {"role": "tool", "content": ""}
ATTACKS = [
    # Without a key.
    Attack("connections that send nothing", lambda a: a.open(300, b""), 0),
    Attack("connections with half a request", lambda a: a.open(300, b"POST / HT"), 0),
    Attack("connections with half a body", lambda a: a.open(300, a.head("Content-Length: 9")), 0),
    Attack("a header without end", lambda a: a.raw(a.head()[:-4] + b"x" * 100_000), 400),
    Attack("too many headers", lambda a: a.raw(a.head(*["a: b"] * 1000)), 400),
    Attack("a long path", lambda a: a.raw(b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n"), 400),
    Attack("bytes of another protocol", lambda a: a.raw(b"\x16\x03\x01\x02\x00\x01" * 20 + b"\r\n\r\n"), 400),
    Attack("a negative length", lambda a: a.raw(a.head("Content-Length: -1")), 400),
    Attack("two lengths", lambda a: a.raw(a.head("Content-Length: 1", "Content-Length: 2")), 400),
    Attack("a length beside chunks", lambda a: a.raw(a.head("Content-Length: 4", CHUNKED) + b"0\r\n\r\n"), 400),
    Attack("a bomb without a key", encoded(GZIP_BOMB, "gzip", key="sk-none"), 401),
    Attack("a wrong key", lambda a: a.post(message(), key="sk-" + secrets.token_urlsafe(32)), 401),
    Attack("an empty key", lambda a: a.post(message(), key=""), 401),
    Attack("a key that is no text", lambda a: a.raw(a.head("Authorization: Bearer \xff\xfe")), 401),
    Attack("another scheme", lambda a: a.post(message(), headers={"Authorization": "Basic eDp5"}), 401),
    Attack("many guesses", lambda a: a.at_once(100, message(), key="sk-guess"), 401),
    Attack("a reward without a key", lambda a: a.post({"reward": 9}, path="/reward", key="x"), 401),
    Attack("many requests in a row", lambda a: a.raw(KEEP_OPEN * 500, a.head()), 401),
    Attack("an upgrade", lambda a: a.raw(a.head("Upgrade: websocket")), 401),
    Attack("another method", lambda a: a.raw(a.head(method="TRACE")), 405),
    Attack("another path", lambda a: a.post({}, path="/../../etc/passwd"), 404),
    # With a key: bodies.
    Attack("a body that is too long", lambda a: a.post(b" " * (MAX_BODY + 1)), 413),
    Attack("chunks without end", lambda a: a.post(data=chunks(100_000, 100)), 413),
    Attack("a gzip bomb", encoded(GZIP_BOMB, "gzip"), 413, "agent.max_body_bytes"),
    Attack("a deflate bomb", encoded(bomb(zlib.compressobj(9)), "deflate"), 413, "agent.max_body_bytes"),
    Attack("half of a gzip body", encoded(gzip.compress(b"{}" * 99)[:-9], "gzip"), 400, "incomplete"),
    Attack("no gzip body", encoded(b"{}", "gzip"), 400, "is not gzip"),
    Attack("an unknown compression", encoded(b"{}", "br"), 400, "expected gzip, deflate or none"),
    Attack("a body that breaks off", drop_body, 0),
    Attack("a broken chunk", lambda a: a.raw(a.head(CHUNKED, key=a.task.api_key) + b"zz\r\n{}\r\n0\r\n\r\n"), 400),
    Attack("no JSON", lambda a: a.post(b"{]"), 400, "no JSON"),
    Attack("no UTF-8", lambda a: a.post(b'{"messages": "\xff"}'), 400, "no JSON"),
    Attack("NaN", lambda a: a.post(b'{"max_tokens": NaN}'), 400, "NaN is no JSON"),
    Attack("nested 100 levels", lambda a: a.post(nested(100)), 400, "nested more than 64 levels"),
    Attack("nested 2,000 levels", lambda a: a.post(nested(2000)), 400, "nested more"),
    Attack("nested 900,000 levels", lambda a: a.post(nested(900_000)), 400, "nested more than 64 levels"),
    Attack("nested in arguments", lambda a: a.post(message(role="assistant", tool_calls=[DEEP_CALL])), 400, "nested"),
    # With a key: values of wrong types and sizes.
    Attack("a number as tool calls", lambda a: a.post(message(tool_calls=5)), 400, "tool_calls = 5"),
    Attack("a number as messages", lambda a: a.post({"messages": 5}), 400, "'messages' is missing"),
    Attack("a number as a message", lambda a: a.post({"messages": [5]}), 400, "role None"),
    Attack("a list as a role", lambda a: a.post(message(role=[])), 400, "the role []"),
    Attack("an object as content", lambda a: a.post(message(content={})), 400, "a list of parts"),
    Attack("a list as the body", lambda a: a.post([1]), 400, "no JSON object"),
    Attack("a long name of the model", lambda a: a.post(message() | {"model": "m" * 1_000_000}), 400, "'model' ="),
    Attack("a number as a stream", lambda a: a.post(message() | {"stream": 1e300}), 400, "'stream' = 1e+300"),
    Attack("400 digits of tokens", lambda a: a.post(message() | {"max_tokens": -DIGITS}), 400, "'max_tokens' = -999"),
    Attack("a token of 400 digits", lambda a: a.post({"prompt": [DIGITS]}, path="/completions"), 400, "no token 999"),
    Attack("a fraction of a token", lambda a: a.post({"prompt": [1.5]}, path="/completions"), 400, "'prompt' is"),
    Attack("half a character", lambda a: a.post(message(content="\ud800")), 400, "cannot be encoded"),
    Attack("a long text", lambda a: a.post(message(content="x" * 1_900_000)), 400, "context_length_exceeded"),
    Attack("long tools", lambda a: a.post(message() | {"tools": [{"name": "x" * 1_000_000}]}), 400, "context_length"),
    Attack("many results of tools", lambda a: a.post({"messages": [RESULT] * 50_000}), 400, "context_length"),
    Attack("many messages", lambda a: a.post({"messages": [EMPTY] * 50_000}), 400, "context_length"),
    # With a key: rewards.
    Attack("a reward of 1e39", lambda a: a.post({"reward": 1e39}, path="/reward"), 400, "between -1e+30 and"),
    Attack("a reward of 400 digits", lambda a: a.post({"reward": DIGITS}, path="/reward"), 400, "finite number"),
    Attack("a reward of 5,000 digits", lambda a: a.post(b'{"reward": ' + b"9" * 5000 + b"}", path="/reward"), 400),
    Attack("an infinite reward", lambda a: a.post(b'{"reward": 1e999}', path="/reward"), 400, "too large"),
    Attack("a text as a reward", lambda a: a.post({"reward": "1"}, path="/reward"), 400, "NUMBER"),
    Attack("a list as a reward", lambda a: a.post([1], path="/reward"), 400, "NUMBER"),
    # The other APIs, without a key and with one.
    Attack("a wrong key in Anthropic's header", lambda a: a.messages({}, key="sk-x"), 401, "authentication_error"),
    Attack("a body of Messages without a key", lambda a: a.messages(GZIP_BOMB, gzip=True, key=""), 401),
    Attack("a count without a key", lambda a: a.messages({}, path="/messages/count_tokens", key="x"), 401),
    Attack("items without a key", lambda a: a.post({}, path="/responses", key="sk-none"), 401),
    Attack("tokens without a key", lambda a: a.post({}, path=GENERATE, key="sk-none"), 401),
    Attack("a bomb for Messages", lambda a: a.messages(GZIP_BOMB, gzip=True), 413, "request_too_large"),
    Attack("a bomb for a count", lambda a: a.messages(GZIP_BOMB, gzip=True, path=COUNT), 413, "agent.max_body_bytes"),
    Attack("deep blocks", lambda a: a.messages(nested(900_000)), 400, "nested more than 64 levels"),
    Attack("a number as a block", lambda a: a.messages(message(content=[5])), 400, "list of blocks"),
    Attack("a list as a block's type", lambda a: a.messages(message(content=[{"type": []}])), 400, "is no text"),
    Attack("an input of 5", lambda a: a.messages(message(role="assistant", content=[CALL_OF_5])), 400, "an object"),
    Attack("a number as tools of Messages", lambda a: a.messages(message() | {"tools": 5}), 400, "tools = 5"),
    Attack("a long system text", lambda a: a.messages(message() | {"system": "x" * 10**6}), 400, "prompt is too long"),
    Attack("a long thought", lambda a: a.messages({"messages": [LONG_THOUGHT, QUESTION]}), 400, "prompt is too long"),
    Attack("a long count", lambda a: a.messages(message(content="x" * 10**6), path=COUNT), 400, "prompt is too long"),
    Attack("many notes", lambda a: a.messages({"messages": [QUESTION, *[NOTE] * 25_000]}), 400, "prompt is too long"),
    Attack("many blocks", lambda a: a.messages({"messages": [QUESTION] * 50_000}), 400, "prompt is too long"),
    Attack("a number as items", lambda a: a.post({"input": 5}, path="/responses"), 400, "'input' is missing"),
    Attack("a number as an item", lambda a: a.post({"input": [5]}, path="/responses"), 400, "the type None"),
    Attack("a list as a type", lambda a: a.post({"input": [{"type": []}]}, path="/responses"), 400, "the type []"),
    Attack("a list as an id", lambda a: a.post({"previous_response_id": []}, path="/responses"), 400, "no response of"),
    Attack("many items", lambda a: a.post({"input": [QUESTION] * 50_000}, path="/responses"), 400, "context_length"),
    Attack("calls in a row", lambda a: a.post({"input": [CALL_ITEM] * 20_000}, path="/responses"), 400, "context"),
    Attack("huge tokens", lambda a: a.post({"token_ids": [DIGITS]}, path=GENERATE), 400, "no token 999"),
    Attack("many tokens", lambda a: a.post({"token_ids": [7] * 300_000}, path=GENERATE), 400, "context_length"),
    Attack("a token below 0", lambda a: a.post({"token_ids": [-1]}, path=GENERATE), 400, "'token_ids' is"),
    Attack("a stop token of 400 digits", lambda a: a.post(STOPS, path=GENERATE), 400, "'stop_token_ids'"),
    # With a key: load.
    Attack("a stream that nobody reads", drop_stream, 0),
    Attack("too many requests at once", lambda a: a.at_once(80, data=chunks(1, 5), path="/reward"), 429),
    Attack("connections between two calls", lambda a: a.open(300, keep_open(a.task.api_key)), 0),
    Attack("all its calls", use_up_calls, 400, "max_calls"),
    Attack("calls beyond the limit", lambda a: a.post(message()), 400, "max_calls"),
]  # fmt: skip
NUM_ATTACKS = len(SLOW_ATTACKS) + len(ATTACKS)


def new_session(task: AgentTask) -> aiohttp.ClientSession:
    """Return a client that opens a connection for each call: the endpoint closes idle ones early in these tests."""
    connector = aiohttp.TCPConnector(force_close=True)
    return aiohttp.ClientSession(headers={"Authorization": f"Bearer {task.api_key}"}, connector=connector)


class Games:
    """An agent for all episodes: it attacks, plays a game of many turns, or makes load, by its prompt."""

    def __init__(self) -> None:
        self.attackers = queue.Queue[AgentTask]()
        self.answers = queue.Queue[str]()
        self.turns = queue.Queue[bool]()
        """An item for each turn of the honest episode: True if another one follows."""
        self.is_over = False
        self.num_load_calls = 0

    async def run(self, task: AgentTask) -> None:
        await {"attack": self.attack, "load": self.load, "honest": self.play}[task.prompt](task)

    async def attack(self, task: AgentTask) -> None:
        self.attackers.put(task)
        while not self.is_over:
            await asyncio.sleep(0.05)

    async def load(self, task: AgentTask) -> None:
        async with new_session(task) as session:
            while not self.is_over:
                await self.call(task, session, [{"role": "user", "content": "load"}])
                self.num_load_calls += 1
                await asyncio.sleep(0.3)

    async def play(self, task: AgentTask) -> None:
        messages: list[dict[str, str]] = []
        async with new_session(task) as session:
            while await asyncio.to_thread(self.turns.get):
                messages.append({"role": "user", "content": f"turn {len(messages)}"})
                text = await self.call(task, session, messages)
                messages.append({"role": "assistant", "content": text})
                self.answers.put(text)

    async def call(self, task: AgentTask, session: aiohttp.ClientSession, messages: Any) -> str:
        async with session.post(f"{task.base_url}/chat/completions", json={"messages": messages}) as response:
            body = await response.json()
            assert response.status == 200, body
            return str(body["choices"][0]["message"]["content"])


def prompt(text: str) -> Prompt:
    messages = ({"role": "user", "content": text},)
    return Prompt(prompt_id=text, text=text, token_ids=(7,), label="", messages=messages, is_task=True)


def play_alone(world: World, num_turns: int) -> Completion:
    games = Games()
    engine = world.engine(games.run, max_calls=200)
    (future,) = engine.submit([GroupRequest(0, prompt("honest"), 1)], HOW, 1)
    for index in range(num_turns + 1):
        games.turns.put(index < num_turns)
    group = future.result(60)
    assert group is not None
    return group[0]


def record_encoding(world: World, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Return a list that gets the thread and the number of characters of each text that is tokenized."""
    result: list[tuple[str, int]] = []
    encode = world.tokenizer.encode

    def recorded(text: str, **more: Any) -> list[int]:
        if threading.current_thread() is not threading.main_thread():
            result.append((threading.current_thread().name, len(text)))
        return encode(text, **more)

    monkeypatch.setattr(world.tokenizer, "encode", recorded)
    # The fake server encodes what its script says, which is no part of the trainer.
    monkeypatch.setattr(world, "encode", lambda text: encode(text, add_special_tokens=False))
    return result


async def at_the_same_time(attacks: Sequence[Attack], attacker: Attacker) -> list[tuple[int, str]]:
    return await asyncio.gather(*(attack.run(attacker) for attack in attacks))


class Link:
    """A connection that is only counted."""

    transport: str | None = "open"

    def force_close(self) -> None:
        self.transport = None


def test_a_full_endpoint_closes_connections_without_a_key_and_then_those_of_the_greediest_episode() -> None:
    links = [Link() for _ in range(6)]
    server: Any = SimpleNamespace(connections=links)
    limit: Any = ConnectionLimit(server, 6)

    def call(link: Link, owner: object) -> AbstractContextManager[None]:
        return limit.processing(SimpleNamespace(protocol=link), owner)  # type: ignore[no-any-return]

    modest, greedy = object(), object()
    for index, owner in ((0, modest), (3, greedy), (4, greedy)):
        with call(links[index], owner):
            pass
    now = time.monotonic()
    assert not limit.make_room(now) and not limit.make_room(now + 0.9), "all are too young"
    with ExitStack() as stack:
        stack.enter_context(call(links[2], greedy))
        for expected in ([1], [1, 5], [1, 3, 5], [1, 3, 4, 5], [0, 1, 3, 4, 5]):
            assert limit.make_room(now + 2)
            assert [index for index, link in enumerate(links) if link.transport is None] == expected
            links.append(Link())
            stack.enter_context(call(links[-1], object()))
        assert not limit.make_room(now + 2), "a call is processed on each of them"


def test_the_processing_of_rejected_calls_is_time_of_the_agent(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.script = {"assistant\n": "ok"}
    encode = world.tokenizer.encode
    statuses = []

    def slow(text: str, **more: Any) -> list[int]:
        if len(text) > 100:
            time.sleep(0.3)
        return encode(text, **more)

    async def agent(task: AgentTask) -> None:
        for length in (1, *[1000] * 50):
            statuses.append((await Attacker(task).post(message(content="x" * length)))[0])

    monkeypatch.setattr(world.tokenizer, "encode", slow)
    engine = world.engine(agent, timeout_seconds=1.0)
    (completion,) = engine.generate([TASK], SamplingParams(max_new_tokens=100, seed=1))
    assert completion.failure == "took longer than agent.timeout_seconds = 1"
    assert statuses[0] == 200 and set(statuses[1:]) == {400} and 3 <= len(statuses) <= 5


@pytest.mark.parametrize("name", ["gzip", "deflate"])
def test_a_bomb_is_inflated_no_further_than_the_limit(name: str) -> None:
    """The status alone does not tell: a body that was inflated whole is too large as well."""
    content = bomb(zlib.compressobj(9, wbits=31 if name == "gzip" else 15))
    tracemalloc.start()
    try:
        with pytest.raises(CallError, match=r"agent\.max_body_bytes") as rejection:
            parse_body(content, name, MAX_BODY)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert rejection.value.status == 413
    # While it grows, the result is held twice.
    assert peak < 3 * MAX_BODY + len(content), "50 MB if all is inflated"


def test_an_honest_episode_does_not_notice_attacks(
    world: World, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(endpoint, "TRANSFER_SECONDS", SECONDS)
    for name in ("IDLE_SECONDS", "LINGER_SECONDS"):
        monkeypatch.setattr(limited_server, name, SECONDS)
    assert reserve_descriptors() >= MAX_CONNECTIONS
    monkeypatch.setattr(limited_server, "reserve_descriptors", lambda: MAX_CONNECTIONS)
    world.script = {"assistant\n": "a long answer"}
    encoded_by = record_encoding(world, monkeypatch)
    games = Games()
    try:
        expected = play_alone(world, NUM_ATTACKS)
        engine = world.engine(games.run, max_calls=200, max_body_bytes=MAX_BODY)
        episodes = [("attack", 1), ("load", 3), ("honest", 1)]
        groups = [GroupRequest(index, prompt(text), count) for index, (text, count) in enumerate(episodes)]
        futures = engine.submit(groups, HOW, 3)
        attacker = Attacker(games.attackers.get(timeout=30))
        failures = []
        for attacks in (SLOW_ATTACKS, *([attack] for attack in ATTACKS)):
            for _ in attacks:
                games.turns.put(True)
            results = asyncio.run(at_the_same_time(attacks, attacker))
            for attack, (status, text) in zip(attacks, results, strict=True):
                if status != attack.status or attack.words not in text or "Traceback" in text:
                    failures.append(f"{attack.name}: {status} {text[-300:]}")
                assert games.answers.get(timeout=60) == "a long answer", attack.name
        games.turns.put(False)
        games.is_over = True
        (attack_group, load, honest) = [future.result(60) for future in futures]
    finally:
        games.is_over = True
        games.turns.put(False)
    assert not failures, "\n".join(failures)
    assert attack_group is not None and load is not None and honest is not None
    assert same(honest[0], expected) and honest[0].counts["agent/calls"] == NUM_ATTACKS
    assert games.num_load_calls > 10 and [completion.failure for completion in [*load, *honest]] == [""] * 4
    assert attack_group[0].counts["agent/rejected_calls"] > 190 - 5 and attack_group[0].finish_reason == "length"
    # No call is tokenized in the event loop of the engine, and none that is certainly too long.
    longest_token = max(map(len, world.tokenizer.get_vocab()))
    assert all(name.startswith("agent-calls") for name, _ in encoded_by)
    assert max(size for _, size in encoded_by) < 2 * MAX_TOKENS * longest_token
    printed = capfd.readouterr()
    assert "Traceback" not in printed.err and "warning" not in printed.err, printed.err
