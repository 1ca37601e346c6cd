"""What an agent sends: bodies of OpenAI's chat completions and completions, checked and in one form."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_ROLES = ("system", "user", "assistant", "tool")


_OWN_SAMPLING: Mapping[str, Any] = {
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
"""Settings that would change what is sampled, and the value beside None that changes nothing. Training takes each
token's log-probability as the run's own settings give it, so they stay the run's."""


class CallError(Exception):
    """A call that is refused, in the form of OpenAI's errors.

    Args:
        message: what is wrong, and what to do.
        status: of HTTP.
        code: a word for programs.
    """

    def __init__(self, message: str, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status, self.code = status, code

    @property
    def body(self) -> dict[str, Any]:
        """As JSON."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


Message = dict[str, Any]
"""``role``, ``content`` (a string), and where there are any ``tool_calls``, ``tool_call_id``, ``name``; the arguments
of a tool call as an object, where they are JSON"""


@dataclass(frozen=True, kw_only=True)
class AgentRequest:
    """One request for an answer."""

    model: str
    messages: tuple[Message, ...] = ()
    text: str | tuple[int, ...] = ""
    """of a completion, which has no messages"""
    is_chat: bool
    tools: tuple[Mapping[str, Any], ...] = ()
    reads_tool_calls: bool = False
    """whether tool calls in the answer are told apart from its text"""
    limit: int | None = None
    """tokens of the answer at most"""
    stream: bool = False
    stream_usage: bool = False
    ignored: int = 0
    """settings that have no effect"""


def read_chat(body: Any) -> AgentRequest:
    """A body of ``/v1/chat/completions``.

    Raises:
        CallError: it is none, or asks for what there is not.
    """
    common = _read_common(body)
    if not isinstance(body.get("messages"), list) or not body["messages"]:
        raise CallError("'messages' is missing, empty or no list")
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise CallError(f"'tools' = {tools!r:.200}, expected a list of objects")
    choice = body.get("tool_choice")
    forced = choice is not None and choice not in ("auto", "none")
    if body.get("functions") or body.get("function_call"):
        raise CallError("'functions' and 'function_call' are not supported; use 'tools'")
    return AgentRequest(
        messages=tuple(_read_message(message, place) for place, message in enumerate(body["messages"])),
        is_chat=True,
        tools=tuple(tools),
        reads_tool_calls=bool(tools) and choice != "none",
        limit=_limit(body, "max_completion_tokens", "max_tokens"),
        **common | {"ignored": common["ignored"] + forced},
    )


def read_completion(body: Any) -> AgentRequest:
    """A body of ``/v1/completions``.

    Raises:
        CallError: it is none, or asks for what there is not.
    """
    common = _read_common(body)
    text = body.get("prompt")
    if isinstance(text, list) and len(text) == 1 and isinstance(text[0], str | list):
        text = text[0]
    if isinstance(text, list) and text and all(type(token) is int and token >= 0 for token in text):
        text = tuple(text)
    if not isinstance(text, str | tuple) or not text:
        raise CallError("'prompt' is missing, empty, or not one string or one list of token ids")
    if body.get("echo"):
        raise CallError("'echo' is not supported; leave it out")
    return AgentRequest(text=text, is_chat=False, limit=_limit(body, "max_tokens"), **common)


def _read_common(body: Any) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise CallError("the body is no JSON object")
    for name in ("n", "best_of"):
        if body.get(name) not in (None, 1):
            raise CallError(f"{name!r} = {body[name]!r} is not supported, since an episode is one sequence; ask again")
    if body.get("logprobs") not in (None, False) or body.get("top_logprobs"):
        raise CallError("'logprobs' are not returned; leave them out")
    options = body.get("stream_options") or {}
    ignored = [name for name, same in _OWN_SAMPLING.items() if body.get(name) not in (None, same, [], {})]
    return {
        "model": str(body.get("model", "")),
        "stream": bool(body.get("stream")),
        "stream_usage": isinstance(options, dict) and bool(options.get("include_usage")),
        "ignored": len(ignored),
    }


def _limit(body: Mapping[str, Any], *names: str) -> int | None:
    found = [(name, body[name]) for name in names if body.get(name) is not None]
    for name, value in found:
        if type(value) is not int or value < 1:
            raise CallError(f"{name!r} = {value!r}, expected a whole number above 0")
    return min((value for _, value in found), default=None)


def _read_message(message: Any, place: int) -> Message:
    role = message.get("role") if isinstance(message, dict) else None
    role = "system" if role == "developer" else role
    if role not in _ROLES:
        raise CallError(f"messages[{place}] has the role {role!r}; expected {', '.join(_ROLES)}")
    found: Message = {"role": role, "content": _text(message.get("content"), place)}
    calls = message.get("tool_calls") or []
    if calls:
        found["tool_calls"] = [_read_tool_call(call, place) for call in calls]
    found |= {name: message[name] for name in ("tool_call_id", "name") if isinstance(message.get(name), str)}
    return found


def _text(content: Any, place: int) -> str:
    parts = [{"type": "text", "text": content or ""}] if content is None or isinstance(content, str) else content
    if not isinstance(parts, list):
        raise CallError(f"messages[{place}].content = {content!r:.200}, expected a string or a list of parts")
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise CallError(f"messages[{place}].content has a part that is no text; the policy reads text alone")
    return "".join(part["text"] for part in parts)


def _read_tool_call(call: Any, place: int) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise CallError(f"messages[{place}].tool_calls has an entry without a function's name")
    arguments = function.get("arguments") or "{}"
    return tool_call(str(call.get("id", "")), function["name"], arguments)


def tool_call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """A tool call as templates take it."""
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
            arguments = parsed if isinstance(parsed, dict) else arguments
        except ValueError:
            pass  # a model may have called it so; the template gets the text
    return {"type": "function", "id": call_id, "function": {"name": name, "arguments": arguments}}


def identity(messages: Sequence[Message]) -> list[str]:
    """What makes messages the same: clients leave blanks at the edges of an answer away, and write arguments anew."""
    return [
        json.dumps(
            [
                message["role"],
                message["content"].strip() if message["role"] == "assistant" else message["content"],
                [call["function"] for call in message.get("tool_calls", ())],
            ],
            sort_keys=True,
        )
        for message in messages
    ]


_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def split_tool_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """The text before the first call, and the calls; all of it text where a call is no such JSON."""
    content, *rest = text.split(_OPEN)
    blocks = [part.split(_CLOSE)[0] for part in rest if _CLOSE in part]
    calls = [_read(block) for block in blocks]
    if not blocks or len(blocks) < len(rest) or None in calls:
        return text, []
    return content.strip(), [call for call in calls if call is not None]


def _read(block: str) -> dict[str, Any] | None:
    try:
        found = json.loads(block, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    return tool_call(f"call_{secrets.token_hex(12)}", found["name"], arguments)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
