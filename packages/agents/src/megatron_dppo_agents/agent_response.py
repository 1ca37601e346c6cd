"""The response of the policy to one call, before it has the form of an API."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_dppo_agents.agent_request import AgentRequest
from megatron_dppo_conversations.rules import Message


@dataclass(frozen=True, kw_only=True)
class AgentResponse:
    """Response of the policy to one call."""

    call: AgentRequest
    message: Message
    """The response as a message of the conversation."""
    token_ids: tuple[int, ...]
    """Sampled tokens."""
    prompt_token_ids: tuple[int, ...]
    """Tokens before them."""
    logprobs: tuple[float, ...] = ()
    """Log-probabilities of the sampled tokens, if the call asks for them."""
    token_texts: tuple[str, ...] = ()
    """Text of each sampled token, if the call asks for log-probabilities."""
    finish_reason: str
    """Finish reason of OpenAI's API: ``stop``, ``length`` or ``tool_calls``."""
    stop_string: str | None = None
    """Stop string of the call that ended the response."""
    name: str = field(default_factory=lambda: secrets.token_hex(12))

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens before the response."""
        return len(self.prompt_token_ids)

    @property
    def completion_tokens(self) -> int:
        """Number of sampled tokens."""
        return len(self.token_ids)

    @property
    def text(self) -> str:
        """Content of the message."""
        return self.message["content"]

    @property
    def reasoning(self) -> str:
        """Thoughts that were taken out of the content."""
        return self.message.get("reasoning_content", "")

    @property
    def tool_calls(self) -> Sequence[dict[str, Any]]:
        """Tool calls of the response."""
        return self.message.get("tool_calls", ())
