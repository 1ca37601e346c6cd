"""APIs of the endpoint that sample responses."""

from __future__ import annotations

from megatron_dppo_agents.completions_api import CHAT_COMPLETIONS, COMPLETIONS
from megatron_dppo_agents.generate_api import GENERATE
from megatron_dppo_agents.messages_api import MESSAGES
from megatron_dppo_agents.protocol_record import Protocol
from megatron_dppo_agents.responses_api import RESPONSES

__all__ = ["MESSAGES", "PROTOCOLS", "Protocol"]


PROTOCOLS: tuple[Protocol, ...] = (
    CHAT_COMPLETIONS,
    COMPLETIONS,
    RESPONSES,
    MESSAGES,
    GENERATE,
)
