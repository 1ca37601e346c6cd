"""Requests of agents: bodies of OpenAI's chat completions and completions, checked and normalized."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from megatron_dppo.engines.agents.formats.base import make_tool_call

_ROLES = ("system", "user", "assistant", "tool")
_MAX_MODEL_NAME = 256
"""Maximum length of the model's name, which each chunk of a stream repeats."""
_MAX_STOPS = 16
"""Maximum number of stop strings."""
_MAX_STOP_LENGTH = 256
"""Maximum length of a stop string in characters."""
MODEL = "policy"
"""Name of the model if a request names none."""
_IGNORED_SETTINGS: Mapping[str, Any] = {
    "temperature": None,
    "top_p": None,
    "top_k": None,
    "min_p": None,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": None,
    "seed": None,
    "repetition_penalty": 1,
    "reasoning_effort": None,
    "reasoning": None,
    "thinking": {"type": "disabled"},
    "verbosity": None,
    "chat_template_kwargs": None,
    "suffix": None,
    "prediction": None,
    "web_search_options": None,
    "audio": None,
    "modalities": ["text"],
    "truncation": "disabled",
    "max_tool_calls": None,
    "context_management": None,
    "output_config": None,
}
"""Settings that would change the response, with the value besides None that has no effect.

They are ignored: training computes each token's log-probability under the settings of the run.
"""
_COMMON_FIELDS = frozenset(
    {
        *("model", "n", "best_of", "logprobs", "top_logprobs", "stream", "stream_options", "max_tokens"),
        *("return_token_ids", "stop"),
    }
)
_CHAT_FIELDS = _COMMON_FIELDS | {
    *("messages", "tools", "tool_choice", "parallel_tool_calls", "response_format", "max_completion_tokens"),
    *("functions", "function_call"),
}
_COMPLETION_FIELDS = _COMMON_FIELDS | {"prompt", "echo"}
_WITHOUT_EFFECT = frozenset(
    {
        *("user", "store", "metadata", "service_tier", "prompt_cache_key", "prompt_cache_retention"),
        "safety_identifier",
    }
)
"""Fields that change nothing in a response, here as at OpenAI."""


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
    """Names of the settings that are ignored."""

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
    body = require_object(data)
    common = _read_common(body, _CHAT_FIELDS)
    require_text_format(body.get("response_format"), "response_format")
    if not isinstance(body.get("messages"), list) or not body["messages"]:
        raise CallError("'messages' is missing, empty or no list")
    tools = read_tools(body)
    choice = body.get("tool_choice")
    logprobs = read_bool(body, "logprobs")
    forced = None
    if choice not in (None, "auto", "none", "required"):
        function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
        forced = function.get("name") if isinstance(function, dict) else choice
    if body.get("functions") or body.get("function_call"):
        raise CallError("'functions' and 'function_call' are not supported; use 'tools'")
    return AgentRequest(
        messages=tuple(_read_message(message, index) for index, message in enumerate(body["messages"])),
        is_chat=True,
        tools=tuple(tools),
        reads_tool_calls=bool(tools) and choice != "none",
        forced_tool=read_forced_tool("" if choice == "required" else forced, tools),
        makes_parallel_calls=body.get("parallel_tool_calls") is not False,
        limit=read_limit(body, "max_completion_tokens", "max_tokens"),
        model=common.model,
        stream=common.stream,
        stream_usage=common.stream_usage,
        stop=common.stop,
        returns_logprobs=logprobs,
        returns_token_ids=common.returns_token_ids,
        ignored=common.ignored,
    )


def read_completion(data: object) -> AgentRequest:
    """Read a body of ``/v1/completions``.

    Raises:
        CallError: The body is invalid, or asks for something unsupported.
    """
    body = require_object(data)
    common = _read_common(body, _COMPLETION_FIELDS)
    if body.get("logprobs") not in (None, False):
        raise CallError("'logprobs' are returned by /v1/chat/completions alone; leave them out")
    text = body.get("prompt")
    # OpenAI accepts a list of prompts; a list of one is one prompt.
    if isinstance(text, list) and len(text) == 1 and isinstance(text[0], str | list):
        text = text[0]
    if is_token_list(text):
        text = tuple(text)
    if not isinstance(text, str | tuple) or not text:
        raise CallError("'prompt' is missing, empty, or not one string or one list of token ids")
    if body.get("echo"):
        raise CallError("'echo' is not supported; leave it out")
    return AgentRequest(text=text, is_chat=False, limit=read_limit(body, "max_tokens"), **vars(common))


@dataclass(frozen=True)
class _CommonFields:
    """Fields of both kinds of bodies; see ``AgentRequest``."""

    model: str
    stream: bool
    stream_usage: bool
    returns_token_ids: bool
    stop: tuple[str, ...]
    ignored: tuple[str, ...]


def require_object(data: object) -> dict[str, Any]:
    """Return a body.

    Raises:
        CallError: It is no object.
    """
    if not isinstance(data, dict):
        raise CallError("the body is no JSON object")
    return data


def _read_common(body: Mapping[str, Any], served: frozenset[str]) -> _CommonFields:
    for name in ("n", "best_of"):
        if body.get(name) not in (None, 1):
            raise CallError(
                f"{name!r} = {body[name]!r:.80} is not supported: a call has one response; send it again for another"
            )
    if body.get("top_logprobs"):
        raise CallError(
            f"'top_logprobs' = {body['top_logprobs']!r:.80} is not supported; 'logprobs': true returns those of the "
            "sampled tokens"
        )
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise CallError(f"'stream_options' = {options!r:.80}, expected an object")
    return _CommonFields(
        model=read_model(body),
        stream=read_bool(body, "stream"),
        stream_usage=bool(options.get("include_usage")),
        returns_token_ids=read_bool(body, "return_token_ids"),
        stop=read_stop(body, "stop"),
        ignored=unfollowed_fields(body, served, _WITHOUT_EFFECT),
    )


