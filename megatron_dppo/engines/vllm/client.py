"""One vLLM server."""

from __future__ import annotations

from typing import Any

from megatron_dppo.engines.servers.fields import part, policy_version, tokens_of, whole
from megatron_dppo.engines.servers.http import Deadlines, HttpClient
from megatron_dppo.engines.servers.updates import ADAPTER
from megatron_dppo.engines.vllm.weights import VLLMWeightUpdates
from megatron_dppo.engines.vllm.wire import decode_generation, generate_body, wire_id
from megatron_dppo.errors import ServerError
from megatron_dppo.rollout.server import GenerateRequest, Generation, ServerInfo

_GENERATE = "/inference/v1/generate"


class VLLMServer(VLLMWeightUpdates):
    """An ``InferenceServer`` that is vLLM.

    Needs 0.32 or later with ``VLLM_SERVER_DEV_MODE=1``, ``--enable-scale-out`` and ``--logprobs-mode
    processed_logprobs``; ``docs/engines.md`` has the whole list. ``url`` is the server's own address.

    Args:
        url: ``http://host:port``.
        api_key: the server's ``--api-key``. vLLM asks for it only where text is generated, not for control calls.
        deadlines: of each kind of call.
        adapter: whether requests are for the adapter that ``update_adapter`` gave, instead of the bare weights.
    """

    def __init__(
        self, url: str, *, api_key: str | None = None, deadlines: Deadlines | None = None, adapter: bool = False
    ) -> None:
        self._adapter = ADAPTER if adapter else None
        self._tells_sets = False
        self._deadlines = deadlines or Deadlines()
        connect = self._deadlines.connect
        self._http = HttpClient(url, api_key=api_key, connect_timeout=connect)
        # Connections of their own: control must not wait behind hundreds of responses. A new one each time: after an
        # error vLLM closes the connection that it has just promised to keep.
        self._admin = HttpClient(url, api_key=api_key, connections=8, connect_timeout=connect, keep_alive=False)
        self.url = self._http.url

    async def health(self) -> bool:
        """Whether its engine is alive; vLLM's check generates nothing, so that it is the same during a pause."""
        try:
            await self._admin.get("/health", timeout=self._deadlines.health)
        except ServerError:
            return False
        return True

    async def alive(self) -> bool:
        """Whether its HTTP process answers."""
        try:
            await self._admin.check("/version", self._deadlines)
        except ServerError:
            return False
        return True

    async def info(self) -> ServerInfo:
        """What it is."""
        version = part(await self._admin.check("/version", self._deadlines), self.url + "/version", "the answer")
        # A server that came back may be another one.
        self._known_config = None
        model = part((await self._config())["model_config"], self.url + "/server_info", "model_config")
        world = await self._get("/get_world_size")
        return ServerInfo(
            engine="vllm",
            engine_version=str(version.get("version")),
            model=str(model.get("model")),
            policy_version=policy_version(await self._weight_version()),
            max_context=whole(model.get("max_model_len") or 0, self.url + "/server_info", "max_model_len"),
            world_size=whole(world.get("world_size"), self.url + "/get_world_size", "world_size"),
        )

    async def tokenize(self, text: str) -> tuple[int, ...] | None:
        """The server's own tokens of a text; None = it has no tokenizer."""
        body = {"prompt": text, "add_special_tokens": False}
        try:
            answer = await self._http.post("/tokenize", body, timeout=self._deadlines.control, repeat=True)
        except ServerError as error:
            if error.status in (400, 404, 500, 501):
                return None
            raise
        return tokens_of(answer, self.url + "/tokenize")

    async def generate(self, request: GenerateRequest) -> Generation:
        """Continue a sequence. ``params.seed`` is not sent (see ``wire.sampling_params``).

        Raises:
            ServerError: no answer, a refusal, or an answer that lacks what was asked for (``ContractViolation``).
        """
        self._tells_sets |= request.params.return_sampling_mask
        body = generate_body(request, self._adapter)
        if self._tells_sets and not request.params.temperature:
            # Such a server refuses temperature 0: the most probable token is what top-k 1 leaves.
            body["sampling_params"] |= {"temperature": 1.0, "top_k": 1}
        try:
            answer = await self._http.post(_GENERATE, body, timeout=self._deadlines.generate)
        except ServerError as error:
            fix = _fix(error, body["sampling_params"]["logprobs"])
            if fix is None:
                raise
            raise ServerError(error.url, f"{error.detail}: {fix}", error.status) from error
        return decode_generation(answer, request, self.url + _GENERATE)

    async def abort(self, request_id: str | None = None) -> None:
        """Stop one request, or all; they return what they have.

        Of a request whose routed experts are wanted that is nothing: vLLM does not send those of an aborted one.
        """
        body: dict[str, Any] = {} if request_id is None else {"request_ids": [wire_id(request_id)]}
        await self._post("/abort_requests", body, self._deadlines.alive, repeat=True)

    async def close(self) -> None:
        """Free connections."""
        await self._http.close()
        await self._admin.close()


def _fix(error: ServerError, logprobs: int) -> str | None:
    """What to change, for refusals whose own words do not say it."""
    if error.status == 404:
        return "the server has no such call; it needs vLLM 0.32 or later"
    if error.status == 403:
        return "start the server with --enable-scale-out"
    if error.status == 400 and "max allowed" in error.detail:
        return f"start the server with --max-logprobs {logprobs} or more (one more than the Top-K)"
    return None
