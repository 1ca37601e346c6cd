"""One episode: calls of an agent become sequences of tokens that only ever grow.

A call whose messages begin with all that an earlier call sent and got back goes on with that call's sequence: the
answers stay the tokens that were sampled, and only the text that the chat template writes behind the last answer is
appended. Any other call begins a sequence of its own.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from megatron_dppo.engines.agents.requests import AgentRequest, CallError, Message, identity, split_tool_calls
from megatron_dppo.engines.agents.template import ChatTemplate
from megatron_dppo.rollout.turns import ResponseBranch, Turn, Turns
from megatron_dppo.types import Completion, FinishReason


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What an agent gets back."""

    call: AgentRequest
    text: str
    tool_calls: tuple[dict[str, Any], ...]
    finish_reason: str
    """in OpenAI's words: ``stop``, ``length``, ``tool_calls``"""
    prompt_tokens: int
    completion_tokens: int
    name: str = field(default_factory=lambda: secrets.token_hex(12))

    @property
    def message(self) -> Message:
        """As it stands in the conversation."""
        found: Message = {"role": "assistant", "content": self.text}
        return found | ({"tool_calls": list(self.tool_calls)} if self.tool_calls else {})


@dataclass(eq=False)
class _Conversation:
    """A sequence, and what the agent knows of it."""

    branch: ResponseBranch
    prompt_tokens: int
    """given before the first answer"""
    messages: list[Message] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    """``identity`` of the messages"""
    tools: str = ""
    is_chat: bool = True
    text: str | None = None
    """prompt and answers of completions by text"""
    sampled: int = 0
    """tokens"""


