"""Conversations of an episode, and which of them a call continues.

A call continues a conversation if its messages begin with those that the conversation has sent and received. Messages
are compared by what a client cannot change: visible text and tool calls. The tokens of a conversation are never encoded
again. Only the text that the chat template writes after the last response is.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from megatron_dppo.rollout.turns import ResponseBranch
from megatron_dppo_agents.agent_request import AgentRequest
from megatron_dppo_agents.call_ids import CallIds, answer_to
from megatron_dppo_agents.response_reader import ResponseReader
from megatron_dppo_agents.template import ChatTemplate
from megatron_dppo_conversations.rules import Message


class ForkReason(StrEnum):
    """Reasons why a call with an earlier response of the episode begins a segment. Each is a metric."""

    HISTORY = "history"
    """Its messages before or after that response differ, or it has another text in the place of the response."""
    TOOLS = "tools"
    TEMPLATE = "template"
    """The chat template would write other text for the messages so far, such as without their thoughts."""
    PARALLEL = "parallel"
    """Another call continues the conversation at the same time."""


class TurnSpan(NamedTuple):
    """Tokens ``[start, end)`` of a conversation that one call sampled."""

    start: int
    end: int
    order: int
    """Index of the response in the episode, by the time it was complete."""


@dataclass(eq=False)
class Conversation:
    """A sequence of tokens, and the messages by which the agent continues it."""

    branch: ResponseBranch
    prompt_tokens: int
    """Tokens before the first response."""
    tools: str = ""
    """``tools_key`` of its calls."""
    is_chat: bool = True
    is_trained: bool = True
    """False if its calls are left out of training (``X-Train: false``)."""
    is_left_out: bool = False
    """True if the agent or its environment has left it out of training afterwards."""
    session: str = ""
    """``X-Session-ID`` of its calls."""
    run: int | None = None
    """Index of the run of an environment's agent that it belongs to."""
    messages: list[Message] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    """``ResponseReader.message_keys`` of the messages."""
    text: str | None = None
    """Prompt and responses of completions by text."""
    prompt_text: str = ""
    """The part of it before the last response."""
    response_keys: set[str] = field(default_factory=set)
    turns: list[TurnSpan] = field(default_factory=list)
    is_busy: bool = False
    """True while a call samples. Its tokens then go on in a way that no other call can continue."""

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens."""
        return sum(turn.end - turn.start for turn in self.turns)

    @property
    def last_order(self) -> int:
        """``TurnSpan.order`` of its last response; -1 if it has none."""
        return self.turns[-1].order if self.turns else -1


class Continuation(NamedTuple):
    """The conversation that a call continues, and how."""

    conversation: Conversation | None
    """None if the call begins a conversation."""
    token_ids: list[int]
    """Tokens to append to it."""
    fork_reason: ForkReason | None = None
    """Reason why a call with an earlier response of the episode begins a conversation; None for other calls."""


def find_continuation(
    call: AgentRequest,
    conversations: Sequence[Conversation],
    template: ChatTemplate,
    reader: ResponseReader,
    call_ids: CallIds,
    *,
    is_trained: bool,
    session: str = "",
) -> Continuation:
    """Return how a call continues one of the conversations, or begins one. Busy ones may change meanwhile.

    A call continues only what has its ``session``. One that is left out of training continues only what is left out
    too.
    """
    alike = [each for each in conversations if (each.is_trained, each.session) == (is_trained, session)]
    if not call.is_chat:
        return continue_text(call, [each for each in alike if not each.is_busy], template)
    return _continue_chat(call, alike, template, reader, call_ids)


def _continue_chat(
    call: AgentRequest,
    conversations: Sequence[Conversation],
    template: ChatTemplate,
    reader: ResponseReader,
    call_ids: CallIds,
) -> Continuation:
    messages = call.messages
    keys = reader.message_keys(messages)
    tools = tools_key(call)
    chats = [each for each in conversations if each.is_chat]
    idle = [each for each in chats if not each.is_busy]
    prefixes = [each for each in idle if each.keys and each.keys == keys[: len(each.keys)]]
    # Longest first. The template may rule one out: it may rewrite earlier text.
    for conversation in sorted(prefixes, key=lambda each: len(each.keys), reverse=True):
        if conversation.tools != tools:
            continue
        *_, response = conversation.messages
        sent, *new = messages[len(conversation.keys) - 1 :]
        new = call_ids.as_written(answer_to(response, sent, new))
        text = template.continuation(call_ids.as_written(conversation.messages), new, call.tools)
        if text is not None:
            return Continuation(conversation, template.encode(text))
    reason = None
    busy_keys = [each.keys for each in chats if each.is_busy]
    if prefixes:
        reason = ForkReason.TEMPLATE if any(each.tools == tools for each in prefixes) else ForkReason.TOOLS
    elif any(known and known == keys[: len(known)] for known in busy_keys):
        reason = ForkReason.PARALLEL
    elif {key for each in idle for key in each.response_keys} & set(keys) or any(
        _replaces_response(messages, keys, each) for each in idle
    ):
        reason = ForkReason.HISTORY
    opening = template.opening(call_ids.as_written(restore_thoughts(messages, keys, idle, reader)), call.tools)
    return Continuation(None, opening, reason)


def _replaces_response(messages: Sequence[Message], keys: Sequence[str], conversation: Conversation) -> bool:
    """Return True if a call repeats what a response answered, with another assistant's message behind it."""
    known = conversation.keys
    for index, key in enumerate(known[: len(keys)]):
        if key != keys[index]:
            return key in conversation.response_keys and messages[index]["role"] == "assistant"
    return False


