"""HTTP endpoint for agents: the APIs that sample responses, and rewards, with a key for each episode.

Any process on the machine can connect. So everything before a valid key is limited: connections, headers and time; the
body is not read. A program with a key can spoil its own episode only.
"""

import asyncio
import hashlib
import secrets
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from aiohttp import web

from megatron_dppo.engines.responder import LoopThread
from megatron_dppo.rollout.turns import check_reward
from megatron_dppo_agents.agent_request import MODEL, CallError
from megatron_dppo_agents.agent_response import AgentResponse
from megatron_dppo_agents.completions_api import CHAT_COMPLETIONS, COMPLETIONS
from megatron_dppo_agents.episode import Episode
from megatron_dppo_agents.generate_api import GENERATE
from megatron_dppo_agents.limited_server import LimitedServer, ask_for_body, digest_key, expect_later
from megatron_dppo_agents.loopback_network import LoopbackNetwork
from megatron_dppo_agents.messages_api import MESSAGES, error_body
from megatron_dppo_agents.protocol_record import Protocol
from megatron_dppo_agents.responses_api import RESPONSES
from megatron_dppo_conversations.formats.json_values import inflate, parse_json

T = TypeVar("T")
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_PROTOCOLS = (CHAT_COMPLETIONS, COMPLETIONS, RESPONSES, MESSAGES, GENERATE)
TRANSFER_SECONDS = 30.0
"""Time in which a body must arrive, and in which a response must be read."""
_REWARD_NOT_TAKEN = (
    "the run computes the reward of this episode itself; set agent.reward = 'call' to let the program give it"
)
_TRAIN_HEADER = "X-Train"
"""Header by which a call is left out of training: ``false``."""
_SESSION_HEADER = "X-Session-ID"
"""Header that tells the agents of an episode apart. Routers of inference servers and verifiers use it, too."""
_MAX_EXTRA_REQUESTS = 8
"""Number of an episode's concurrent requests besides its calls. All together hold a quarter of the connections."""