class Episode:
    """What an agent does for one sample; lives in one event loop.

    Args:
        turns: of the response.
        template: of the model.
        max_calls: further calls are refused.
    """

    def __init__(self, turns: Turns, template: ChatTemplate, max_calls: int) -> None:
        self.loop = asyncio.get_running_loop()
        self.broken: asyncio.Future[None] = self.loop.create_future()
        """raises what ends the episode from the policy's side: it is to stop, or no server answers"""
        self.reward: float | None = None
        """what the agent said last"""
        self.cut_off = False
        """whether a call was refused since the sequence or the number of calls reached its limit"""
        self._turns, self._template, self._max_calls = turns, template, max_calls
        self._conversations: list[_Conversation] = []
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._calls = self._ignored = 0
        self._began, self._waited, self._waits_since = time.monotonic(), 0.0, 0.0

    def own_seconds(self) -> float:
        """How long the episode takes, without what the agent waited for answers."""
        now = time.monotonic()
        return now - self._began - self._waited - (now - self._waits_since if self._tasks else 0.0)

    async def answer(self, call: AgentRequest) -> Answer:
        """The policy's answer to a call; calls at the same time get theirs one after the other.

        Raises:
            CallError: it is refused, or the episode has ended.
        """
        task = asyncio.current_task()
        assert task is not None
        self._waits_since = self._waits_since if self._tasks else time.monotonic()
        self._tasks.add(task)
        try:
            async with self._lock:
                if self.broken.done():
                    raise CallError("the episode has ended", 503, "episode_over")
                return await self._answer(call)
        except (CallError, asyncio.CancelledError):
            raise
        except BaseException as error:
            if not self.broken.done():
                self.broken.set_exception(error)
            raise CallError("the episode has ended", 503, "episode_over") from error
        finally:
            self._tasks.discard(task)
            if not self._tasks:
                self._waited += time.monotonic() - self._waits_since

    def close(self) -> None:
        """Give up the calls that are under way."""
        for task in self._tasks:
            task.cancel()
        if self.broken.done():
            self.broken.exception()  # it was told, or nobody is left to tell
        else:
            self.broken.cancel()

    async def finish(self, reward: float | None, failure: str) -> Completion:
        """The response: the sequence with the most sampled tokens; those of the others are not trained on."""
        turns = self._turns
        if not self._conversations:
            too_long = ": its messages have more tokens than rollout.max_new_tokens" if self.cut_off else ""
            failure = failure or f"the agent ended without an answer of the policy{too_long}"
            await self._one_token()
        best = max(reversed(self._conversations), key=lambda each: each.sampled)
        branch = turns.switch_branch(best.branch)
        if self.cut_off:
            branch.finish_reason = FinishReason.LENGTH
        sampled = sum(each.sampled for each in self._conversations)
        return turns.finish(
            reward,
            text=turns.tokenizer.decode(turns.token_ids[best.prompt_tokens :], skip_special_tokens=True),
            failure=failure,
            counts={
                "agent/calls": self._calls,
                "agent/sequences": len(self._conversations),
                "agent/untrained_fraction": 1 - best.sampled / sampled,
                "agent/ignored_settings": self._ignored,
            },
        )

    async def _one_token(self) -> None:
        """A response needs a token; this one is of a failed sample, without a gradient."""
        turns = self._turns
        turns.append([turns.tokenizer.eos_token_id or 0])
        conversation = _Conversation(turns.branch, len(turns.token_ids))
        conversation.sampled = len((await turns.sample(1)).token_ids)
        self._conversations.append(conversation)

    async def _answer(self, call: AgentRequest) -> Answer:
        if self._calls >= self._max_calls:
            self.cut_off = True
            raise CallError(f"the episode has made its {self._max_calls} calls (agent.max_calls)", 400, "max_calls")
        conversation = self._go_on(call) if call.is_chat else self._go_on_with_text(call)
        conversation = conversation or self._begin(call)
        self._calls, self._ignored = self._calls + 1, self._ignored + call.ignored
        before = len(self._turns.token_ids)
        turn = await self._turns.sample(call.limit)
        conversation.sampled += len(turn.token_ids)
        answer = _answer(call, turn, before)
        if call.is_chat:
            conversation.messages = [*call.messages, answer.message]
            conversation.names = identity(conversation.messages)
        elif isinstance(call.text, str):
            conversation.text = call.text + answer.text
        return answer

    def _begin(self, call: AgentRequest) -> _Conversation:
        if call.is_chat:
            tokens = self._template.opening(call.messages, call.tools)
        else:
            tokens = self._template.encode(call.text, add_special_tokens=True)
        if len(tokens) >= self._turns.params.max_new_tokens or not tokens:
            raise self._full(len(tokens))
        branch = self._turns.start_branch() if self._conversations else self._turns.branch
        self._turns.append(tokens)
        conversation = _Conversation(branch, len(tokens), tools=_same(call), is_chat=call.is_chat)
        self._conversations.append(conversation)
        return conversation

    def _go_on(self, call: AgentRequest) -> _Conversation | None:
        names, tools = identity(call.messages), _same(call)
        known = [
            each
            for each in self._conversations
            if each.is_chat and each.tools == tools and each.names == names[: len(each.names)]
        ]
        for conversation in sorted(known, key=lambda each: len(each.names), reverse=True):
            count = len(conversation.names)
            text = self._template.continuation(conversation.messages, call.messages[count:], call.tools)
            if text is not None:
                self._extend(conversation, self._template.encode(text), closes=True)
                return conversation
        return None

    def _go_on_with_text(self, call: AgentRequest) -> _Conversation | None:
        for conversation in reversed(self._conversations):
            if conversation.is_chat:
                continue
            known, tokens = (
                conversation.text,
                tuple(conversation.branch.response.tokens[: conversation.branch.position]),
            )
            if isinstance(call.text, tuple) and call.text[: len(tokens)] == tokens:
                return self._extend(conversation, self._template.encode(call.text[len(tokens) :]))
            if isinstance(call.text, str) and known is not None and call.text.startswith(known):
                return self._extend(conversation, self._template.encode(call.text[len(known) :]))
        return None

    def _extend(self, conversation: _Conversation, tokens: list[int], *, closes: bool = False) -> _Conversation:
        """Append what the agent said; the end token of an answer that has one is not written twice."""
        branch = self._turns.switch_branch(conversation.branch)
        last = branch.response.tokens[branch.position - 1]
        if closes and branch.finish_reason == FinishReason.STOP and tokens[:1] == [last]:
            tokens = tokens[1:]
        if len(tokens) >= self._turns.tokens_left:
            raise self._full(branch.position + len(tokens))
        self._turns.append(tokens)
        return conversation

    def _full(self, tokens: int) -> CallError:
        self.cut_off = True
        return CallError(
            f"the conversation has {tokens} tokens, and with an answer it may have {self._turns.params.max_new_tokens} "
            "(rollout.max_new_tokens)",
            400,
            "context_length_exceeded",
        )


def _same(call: AgentRequest) -> str:
    return json.dumps(call.tools, sort_keys=True)


def _answer(call: AgentRequest, turn: Turn, before: int) -> Answer:
    text, calls = split_tool_calls(turn.text) if call.reads_tool_calls else (turn.text, [])
    stopped = turn.finish_reason == FinishReason.STOP
    return Answer(
        call=call,
        text=text,
        tool_calls=tuple(calls),
        finish_reason="length" if not stopped else "tool_calls" if calls else "stop",
        prompt_tokens=before,
        completion_tokens=len(turn.token_ids),
    )
