"""Client of one vLLM server."""

from megatron_dppo_engines.errors import ServerError
from megatron_dppo_engines.server import GenerateRequest, Generation, ServerInfo
from megatron_dppo_engines.servers.fields import parse_policy_version, require_integer, require_object
from megatron_dppo_engines.servers.wire import max_response_bytes
from megatron_dppo_engines.vllm.weights import VLLMWeightUpdates
from megatron_dppo_engines.vllm.wire import decode_generation, generate_body, wire_id

_GENERATE = "/inference/v1/generate"


class VLLMServer(VLLMWeightUpdates):
    """Client of a vLLM server; an ``InferenceServer``.

    Needs 0.32 or later with ``VLLM_SERVER_DEV_MODE=1``, ``--enable-scale-out`` and ``--logprobs-mode
    processed_logprobs``; ``docs/engines.md`` has the complete list. ``url`` is the address of the server itself.

    Args:
        url: ``http://host:port``.
        api_key: The server's ``--api-key``. vLLM checks it only where text is generated, not for control calls.
        deadlines: Deadline of each kind of call.
        adapter: True if requests are for the adapter of ``update_adapter``; False for the base weights.
    """

    _liveness_path = "/version"
    _no_tokenizer_statuses = (400, 404, 500, 501)
    # After an error vLLM closes the connection that it has just promised to keep, so each control call opens one.
    _keeps_admin_alive = False
    _returns_sampling_mask = False

    async def info(self) -> ServerInfo:
        """Return the server's version, model, weight version and sizes."""
        version = require_object(await self._admin.check("/version", self._deadlines), self.url + "/version")
        # A server that was restarted may have another configuration.
        self._cached_config = None
        config = await self._config()
        model = require_object(config["model_config"], self.url + "/server_info", "model_config")
        world = await self._get("/get_world_size")
        max_context = model.get("max_model_len") or 0
        return ServerInfo(
            engine="vllm",
            engine_version=str(version.get("version")),
            model=str(model.get("model")),
            policy_version=parse_policy_version(await self._weight_version()),
            max_context=require_integer(max_context, self.url + "/server_info", "max_model_len"),
            world_size=require_integer(world.get("world_size"), self.url + "/get_world_size", "world_size"),
        )

    async def generate(self, request: GenerateRequest) -> Generation:
        """Continue a sequence; ``ContractViolation`` if the response lacks a requested field. No seed is sent."""
        # Remembered, because a server with the flag applies it to later requests, too.
        self._returns_sampling_mask |= request.params.return_sampling_mask
        body = generate_body(request, self._adapter)
        if self._returns_sampling_mask and not request.params.temperature:
            # A server with --return-sampling-mask rejects temperature 0: top-k 1 allows the same token.
            body["sampling_params"] |= {"temperature": 1.0, "top_k": 1}
        try:
            response = await self._http.post(
                _GENERATE, body, timeout=self._deadlines.generate, max_bytes=max_response_bytes(request)
            )
        except ServerError as error:
            fix = _suggest_fix(error, body["sampling_params"]["logprobs"])
            if fix is None:
                raise
            raise ServerError(error.url, f"{error.detail}: {fix}", error.status) from error
        return decode_generation(response, request, self.url + _GENERATE)

    async def abort(self, request_id: str | None = None) -> None:
        """Abort one request, or all; each returns its tokens so far.

        A request for routed experts returns no tokens: vLLM does not send the experts of an aborted request.
        """
        body: dict[str, object] = {} if request_id is None else {"request_ids": [wire_id(request_id)]}
        await self._post("/abort_requests", body, self._deadlines.alive, repeat=True)


def _suggest_fix(error: ServerError, logprobs: int) -> str | None:
    """Return what to change, for errors whose own text does not state it; None for others."""
    if error.status == 404:
        return "the server has no such call; it needs vLLM 0.32 or later"
    if error.status == 403:
        return "start the server with --enable-scale-out"
    if error.status == 400 and "max allowed" in error.detail:
        return f"start the server with --max-logprobs {logprobs} or more (one more than the Top-K)"
    return None
