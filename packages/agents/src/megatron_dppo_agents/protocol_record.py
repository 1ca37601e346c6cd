"""The record of a protocol, and what several protocols share."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_dppo_agents.agent_request import AgentRequest
from megatron_dppo_agents.agent_response import AgentResponse
from megatron_dppo_conversations.rules import Message


@dataclass
class StoredResponses:
    """Earlier responses of an episode, which its calls may name by id."""

    messages: dict[str, Sequence[Message]] = field(default_factory=dict)
    """Messages up to each response by its id, for ``previous_response_id``."""
    items: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Output items by their ids, for ``item_reference``."""


@dataclass(frozen=True)
class Protocol:
    """One API of the endpoint."""

    path: str
    read: Callable[[object, StoredResponses], AgentRequest]
    """Reads a body. Raises ``CallError``."""
    body: Callable[[AgentResponse], dict[str, Any]]
    events: Callable[[AgentResponse], Iterator[bytes]] | None
    """Yields the server-sent events of a complete response. None: ``read`` refuses streams."""
    store: Callable[[AgentResponse, StoredResponses], None] | None = None
    """Keeps the messages up to a response. None: the API has no conversations of its own."""


def named_event(name: str, fields: dict[str, Any]) -> bytes:
    """Return a server-sent event with its name, both as a line of its own and as the field ``type``."""
    return f"event: {name}\ndata: {json.dumps({'type': name, **fields})}\n\n".encode()


def arguments_text(call: dict[str, Any]) -> str:
    """Return the arguments of a tool call as JSON."""
    return json.dumps(call["function"]["arguments"])


def logprob_entries(response: AgentResponse) -> list[dict[str, Any]]:
    """Return the log-probabilities of all sampled tokens, those of thoughts, calls and the end included."""
    tokens = zip(response.token_texts, response.logprobs, strict=True)
    return [
        {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []} for text, value in tokens
    ]
