"""Tokens in, tokens out, as the clients of renderers and verifiers ask: ``/inference/v1/generate``."""

from typing import Any

from megatron_dppo_agents.agent_request import AgentRequest, CallError
from megatron_dppo_agents.agent_response import AgentResponse
from megatron_dppo_agents.protocol_record import Protocol, StoredResponses
from megatron_dppo_agents.request_fields import (
    is_token_list,
    read_bool,
    read_limit,
    read_model,
    read_stop,
    require_object,
    unfollowed_fields,
)

_SERVED = frozenset({"model", "token_ids", "sampling_params", "stream"})
_WITHOUT_EFFECT = frozenset({"cache_salt", "priority", "request_id", "data_parallel_rank"})
_SERVED_PARAMS = frozenset({"max_tokens", "stop_token_ids", "stop", "logprobs", "n"})
_PARAMS_WITHOUT_EFFECT = frozenset(
    {
        *(
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "detokenize",
            "output_kind",
            "include_stop_str_in_output",
        ),
        "routed_experts_prompt_start",
    }
)
_MAX_STOP_TOKENS = 64


def read_generate(data: object, _: StoredResponses | None = None) -> AgentRequest:
    """Read a body of ``/inference/v1/generate``."""
    body = require_object(data)
    tokens = body.get("token_ids")
    if not is_token_list(tokens):
        raise CallError("'token_ids' is missing, empty, or no list of token ids")
    params = body.get("sampling_params") or {}
    if not isinstance(params, dict):
        raise CallError(f"'sampling_params' = {params!r:.200}, expected an object")
    if params.get("n") not in (None, 1):
        raise CallError(f"'n' = {params['n']!r:.80} is not supported; ask again for another response")
    if params.get("logprobs") not in (None, 0, 1, False, True):
        raise CallError(f"'logprobs' = {params['logprobs']!r:.80}, expected 1: that of the sampled token")
    if read_bool(body, "stream"):
        raise CallError("'stream' is not supported; leave it out")
    stop = params.get("stop_token_ids") or []
    if stop and (not is_token_list(stop) or len(stop) > _MAX_STOP_TOKENS):
        raise CallError(f"'stop_token_ids' = {stop!r:.200}, expected a list of at most {_MAX_STOP_TOKENS} token ids")
    return AgentRequest(
        model=read_model(body),
        text=tuple(tokens),
        is_chat=False,
        limit=read_limit(params, "max_tokens"),
        stop_token_ids=tuple(stop),
        stop=read_stop(params, "stop"),
        returns_logprobs=True,
        ignored=(
            *unfollowed_fields(body, _SERVED, _WITHOUT_EFFECT),
            *unfollowed_fields(params, _SERVED_PARAMS, _PARAMS_WITHOUT_EFFECT),
        ),
    )


def generate_body(response: AgentResponse) -> dict[str, Any]:
    """Return the complete body of a response."""
    logprobs = [
        {"token": f"token_id:{token}", "logprob": value, "top_logprobs": []}
        for token, value in zip(response.token_ids, response.logprobs, strict=True)
    ]
    choice = {
        "index": 0,
        "token_ids": list(response.token_ids),
        "finish_reason": "length" if response.finish_reason == "length" else "stop",
        "logprobs": {"content": logprobs},
    }
    return {"request_id": f"gen-{response.name}", "choices": [choice]}


GENERATE = Protocol("/inference/v1/generate", read_generate, generate_body, None)
