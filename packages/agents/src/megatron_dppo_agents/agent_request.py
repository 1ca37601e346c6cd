"""A request of an agent, in the same form for every API, and the errors of a rejected one."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_dppo_conversations.rules import Message

MODEL = "policy"
"""Name of the model if a request names none."""


class CallError(Exception):
    """A rejected call, in the form of OpenAI's errors."""

    def __init__(self, message: str, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status = status
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        """JSON body of the error."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


class ContextLengthError(CallError):
    """A call that does not fit into the sequence; its message begins with the ``size`` of the conversation."""

    def __init__(self, size: str, max_tokens: int) -> None:
        super().__init__(
            f"{size}, and together with a response it may have {max_tokens} tokens (max_new_tokens)",
            400,
            "context_length_exceeded",
        )


@dataclass(frozen=True, kw_only=True)
class AgentRequest:
    """One request for a response of the policy."""

    model: str
    messages: tuple[Message, ...] = ()
    text: str | tuple[int, ...] = ""
    """Prompt of a completion, which has no messages: a string or token ids."""
    is_chat: bool
    tools: tuple[Mapping[str, Any], ...] = ()
    reads_tool_calls: bool = False
    """True if tool calls in the response are parsed."""
    forced_tool: str | None = None
    """Name of the tool that the response has to call; empty for any of them. None leaves the choice to the policy."""
    num_instructions: int = 0
    """Number of messages at the start that are not part of the conversation: instructions of this call alone."""
    makes_parallel_calls: bool = True
    """False if a response may have one tool call at most."""
    limit: int | None = None
    """Maximum number of response tokens. None: no limit but those of the run."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the response, besides those of the model."""
    stop: tuple[str, ...] = ()
    """Texts that end the response. It is returned up to the first of them."""
    returns_logprobs: bool = False
    returns_token_ids: bool = False
    stream: bool = False
    stream_usage: bool = False
    ignored: tuple[str, ...] = ()

    @property
    def min_tokens(self) -> int:
        """Lower bound of the number of prompt tokens: a message or a token id has one at least."""
        return max(len(self.messages), len(self.text) if isinstance(self.text, tuple) else 0)

    @property
    def texts(self) -> Iterator[str]:
        """All text that is rendered or encoded."""
        if isinstance(self.text, str):
            yield self.text
        for message in self.messages:
            yield message["content"]
            yield message.get("reasoning_content", "")
            if "tool_calls" in message:
                yield json.dumps(message["tool_calls"], ensure_ascii=False)
        if self.tools:
            yield json.dumps(self.tools, ensure_ascii=False)
