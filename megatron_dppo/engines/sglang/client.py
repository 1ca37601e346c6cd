"""One SGLang server."""

from __future__ import annotations

from typing import Any

from megatron_dppo.engines.servers.fields import part, policy_version, tokens_of, whole
from megatron_dppo.engines.servers.http import Deadlines, HttpClient
from megatron_dppo.engines.servers.updates import ADAPTER
from megatron_dppo.engines.sglang.weights import SGLangWeightUpdates
from megatron_dppo.engines.sglang.wire import decode_generation, generate_body, version_parts, wire_id
from megatron_dppo.errors import ServerError
from megatron_dppo.rollout.server import GenerateRequest, Generation, ServerInfo

_FLAT_TOPK = (0, 5, 22)
"""The first version that sends the Top-K of responses as base64 instead of nested lists."""


class SGLangServer(SGLangWeightUpdates):
    """An ``InferenceServer`` that is SGLang.

    Needs 0.5.19 or later, and ``--enable-return-routed-experts`` for the routers' choices. ``url`` is the server's own
    address, not that of a router: sglang-router drops fields and knows none of the control calls.

    Args:
        url: ``http://host:port``.
        api_key: the server's ``--api-key``.
        admin_api_key: its ``--admin-api-key``, where it has one of its own.
        deadlines: of each kind of call.
        adapter: whether requests are for the adapter that ``update_adapter`` gave, instead of the bare weights.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        admin_api_key: str | None = None,
        deadlines: Deadlines | None = None,
        adapter: bool = False,
    ) -> None:
        self._adapter = ADAPTER if adapter else None
        self._deadlines = deadlines or Deadlines()
        connect = self._deadlines.connect
        self._http = HttpClient(url, api_key=api_key, connect_timeout=connect)
        # Connections of their own: control must not wait behind hundreds of responses.
        self._admin = HttpClient(url, api_key=admin_api_key or api_key, connections=8, connect_timeout=connect)
        self.url = self._http.url

    async def health(self) -> bool:
        """Whether one token can be generated; for a paused server, whether it answers.

        SGLang's check generates a token, which a paused server cannot: it would call itself unhealthy from then on.
        """
        path = "/model_info" if self._paused else "/health"
        try:
            await self._admin.get(path, timeout=self._deadlines.health)
        except ServerError:
            return False
        return True

    async def alive(self) -> bool:
        """Whether its HTTP process answers, which the scheduler's work does not hold up."""
        try:
            await self._admin.check("/model_info", self._deadlines)
        except ServerError:
            return False
        return True

    async def info(self) -> ServerInfo:
        """What it is."""
        model = part(await self._admin.check("/model_info", self._deadlines), self.url + "/model_info", "the answer")
        server = await self._server_info()
        # A server that came back may be another one.
        self._known_version = version_parts(server["version"])
        return ServerInfo(
            engine="sglang",
            engine_version=str(server["version"]),
            model=str(model.get("model_path")),
            policy_version=policy_version(model.get("weight_version")),
            max_context=self._max_context(server),
            world_size=whole(server.get("tp_size", 1), self.url + "/server_info", "tp_size"),
        )

    async def tokenize(self, text: str) -> tuple[int, ...] | None:
        """The server's own tokens of a text; None = it has no tokenizer, or is one without this call."""
        body = {"prompt": text, "add_special_tokens": False}
        try:
            answer = await self._http.post("/tokenize", body, timeout=self._deadlines.control, repeat=True)
        except ServerError as error:
            if error.status in (400, 404, 500):
                return None
            raise
        return tokens_of(answer, self.url + "/tokenize")

    async def generate(self, request: GenerateRequest) -> Generation:
        """Continue a sequence.

        Raises:
            ServerError: no answer, a refusal, or an answer that lacks what was asked for (``ContractViolation``).
            ConfigError: top-p or top-k sampling.
        """
        flat = await self._version() >= _FLAT_TOPK
        body = generate_body(request, flat=flat, adapter=self._adapter)
        answer = await self._http.post("/generate", body, timeout=self._deadlines.generate)
        return decode_generation(answer, request, self.url + "/generate")

    async def abort(self, request_id: str | None = None) -> None:
        """Stop one request, or all; they return what they have."""
        body: dict[str, Any] = {"abort_all": True} if request_id is None else {"rid": wire_id(request_id)}
        await self._admin.post("/abort_request", body, timeout=self._deadlines.alive, repeat=True)

    async def close(self) -> None:
        """Free connections."""
        await self._http.close()
        await self._admin.close()

    def _max_context(self, server: dict[str, Any]) -> int:
        """The longest sequence; the server's own limit on prompts where it was started without one."""
        limit = server.get("context_length") or server.get("max_req_input_len") or 0
        return whole(limit, self.url + "/server_info", "context_length or max_req_input_len")
