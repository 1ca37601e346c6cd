"""APIs of the endpoint that sample responses."""

from __future__ import annotations

from megatron_dppo.engines.agents.generate_api import GENERATE
from megatron_dppo.engines.agents.messages_api import MESSAGES
from megatron_dppo.engines.agents.protocol_record import Protocol
from megatron_dppo.engines.agents.request_bodies import read_chat, read_completion
from megatron_dppo.engines.agents.response_bodies import response_body, stream_events
from megatron_dppo.engines.agents.responses_api import RESPONSES

__all__ = ["MESSAGES", "PROTOCOLS", "Protocol"]


PROTOCOLS: tuple[Protocol, ...] = (
    Protocol("/v1/chat/completions", lambda body, _: read_chat(body), response_body, stream_events),
    Protocol("/v1/completions", lambda body, _: read_completion(body), response_body, stream_events),
    RESPONSES,
    MESSAGES,
    GENERATE,
)