class Endpoint:
    """HTTP server in its own thread, on a free port of the host, from the first episode until ``close``."""

    def __init__(self, host: str, max_body_bytes: int, network: LoopbackNetwork | None = None) -> None:
        self._host = host
        self._network = network
        self._max_body_bytes = max_body_bytes
        self._episodes: dict[bytes, Episode] = {}
        """Running episodes, by the digest of their keys, so that the time of the look-up tells nothing about a key."""
        self._num_requests: Counter[Episode] = Counter()
        """Number of requests in progress of each episode."""
        self._thread: LoopThread | None = None
        self._server: LimitedServer | None = None

    @property
    def base_url(self) -> str:
        """Base URL for OpenAI clients."""
        assert self._server is not None
        return f"{self._server.url}/v1"

    def register(self, episode: Episode) -> str:
        """Return the API key of an episode; start listening (or raise ``OSError``) if this is the first one."""
        if self._thread is None:
            thread = LoopThread("agents")
            try:
                thread.run(self._listen())
            except BaseException:
                thread.close()
                raise
            # Only after success: otherwise the next episode tries to listen again.
            self._thread = thread
        key = f"sk-{secrets.token_urlsafe(32)}"
        self._episodes[digest_key(key)] = episode
        return key

    def unregister(self, key: str) -> None:
        """Reject the key of an episode that has ended."""
        del self._episodes[digest_key(key)]

    def close(self) -> None:
        """Stop listening."""
        thread = self._thread
        self._thread = None
        if thread is not None and self._server is not None:
            thread.run(self._server.stop())
            thread.close()

    async def _listen(self) -> None:
        app = web.Application(client_max_size=self._max_body_bytes, middlewares=[_errors_as_json])
        post = partial(web.post, expect_handler=expect_later)
        app.add_routes(
            [
                *(post(each.path, partial(self._respond, protocol=each)) for each in _PROTOCOLS),
                post(f"{MESSAGES.path}/count_tokens", self._count_tokens),
                post("/v1/reward", self._reward),
                post("/v1/segment", self._segment),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{name}", self._models),
            ]
        )
        self._server = LimitedServer(app, self._host, network=self._network, error_body=_malformed_body)
        await self._server.start()

    @contextmanager
    def _authorized(self, request: web.Request) -> Iterator[Episode]:
        """Yield the episode of a request's key, and count the request as long as it is processed."""
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            # Anthropic's header.
            key = request.headers.get("x-api-key", "")
        episode = self._episodes.get(digest_key(key.strip()))
        if episode is None:
            raise CallError("the API key is not that of a running episode", 401, "invalid_api_key")
        assert self._server is not None
        connections = self._server.connections
        limit = min(episode.settings.max_calls + _MAX_EXTRA_REQUESTS, connections.max_connections // 4)
        if self._num_requests[episode] >= limit:
            raise CallError(f"{limit} requests of the episode are in progress", 429, "too_many_requests")
        self._num_requests[episode] += 1
        try:
            with connections.processing(request, episode):
                yield episode
        finally:
            self._num_requests[episode] -= 1
            # A ``Counter`` keeps keys at zero, and a run has any number of episodes.
            if not self._num_requests[episode]:
                del self._num_requests[episode]

    async def _respond(self, request: web.Request, protocol: Protocol) -> web.StreamResponse:
        with self._authorized(request) as episode:
            # Before the body is read, so that a call beyond the limit costs no transfer.
            episode.admit_call()
            read_json = await self._read_body(request)
            is_trained = _is_trained(request)
            session = request.headers.get(_SESSION_HEADER, "")
            start = f"{request.path} {is_trained} {session}\n".encode("utf-8", "surrogateescape")
            digest = hashlib.sha256(start + await request.read()).digest()
            # The body is parsed in the episode's threads: a large one must not delay other episodes.
            call = episode.respond(
                lambda: protocol.read(read_json(), episode.stored_responses),
                digest=digest,
                is_trained=is_trained,
                session=session,
            )
            response = await _run_in_episode_loop(episode, call)
            if protocol.store is not None:
                protocol.store(response, episode.stored_responses)
            try:
                return await _send(request, protocol, response)
            except (ConnectionError, asyncio.CancelledError):
                # The client was gone before it had the response. It may send the same body again.
                episode.loop.call_soon_threadsafe(episode.calls.keep_undelivered, digest, response)
                raise

    async def _count_tokens(self, request: web.Request) -> web.StreamResponse:
        with self._authorized(request) as episode:
            read_json = await self._read_body(request)
            count = episode.count_tokens(lambda: MESSAGES.read(read_json(), episode.stored_responses))
            return web.json_response({"input_tokens": await _run_in_episode_loop(episode, count)})

    async def _reward(self, request: web.Request) -> web.StreamResponse:
        with self._authorized(request) as episode:
            read_json = await self._read_body(request)
            body = await asyncio.get_running_loop().run_in_executor(episode.executor, read_json)
            if (isinstance(body, dict) and "rewards" in body) or episode.settings.rewards.weights:
                return await self._named_rewards(body, episode)
            fields = _read_fields(body, {"reward"}, {"id"}, '{"reward": NUMBER} or {"reward": NUMBER, "id": ID}')
            value = fields["reward"]
            # ``bool`` is a subclass of ``int``.
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise CallError(f'expected {{"reward": NUMBER}}, got {body!r:.200}')
            try:
                reward = check_reward(value)
            except ValueError as error:
                raise CallError(str(error)) from error
            if not episode.takes_reward:
                raise CallError(_REWARD_NOT_TAKEN, 403, "reward_not_taken")
            await _run_in_episode_loop(episode, _call(episode.add_reward, reward, fields.get("id")))
            return web.json_response(fields | {"reward": reward})

    async def _named_rewards(self, body: object, episode: Episode) -> web.StreamResponse:
        """Take the rewards of an episode by name. Those of single responses have no names."""
        if not episode.takes_reward:
            raise CallError(_REWARD_NOT_TAKEN, 403, "reward_not_taken")
        rewards = episode.settings.rewards
        fields = _read_fields(body, {"rewards"}, set(), f"{rewards.form} (reward.agent_parts)")
        try:
            parts = rewards.read(fields["rewards"])
        except ValueError as error:
            raise CallError(str(error)) from error
        await _run_in_episode_loop(episode, _call(episode.add_rewards, parts))
        return web.json_response({"rewards": parts})

    async def _segment(self, request: web.Request) -> web.StreamResponse:
        with self._authorized(request) as episode:
            read_json = await self._read_body(request)
            body = await asyncio.get_running_loop().run_in_executor(episode.executor, read_json)
            fields = _read_fields(body, {"id", "train"}, set(), '{"id": ID, "train": false}')
            if fields["train"] is not False:
                raise CallError(f"'train' = {fields['train']!r:.80}, expected false: all other segments are trained on")
            await _run_in_episode_loop(episode, _call(episode.leave_out, fields["id"]))
            return web.json_response(fields)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        with self._authorized(request) as episode:
            model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "megatron_dppo"}
            # Anthropic's fields, and that of vLLM which clients of renderers read.
            model |= {"type": "model", "display_name": MODEL, "created_at": "1970-01-01T00:00:00Z"}
            model |= {"root": MODEL, "parent": None, "max_model_len": episode.max_tokens}
            if "name" in request.match_info:
                return web.json_response(model)
            pages = {"has_more": False, "first_id": MODEL, "last_id": MODEL}
            return web.json_response({"object": "list", "data": [model], **pages})

    async def _read_body(self, request: web.Request) -> Callable[[], object]:
        """Receive a body, and return a function that inflates and parses it."""
        try:
            async with asyncio.timeout(TRANSFER_SECONDS):
                await ask_for_body(request)
                content = await request.read()
        except TimeoutError as error:
            raise CallError(f"the body did not arrive within {TRANSFER_SECONDS:g} seconds", 408, "timeout") from error
        except web.RequestPayloadError as error:
            raise CallError(f"the body cannot be read: {error!s:.200}") from error
        encoding = request.headers.get("Content-Encoding", "")
        return lambda: parse_body(content, encoding, self._max_body_bytes)


