"""Client of one SGLang server."""

from megatron_dppo_engines.server import GenerateRequest, Generation, ServerInfo
from megatron_dppo_engines.servers.fields import parse_policy_version, require_integer, require_object
from megatron_dppo_engines.servers.wire import max_response_bytes
from megatron_dppo_engines.sglang.weights import SGLangWeightUpdates
from megatron_dppo_engines.sglang.wire import decode_generation, generate_body, parse_engine_version, wire_id

_FLAT_TOPK_VERSION = (0, 5, 22)
"""First version that sends the Top-K of responses as base64 instead of nested lists."""


class SGLangServer(SGLangWeightUpdates):
    """Client of an SGLang server; an ``InferenceServer``.

    Needs 0.5.19 or later, and ``--enable-return-routed-experts`` for the routers' choices. ``url`` is the address of
    the server itself: sglang-router drops fields and has none of the control calls.

    Args:
        url: ``http://host:port``.
        api_key: The server's ``--api-key``.
        admin_api_key: The server's ``--admin-api-key``, if it differs.
        deadlines: Deadline of each kind of call.
        adapter: True if requests are for the adapter of ``update_adapter``; False for the base weights.
    """

    _liveness_path = "/model_info"
    _no_tokenizer_statuses = (400, 404, 500)

    def _health_path(self) -> str:
        # SGLang's health check generates a token. A paused server cannot, and would count as unhealthy from then on.
        return "/model_info" if self._is_paused else "/health"

    async def info(self) -> ServerInfo:
        """Return the server's version, model, weight version and sizes."""
        model = require_object(await self._admin.check("/model_info", self._deadlines), self.url + "/model_info")
        server = await self._server_info()
        # A server that was restarted may be of another version.
        self._cached_version = parse_engine_version(server["version"])
        limit = server.get("context_length") or server.get("max_req_input_len") or 0
        return ServerInfo(
            engine="sglang",
            engine_version=str(server["version"]),
            model=str(model.get("model_path")),
            policy_version=parse_policy_version(model.get("weight_version")),
            # The limit on prompts, if the server was started without one on sequences.
            max_context=require_integer(limit, self.url + "/server_info", "context_length or max_req_input_len"),
            world_size=require_integer(server.get("tp_size", 1), self.url + "/server_info", "tp_size"),
        )

    async def generate(self, request: GenerateRequest) -> Generation:
        """Continue a sequence; ``ContractViolation`` if the response lacks a requested field."""
        flat = await self._engine_version() >= _FLAT_TOPK_VERSION
        body = generate_body(request, flat=flat, adapter=self._adapter)
        response = await self._http.post(
            "/generate", body, timeout=self._deadlines.generate, max_bytes=max_response_bytes(request)
        )
        return decode_generation(response, request, self.url + "/generate")

    async def abort(self, request_id: str | None = None) -> None:
        """Abort one request, or all; each returns its tokens so far."""
        body: dict[str, object] = {"abort_all": True} if request_id is None else {"rid": wire_id(request_id)}
        await self._admin.post("/abort_request", body, timeout=self._deadlines.alive, repeat=True)
