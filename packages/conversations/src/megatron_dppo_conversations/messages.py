"""Chat messages of data rows: what a list of messages may hold, and the errors that name other formats."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_dppo_conversations.formats.schemas import Tools
from megatron_dppo_conversations.rules import read_row_calls

Messages = list[dict[str, Any]]
ROLES = ("system", "developer", "user", "assistant", "tool")
_MEDIA_LISTS = ("images", "videos", "audios")
_MEDIA = (*_MEDIA_LISTS, "image", "video", "audio")
_TEXT_ONLY = "the model is trained on text alone. Leave out rows with images, video or audio"
_SHAREGPT = "ShareGPT rows, with 'from' and 'value'. Convert them to 'role' (system, user, assistant) and 'content'"


def parse_messages(text: str) -> Messages | None:
    """Return the messages that a text holds as JSON; None for other text, ``ValueError`` if Python printed them."""
    stripped = text.strip()
    # A cheap test first, because most prompts are no JSON.
    if not (stripped.startswith("[") and stripped.endswith("]") and ("role" in stripped or "from" in stripped)):
        return None
    try:
        value = json.loads(stripped)
    except (ValueError, RecursionError):
        if _is_python_list(stripped):
            raise ValueError(
                "the text is a list of messages as Python prints it (str), not JSON. Write it with json.dumps"
            ) from None
        return None
    is_list = isinstance(value, list) and bool(value)
    return (
        value if is_list and all(isinstance(each, dict) and {"role", "from"} & each.keys() for each in value) else None
    )


def _is_python_list(text: str) -> bool:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return False
    return isinstance(value, list) and all(isinstance(each, dict) and "role" in each for each in value)


def messages_problem(value: Sequence[object]) -> str:
    """Return why a list is no list of messages; an empty string if it is one."""
    messages: list[Mapping[str, Any]] = []
    for index, message in enumerate(value):
        if not isinstance(message, Mapping):
            return f"entry {index} is {message!r:.80}, expected a message {{role, content}}"
        if "role" not in message and "from" in message:
            return f"these are {_SHAREGPT}"
        role = message.get("role")
        if role not in ROLES:
            return f"message {index} has the role {role!r}; expected one of {', '.join(ROLES)}"
        content = message.get("content")
        if isinstance(content, list):
            kinds = (part.get("type") for part in content if isinstance(part, Mapping))
            if media := next((kind for kind in kinds if kind not in ("text", None)), None):
                return f"message {index} has a part of type {media!r}, and {_TEXT_ONLY}"
            return (
                f"message {index} has a list of parts as content; the policy reads text, so join the text of the parts"
            )
        # OpenAI's form of a message of tool calls alone.
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            return f"message {index} has the content {content!r:.80}, expected text"
        messages.append(message)
    if not any((message["content"] or "").strip() or message.get("tool_calls") for message in messages):
        return "all messages are empty"
    if all(message["role"] == "assistant" for message in messages):
        return "there is no message before the assistant's"
    return ""


def media_problem(record: Mapping[str, object]) -> str:
    """Return why a row is not text alone; an empty string if it is.

    Columns are those of TRL, verl and Hugging Face datasets. A text in ``image`` may name a container.
    """
    for name in _MEDIA:
        value = record.get(name)
        first = value[0] if isinstance(value, list) and value else value
        is_file = isinstance(first, Mapping) and bool({"bytes", "path", "url"} & first.keys())
        if is_file or (name in _MEDIA_LISTS and isinstance(value, list) and value):
            return f"field {name!r} is not empty, and {_TEXT_ONLY}"
    return ""


def clean_messages(value: Sequence[Mapping[str, object]], tools: Tools = (), *, is_columnar: bool = False) -> Messages:
    """Return messages in the form that chat templates expect.

    Empty fields leave: a Parquet file gives every message, and every tool call, the fields of all. Arguments of tool
    calls that are JSON as text become objects.

    Args:
        value: Messages without a problem (``messages_problem``).
        tools: Tools of the row.
        is_columnar: See ``read_row_calls``.

    Raises:
        ConversationError: A tool call is malformed.
    """
    messages: Messages = []
    for index, each in enumerate(value):
        message = {name: part for name, part in each.items() if part is not None}
        if calls := message.pop("tool_calls", None):
            name = f"message {index}: tool_calls"
            message = {"content": "", **message}
            message["tool_calls"] = read_row_calls(calls, name, tools, is_columnar=is_columnar)
        messages.append(message)
    return messages


def missing_prompt_hint(record: Mapping[str, object]) -> str:
    """Return a sentence about a known format whose prompt is under another name; empty if it is none."""
    for name in ("conversations", "conversation"):
        turns = record.get(name)
        if isinstance(turns, list) and turns and isinstance(turns[0], Mapping) and "from" in turns[0]:
            return f"{name!r} holds {_SHAREGPT}"
        if isinstance(turns, list):
            return f"data.prompt_key = {name!r} reads its messages"
    return ""