def continue_text(call: AgentRequest, conversations: Sequence[Conversation], template: ChatTemplate) -> Continuation:
    """Continue the newest sequence that the prompt of the call begins with."""
    for conversation in reversed(conversations):
        if conversation.is_chat:
            continue
        known = conversation.text
        tokens = conversation.branch.token_ids
        suffix: str | tuple[int, ...] | None = None
        if isinstance(call.text, tuple) and call.text[: len(tokens)] == tokens:
            suffix = call.text[len(tokens) :]
        elif isinstance(call.text, str) and known is not None and call.text.startswith(known):
            suffix = call.text[len(known) :]
        if suffix is not None:
            return Continuation(conversation, template.encode(suffix))
    is_rewritten = any(_begins_response(call.text, each) for each in conversations if not each.is_chat)
    reason = ForkReason.HISTORY if is_rewritten else None
    return Continuation(None, template.encode(call.text, add_special_tokens=True), reason)


def _begins_response(prompt: str | tuple[int, ...], conversation: Conversation) -> bool:
    """Return True if a prompt begins with that of a response and the first character or token of the response."""
    known: str | tuple[int, ...]
    if isinstance(prompt, str):
        known = conversation.text or ""
        end = len(conversation.prompt_text) + 1
    else:
        known = conversation.branch.token_ids
        end = conversation.turns[-1].start + 1 if conversation.turns else len(known) + 1
    return end <= len(known) and prompt[:end] == known[:end]


def tools_key(call: AgentRequest) -> str:
    """Return a key that is equal for equal tools."""
    return json.dumps(call.tools, sort_keys=True)


def restore_thoughts(
    messages: Sequence[Message], keys: Sequence[str], conversations: Sequence[Conversation], reader: ResponseReader
) -> list[Message]:
    """Return the messages with the thoughts of the policy's own responses, where a client has dropped or moved them.

    So the template decides which thoughts stay in the prompt, as for a client that sends them all.
    """
    sent: dict[str, list[str]] = {}
    for conversation in conversations:
        for key, message in zip(conversation.keys, conversation.messages, strict=True):
            if message["role"] == "assistant" and reader.has_thoughts(message):
                sent.setdefault(key, []).append(message["content"])
    result = []
    for key, message in zip(keys, messages, strict=True):
        if message["role"] == "assistant" and key in sent and not reader.has_thoughts(message):
            # Equal texts with different thoughts: in the order in which they were sent.
            contents = sent[key]
            content = contents.pop(0) if len(contents) > 1 else contents[0]
            message = {name: value for name, value in message.items() if name != "reasoning_content"}
            message["content"] = content
        result.append(message)
    return result
