"""The record of a protocol, and what several protocols share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_dppo.engines.agents.agent_request import AgentRequest, CallError, Message
from megatron_dppo.engines.agents.agent_response import AgentResponse

StoredMessages = MutableMapping[str, Sequence[Message]]
"""Messages of an episode's earlier responses by their ids, for ``previous_response_id``."""


def openai_error(error: CallError) -> dict[str, Any]:
    """Return the body of an error in OpenAI's form."""
    return error.body


@dataclass(frozen=True)
class Protocol:
    """One API of the endpoint."""

    path: str
    read: Callable[[object, StoredMessages], AgentRequest]
    """Reads a body. Raises ``CallError``."""
    body: Callable[[AgentResponse], dict[str, Any]]
    """Returns the body of a response."""
    events: Callable[[AgentResponse], Iterator[bytes]] | None
    """Yields the server-sent events of a complete response. None: ``read`` refuses streams."""
    error_body: Callable[[CallError], dict[str, Any]] = openai_error
    """Returns the body of an error, as the clients of the API read it."""
    store: Callable[[AgentResponse, StoredMessages], None] | None = None
    """Keeps the messages up to a response. None: the API has no conversations of its own."""


def named_event(name: str, fields: dict[str, Any]) -> bytes:
    """Return a server-sent event with its name, both as a line of its own and as the field ``type``."""
    return f"event: {name}\ndata: {json.dumps({'type': name, **fields})}\n\n".encode()


def arguments_text(call: dict[str, Any]) -> str:
    """Return the arguments of a tool call as JSON."""
    return json.dumps(call["function"]["arguments"])
