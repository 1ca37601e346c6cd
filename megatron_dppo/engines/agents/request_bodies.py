"""Requests of agents: bodies of OpenAI's chat completions and completions, checked and normalized."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_dppo.engines.agents.formats.base import make_tool_call

_ROLES = ("system", "user", "assistant", "tool")
_MAX_MODEL_NAME = 256
"""Maximum length of the model's name, which each chunk of a stream repeats."""
_IGNORED_SETTINGS: Mapping[str, Any] = {
    "temperature": None,
    "top_p": None,
    "top_k": None,
    "min_p": None,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": None,
    "seed": None,
    "stop": None,
    "response_format": {"type": "text"},
    "reasoning_effort": None,
    "suffix": None,
}
"""Settings that would change the sampling distribution, with the value besides None that has no effect.

They are ignored: training computes each token's log-probability under the settings of the run.
"""


class CallError(Exception):
    """A rejected call, in the form of OpenAI's errors.

    Args:
        message: The problem and its fix.
        status: HTTP status.
        code: Machine-readable code.
    """

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
    """A call that does not fit into the sequence.

    Args:
        size: Size of the conversation, as the beginning of the message.
        max_tokens: Maximum number of tokens.
    """

    def __init__(self, size: str, max_tokens: int) -> None:
        super().__init__(
            f"{size}, and together with a response it may have {max_tokens} tokens (rollout.max_new_tokens)",
            400,
            "context_length_exceeded",
        )


Message = dict[str, Any]
"""Message with ``role`` and ``content`` (a string).

Optional are ``reasoning_content``, ``tool_calls``, ``tool_call_id`` and ``name``.

The arguments of a tool call are an object if they are JSON.
"""


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
    limit: int | None = None
    """Maximum number of response tokens. None: no limit but those of the run."""
    stream: bool = False
    stream_usage: bool = False
    ignored: int = 0
    """Number of settings that are ignored."""

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


def read_chat(data: object) -> AgentRequest:
    """Read a body of ``/v1/chat/completions``.

    Raises:
        CallError: The body is invalid, or asks for something unsupported.
    """
    body = _require_object(data)
    common = _read_common(body)
    if not isinstance(body.get("messages"), list) or not body["messages"]:
        raise CallError("'messages' is missing, empty or no list")
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise CallError(f"'tools' = {tools!r:.200}, expected a list of objects")
    choice = body.get("tool_choice")
    # ``required`` or a named tool would constrain sampling: ignored and counted, like the settings above.
    is_forced = choice is not None and choice not in ("auto", "none")
    if body.get("functions") or body.get("function_call"):
        raise CallError("'functions' and 'function_call' are not supported; use 'tools'")
    return AgentRequest(
        messages=tuple(_read_message(message, index) for index, message in enumerate(body["messages"])),
        is_chat=True,
        tools=tuple(tools),
        reads_tool_calls=bool(tools) and choice != "none",
        limit=_limit(body, "max_completion_tokens", "max_tokens"),
        model=common.model,
        stream=common.stream,
        stream_usage=common.stream_usage,
        ignored=common.ignored + is_forced,
    )


def read_completion(data: object) -> AgentRequest:
    """Read a body of ``/v1/completions``.

    Raises:
        CallError: The body is invalid, or asks for something unsupported.
    """
    body = _require_object(data)
    common = _read_common(body)
    text = body.get("prompt")
    # OpenAI accepts a list of prompts; a list of one is one prompt.
    if isinstance(text, list) and len(text) == 1 and isinstance(text[0], str | list):
        text = text[0]
    if isinstance(text, list) and text and all(type(token) is int and token >= 0 for token in text):
        text = tuple(text)
    if not isinstance(text, str | tuple) or not text:
        raise CallError("'prompt' is missing, empty, or not one string or one list of token ids")
    if body.get("echo"):
        raise CallError("'echo' is not supported; leave it out")
    return AgentRequest(text=text, is_chat=False, limit=_limit(body, "max_tokens"), **vars(common))


@dataclass(frozen=True)
class _CommonFields:
    """Fields of both kinds of bodies; see ``AgentRequest``."""

    model: str
    stream: bool
    stream_usage: bool
    ignored: int


def _require_object(data: object) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise CallError("the body is no JSON object")
    return data


def _read_common(body: Mapping[str, Any]) -> _CommonFields:
    for name in ("n", "best_of"):
        if body.get(name) not in (None, 1):
            raise CallError(
                f"{name!r} = {body[name]!r:.80} is not supported, since an episode is one sequence; ask again"
            )
    if body.get("logprobs") not in (None, False) or body.get("top_logprobs"):
        raise CallError("'logprobs' are not returned; leave them out")
    model = body.get("model") or ""
    if not isinstance(model, str) or len(model) > _MAX_MODEL_NAME:
        raise CallError(f"'model' = {model!r:.80}, expected a string of at most {_MAX_MODEL_NAME} characters")
    stream = body.get("stream") or False
    if not isinstance(stream, bool):
        raise CallError(f"'stream' = {stream!r:.80}, expected true or false")
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise CallError(f"'stream_options' = {options!r:.80}, expected an object")
    ignored = [name for name, neutral in _IGNORED_SETTINGS.items() if body.get(name) not in (None, neutral, [], {})]
    return _CommonFields(
        model=model,
        stream=stream,
        stream_usage=bool(options.get("include_usage")),
        ignored=len(ignored),
    )


def _limit(body: Mapping[str, Any], *names: str) -> int | None:
    limits = [(name, body[name]) for name in names if body.get(name) is not None]
    for name, value in limits:
        if type(value) is not int or value < 1:
            raise CallError(f"{name!r} = {value!r:.80}, expected a whole number above 0")
    return min((value for _, value in limits), default=None)


def _read_message(message: Any, index: int) -> Message:
    role = message.get("role") if isinstance(message, dict) else None
    # OpenAI's newer name of the same role.
    role = "system" if role == "developer" else role
    if role not in _ROLES:
        raise CallError(f"messages[{index}] has the role {role!r:.80}; expected {', '.join(_ROLES)}")
    result: Message = {"role": role, "content": _read_content(message.get("content"), index)}
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise CallError(f"messages[{index}].tool_calls = {calls!r:.80}, expected a list")
    if calls:
        result["tool_calls"] = [_read_tool_call(call, index) for call in calls]
    result |= {name: message[name] for name in ("tool_call_id", "name") if isinstance(message.get(name), str)}
    if role == "assistant":
        # vLLM and litellm have either name.
        reasoning = [message[name] for name in ("reasoning_content", "reasoning") if isinstance(message.get(name), str)]
        if any(reasoning):
            result["reasoning_content"] = next(text for text in reasoning if text)
    return result


def _read_content(content: Any, index: int) -> str:
    parts = [{"type": "text", "text": content or ""}] if content is None or isinstance(content, str) else content
    if not isinstance(parts, list):
        raise CallError(f"messages[{index}].content = {content!r:.200}, expected a string or a list of parts")
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise CallError(f"messages[{index}].content has a part that is no text; the policy reads text alone")
    return "".join(part["text"] for part in parts)


def _read_tool_call(call: Any, index: int) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise CallError(f"messages[{index}].tool_calls has an entry without a function's name")
    arguments = function.get("arguments") or "{}"
    call_id = call.get("id") or ""
    if not isinstance(arguments, str | dict) or not isinstance(call_id, str):
        raise CallError(f"messages[{index}].tool_calls: 'id' and 'function.arguments' must be strings")
    return make_tool_call(call_id, function["name"], arguments)