async def _send(request: web.Request, protocol: Protocol, response: AgentResponse) -> web.StreamResponse:
    """Write a response, or raise ``ConnectionError`` if its client does not read it."""
    # The response is already complete; a stream is only the format that the client asked for.
    events = protocol.events(response) if protocol.events is not None and response.call.stream else None
    headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    answer = web.StreamResponse(headers=headers) if events is not None else web.json_response(protocol.body(response))
    try:
        async with asyncio.timeout(TRANSFER_SECONDS):
            await answer.prepare(request)
            for event in events or ():
                await answer.write(event)
            await answer.write_eof()
    except TimeoutError as error:
        raise ConnectionError(f"the response was not read within {TRANSFER_SECONDS:g} seconds") from error
    return answer


def _is_trained(request: web.Request) -> bool:
    text = request.headers.get(_TRAIN_HEADER, "true")
    if text.lower() not in ("true", "false"):
        raise CallError(f"the header {_TRAIN_HEADER} = {text!r:.80}, expected true or false")
    return text.lower() == "true"


def _read_fields(body: object, required: set[str], optional: set[str], form: str) -> dict[str, Any]:
    """Return the fields of a body of the endpoint's own; ``id`` is a string."""
    if not isinstance(body, dict) or not required <= body.keys() <= required | optional:
        raise CallError(f"expected {form}, got {body!r:.200}")
    if "id" in body and not isinstance(body["id"], str):
        raise CallError(f"'id' = {body['id']!r:.80}, expected the 'id' of a response's body")
    return body


async def _call(function: Callable[..., None], *arguments: object) -> None:
    """Call a function, as a coroutine for another event loop."""
    function(*arguments)


async def _run_in_episode_loop(episode: Episode, coroutine: Coroutine[Any, Any, T]) -> T:
    error_at_end = CallError("the episode has ended", 503, "episode_over")
    try:
        future = asyncio.run_coroutine_threadsafe(coroutine, episode.loop)
    except RuntimeError as error:  # the loop is closed
        # Python warns of a coroutine that is never awaited.
        coroutine.close()
        raise error_at_end from error
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        # Cancelled from outside: passes on. Otherwise the episode has cancelled the call.
        if task is not None and task.cancelling():
            raise
        raise error_at_end from error


def parse_body(content: bytes, encoding: str, max_bytes: int) -> object:
    """Return the JSON of a request body of at most ``max_bytes`` bytes when decompressed."""
    try:
        return parse_json(inflate(content, encoding, max_bytes))
    except OverflowError as error:
        raise CallError(f"{error} (agent.max_body_bytes)", 413) from error
    except ValueError as error:
        raise CallError(f"the body is no JSON: {error!s:.200}") from error


def _malformed_body(message: str) -> dict[str, Any]:
    """Return the body of an error whose path is unknown, so that the clients of all APIs can read it."""
    error = CallError(message)
    return error_body(error) | error.body


@web.middleware
async def _errors_as_json(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except CallError as error:
        rejected = error
    except web.HTTPException as error:
        rejected = CallError(f"{request.method} {request.path}: {error.text or error.reason}", error.status)
    except ConnectionError:
        # The client has closed the connection, so no error can be sent.
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error!s:.200}"
        # aiohttp's logger is disabled, so a bug of the endpoint is reported here.
        print(f"warning  agents: {request.method} {request.path!r:.80} failed: {reason}", file=sys.stderr, flush=True)
        rejected = CallError(f"the endpoint failed: {reason}", 500)
    is_anthropic = request.path.startswith(MESSAGES.path) or "anthropic-version" in request.headers
    body = error_body(rejected) if is_anthropic else rejected.body
    return web.json_response(body, status=rejected.status)