def read_stop(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return the stop strings of a body; empty if there are none.

    Raises:
        CallError: They are no strings with text, or too many or too long.
    """
    value = body.get(name)
    strings = [value] if isinstance(value, str) else value or []
    is_list = isinstance(strings, list) and all(isinstance(each, str) and each for each in strings)
    if not is_list or len(strings) > _MAX_STOPS or any(len(each) > _MAX_STOP_LENGTH for each in strings):
        raise CallError(
            f"{name!r} = {value!r:.200}, expected a string or a list of at most {_MAX_STOPS} strings, each of 1 to "
            f"{_MAX_STOP_LENGTH} characters"
        )
    return tuple(strings)


def unfollowed_fields(
    body: Mapping[str, Any], served: frozenset[str], without_effect: frozenset[str]
) -> tuple[str, ...]:
    """Return the names of a body's fields that are accepted and not followed.

    Args:
        body: The body.
        served: Fields that are followed, or refused elsewhere.
        without_effect: Fields that change nothing in a response.

    Returns:
        ``unknown_field`` for each field that no API has, because clients choose those names.
    """
    fields = [name for name, value in body.items() if value not in (None, [], {})]
    remaining = [name for name in fields if name not in served and name not in without_effect]
    return tuple(
        name if name in _IGNORED_SETTINGS else "unknown_field"
        for name in remaining
        if name not in _IGNORED_SETTINGS or body[name] != _IGNORED_SETTINGS[name]
    )


def require_text_format(output_format: Any, name: str) -> None:
    """Check that a response may be any text.

    Raises:
        CallError: A form is asked for.
    """
    kind = output_format.get("type") if isinstance(output_format, dict) else output_format
    if kind not in (None, "text"):
        raise CallError(
            f"{name!r} = {kind!r:.80} is not supported, since a grammar would change the probabilities of the tokens; "
            "describe the form in a message, or give a tool for it"
        )


def is_token_list(value: object) -> TypeGuard[list[int]]:
    """Return True for a list of token ids that is not empty."""
    return isinstance(value, list) and bool(value) and all(type(token) is int and token >= 0 for token in value)


def read_tools(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tools; empty if there are none.

    Raises:
        CallError: They are no list of objects.
    """
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise CallError(f"'tools' = {tools!r:.200}, expected a list of objects")
    return tools


def read_forced_tool(name: Any, tools: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the tool that a response has to call; see ``AgentRequest.forced_tool``.

    Args:
        name: Name of a tool, an empty string for any of them, or None. Anything else is an unknown form of a choice.
        tools: Tools of the request in the form of chat completions.

    Raises:
        CallError: There is no such tool, or the choice has an unknown form.
    """
    if name is None:
        return None
    functions = [tool.get("function") for tool in tools]
    names = [function.get("name") for function in functions if isinstance(function, dict)]
    if not isinstance(name, str) or (name and name not in names) or not names:
        known = ", ".join(map(repr, names)) or "the request has none"
        raise CallError(
            f"'tool_choice' = {name!r:.200}, expected auto, none, any tool, or the name of one of the 'tools' "
            f"({known:.200})"
        )
    # Of one tool the name is known.
    return names[0] if len(names) == 1 else name


def make_tool(tool: Mapping[str, Any], schema_field: str) -> dict[str, Any]:
    """Return a tool of another API in the form of chat completions.

    Args:
        tool: The tool, with a name.
        schema_field: Field with the JSON schema of its parameters.
    """
    function = {"name": tool["name"], "description": tool.get("description") or ""}
    return {"type": "function", "function": function | {"parameters": tool.get(schema_field) or {"type": "object"}}}


def read_model(body: Mapping[str, Any]) -> str:
    """Return the name of the model; empty if there is none.

    Raises:
        CallError: It is no string, or too long.
    """
    model = body.get("model") or ""
    if not isinstance(model, str) or len(model) > _MAX_MODEL_NAME:
        raise CallError(f"'model' = {model!r:.80}, expected a string of at most {_MAX_MODEL_NAME} characters")
    return model


def read_bool(body: Mapping[str, Any], name: str) -> bool:
    """Return a flag; False if it is missing.

    Raises:
        CallError: It is no boolean.
    """
    value = body.get(name) or False
    if not isinstance(value, bool):
        raise CallError(f"{name!r} = {value!r:.80}, expected true or false")
    return value


def read_limit(body: Mapping[str, Any], *names: str) -> int | None:
    """Return the lowest of some limits; None if there is none.

    Raises:
        CallError: One is no whole number above 0.
    """
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
    return text_of_parts(content, ["text"], f"messages[{index}].content")


def text_of_parts(content: Any, types: Collection[str], name: str) -> str:
    """Return the text of a content: a string, or a list of parts of some types.

    Raises:
        CallError: A part is no text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise CallError(f"{name} = {content!r:.200}, expected a string or a list of parts")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in types or not isinstance(part.get("text"), str):
            raise CallError(f"{name} has a part that is no text (type {kind!r:.80}); the policy reads text alone")
    return "".join(part["text"] for part in content)


def _read_tool_call(call: Any, index: int) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise CallError(f"messages[{index}].tool_calls has an entry without a function's name")
    arguments = function.get("arguments") or "{}"
    call_id = call.get("id") or ""
    if not isinstance(arguments, str | dict) or not isinstance(call_id, str):
        raise CallError(f"messages[{index}].tool_calls: 'id' and 'function.arguments' must be strings")
    return make_tool_call(call_id, function["name"], arguments)
