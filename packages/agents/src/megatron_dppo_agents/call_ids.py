"""Ids of tool calls: one for each call of an episode, and the ids that the policy has written itself.

The models of some families write the id of a call, such as Kimi's ``functions.NAME:0``, and may write one twice.
Programs keep results by id. So they get an id of its own for each call, and the chat template gets the written one.
"""

import secrets
from collections.abc import Mapping, Sequence

from megatron_dppo_conversations.formats.base import ToolCall
from megatron_dppo_conversations.rules import Message


class CallIds:
    """Ids of the tool calls that the policy has made in one episode."""

    def __init__(self) -> None:
        self._written: dict[str, str] = {}
        """Id that the policy wrote, by the id that the program got."""

    def make_unique(self, calls: Sequence[ToolCall], messages: Sequence[Message]) -> tuple[ToolCall, ...]:
        """Return the calls of a response as the program gets them, with ids that no call of the episode has.

        A call has an empty id if the policy wrote none. The messages may have ids of the program's.
        """
        taken = {call["id"] for message in messages for call in message.get("tool_calls", ())}
        result: list[ToolCall] = []
        for call in calls:
            call_id = call["id"]
            if not call_id or call_id in taken or call_id in self._written:
                call_id = f"call_{secrets.token_hex(12)}"
            # A template that writes ids gets the same one when the episode is run again. Mistral's refuse any but nine
            # letters and digits.
            self._written[call_id] = call["id"] or f"call{len(self._written):05}"
            result.append({**call, "id": call_id})
        return tuple(result)

    def as_written(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages with the ids that the policy wrote."""
        return [_renamed(message, self._written) for message in messages]


def answer_to(response: Message, sent: Message, following: Sequence[Message]) -> list[Message]:
    """Return the messages behind a response with the ids of its calls, where the program has others in ``sent``."""
    calls = zip(sent.get("tool_calls", ()), response.get("tool_calls", ()), strict=True)
    ids = {theirs["id"]: ours["id"] for theirs, ours in calls}
    result = []
    for message in following:
        if message["role"] == "assistant":
            ids = {}  # its results answer other calls
        result.append(_renamed(message, ids))
    return result


def _renamed(message: Message, ids: Mapping[str, str]) -> Message:
    if message["role"] == "tool" and "tool_call_id" in message:
        return {**message, "tool_call_id": ids.get(message["tool_call_id"], message["tool_call_id"])}
    if message.get("tool_calls"):
        calls = [{**call, "id": ids.get(call["id"], call["id"])} for call in message["tool_calls"]]
        return {**message, "tool_calls": calls}
    return message
