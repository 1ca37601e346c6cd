"""One episode: the calls of an agent as sequences of tokens that only grow.

A call continues the sequence of an earlier call if its messages begin with the messages and the response of that call.
Responses stay the tokens that were sampled. Only the text that the chat template writes after the last response is
appended. Any other call starts a new sequence.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

from megatron_dppo.engines.agents.request_bodies import (
    AgentRequest,
    CallError,
    ContextLengthError,
    Message,
    message_keys,
)
from megatron_dppo.engines.agents.template import ChatTemplate
from megatron_dppo.engines.agents.tool_calls import split_tool_calls
from megatron_dppo.rollout.response_text import decode_response
from megatron_dppo.rollout.turns import ResponseBranch, Turn, Turns
from megatron_dppo.types import Completion, FinishReason

_TAIL_TOKENS = 16
"""Tokens at the end of a prompt that contain its last tag."""


@dataclass(frozen=True, kw_only=True)
class AgentResponse:
    """Response of the policy to one call."""

    call: AgentRequest
    text: str
    tool_calls: tuple[dict[str, Any], ...]
    finish_reason: str
    """Finish reason of OpenAI's API: ``stop``, ``length`` or ``tool_calls``."""
    prompt_tokens: int
    completion_tokens: int
    name: str = field(default_factory=lambda: secrets.token_hex(12))

    @property
    def message(self) -> Message:
        """The response as a message of the conversation."""
        message: Message = {"role": "assistant", "content": self.text}
        return message | ({"tool_calls": list(self.tool_calls)} if self.tool_calls else {})


@dataclass(eq=False)
class _Conversation:
    """A sequence of tokens, and the messages by which the agent continues it."""

    branch: ResponseBranch
    prompt_tokens: int
    """Tokens before the first response."""
    messages: list[Message] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    """``message_keys`` of the messages."""
    tools: str = ""
    is_chat: bool = True
    text: str | None = None
    """Prompt and responses of completions by text."""
    num_sampled: int = 0
    """Number of sampled tokens."""


@dataclass(frozen=True, kw_only=True)
class _PreparedCall:
    """A call that is parsed, rendered and tokenized."""

    request: AgentRequest
    token_ids: list[int]
    """Tokens to append to the conversation."""
    conversation: _Conversation | None
    """Conversation that the call continues. None if it starts one."""


class Episode:
    """Calls of an agent for one sample. Belongs to one event loop, except for what the endpoint counts.

    Args:
        turns: Turns of the response.
        template: Chat template of the model.
        max_calls: Maximum number of calls, rejected ones included; further ones are rejected.
        executor: Threads that parse, render and tokenize. An episode uses one at a time.
    """

    def __init__(self, turns: Turns, template: ChatTemplate, max_calls: int, executor: Executor) -> None:
        self.loop = asyncio.get_running_loop()
        self.interrupted: asyncio.Future[None] = self.loop.create_future()
        """Raises the exception that ends the episode from the policy's side: a cancellation or a server error."""
        self.takes_reward = False
        """True if the agent may send the reward."""
        self.reward: float | None = None
        """Last reward that the agent sent."""
        self.is_cut_off = False
        """True if a call was rejected because the sequence or the number of calls reached its limit."""
        self._turns = turns
        self._template = template
        self.max_calls = max_calls
        self.executor = executor
        self._conversations: list[_Conversation] = []
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._num_admitted = 0
        self._num_answered = 0
        self._num_ignored = 0
        self._start_time = time.monotonic()
        self._waiting_seconds = 0.0
        """Time in which the agent has waited for responses. The processing of a rejected call is the agent's time."""
        self._wait_start: float | None = None
        """Start of the call that is processed. None if there is none."""

    def agent_seconds(self) -> float:
        """Return the duration of the episode so far, without the time in which the agent waited for responses."""
        now = time.monotonic()
        current_wait = 0.0 if self._wait_start is None else now - self._wait_start
        return now - self._start_time - self._waiting_seconds - current_wait

    def admit_call(self) -> None:
        """Count a call, before its body is read.

        Raises:
            CallError: The episode has made all its calls.
        """
        if self._num_admitted >= self.max_calls:
            self.is_cut_off = True
            raise CallError(f"the episode has made its {self.max_calls} calls (agent.max_calls)", 400, "max_calls")
        self._num_admitted += 1

    async def respond(self, read: Callable[[], AgentRequest]) -> AgentResponse:
        """Return the policy's response to a call; concurrent calls are processed one after the other.

        Args:
            read: Parses the body of the call. Runs in a thread.

        Raises:
            CallError: The call is rejected, or the episode has ended.
        """
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            async with self._lock:
                if self.interrupted.done():
                    raise CallError("the episode has ended", 503, "episode_over")
                return await self._process(read)
        except (CallError, asyncio.CancelledError):
            raise
        except BaseException as error:
            if not self.interrupted.done():
                # The error is the run's, not the agent's: ``run_with_time_limit`` raises it.
                self.interrupted.set_exception(error)
            raise CallError("the episode has ended", 503, "episode_over") from error
        finally:
            self._tasks.discard(task)

    def close(self) -> None:
        """Cancel the calls in progress."""
        for task in self._tasks:
            task.cancel()
        if self.interrupted.done():
            self.interrupted.exception()  # marks it as retrieved: asyncio reports an exception that is never read
        else:
            self.interrupted.cancel()

    async def finish(self, reward: float | None, failure: str) -> Completion:
        """Return the response: the sequence with the most sampled tokens. The others are not trained on."""
        turns = self._turns
        # A call that was in progress when the agent ended has started a sequence and sampled nothing.
        self._conversations = [each for each in self._conversations if each.num_sampled]
        if not self._conversations:
            too_long = ": its messages have more tokens than rollout.max_new_tokens" if self.is_cut_off else ""
            failure = failure or f"the agent ended without a response of the policy{too_long}"
            await self._sample_one_token()
        # Reversed, so that of equally long sequences the newest is trained on.
        best = max(reversed(self._conversations), key=lambda conversation: conversation.num_sampled)
        branch = turns.switch_branch(best.branch)
        if self.is_cut_off:
            # Replaces the reason of the last response: the agent wanted to continue and was not allowed to.
            branch.finish_reason = FinishReason.LENGTH
        sampled = sum(conversation.num_sampled for conversation in self._conversations)
        return turns.finish(
            reward,
            text=decode_response(turns.tokenizer, turns.token_ids[best.prompt_tokens :]),
            failure=failure,
            counts={
                "agent/calls": self._num_answered,
                "agent/rejected_calls": self._num_admitted - self._num_answered,
                "agent/sequences": len(self._conversations),
                "agent/untrained_fraction": 1 - best.num_sampled / sampled,
                "agent/ignored_settings": self._num_ignored,
            },
        )

    async def _sample_one_token(self) -> None:
        """Sample one token: a response must have one, even that of a failed sample, which gets no gradient."""
        turns = self._turns
        if turns.token_ids:
            turns.start_branch()
        turns.append([turns.tokenizer.eos_token_id or 0])
        conversation = _Conversation(turns.branch, len(turns.token_ids))
        conversation.num_sampled = len((await turns.sample(1)).token_ids)
        self._conversations.append(conversation)

    async def _process(self, read: Callable[[], AgentRequest]) -> AgentResponse:
        self._wait_start = time.monotonic()
        try:
            prepared = await self.loop.run_in_executor(self.executor, self._prepare, read)
            response = await self._sample_response(prepared)
            self._waiting_seconds += time.monotonic() - self._wait_start
            return response
        finally:
            self._wait_start = None

    def _prepare(self, read: Callable[[], AgentRequest]) -> _PreparedCall:
        """Parse, render and tokenize a call. Runs in a thread and changes no conversation."""
        try:
            return self._tokenize(read())
        except ContextLengthError:
            self.is_cut_off = True
            raise
        except CallError:
            raise
        except BaseException as error:
            # Everything here depends on the text of the call alone, which must not end the run. A panic of the
            # tokenizer is no ``Exception``.
            raise CallError(f"the call cannot be processed: {type(error).__name__}: {error!s:.200}") from error

    def _tokenize(self, call: AgentRequest) -> _PreparedCall:
        self._template.check_size(call, self._turns.params.max_new_tokens)
        prepared = self._continue_chat(call) if call.is_chat else self._continue_text(call)
        if prepared is not None:
            return prepared
        if call.is_chat:
            tokens = self._template.opening(call.messages, call.tools)
        else:
            tokens = self._template.encode(call.text, add_special_tokens=True)
        return _PreparedCall(request=call, token_ids=tokens, conversation=None)

    async def _sample_response(self, prepared: _PreparedCall) -> AgentResponse:
        call = prepared.request
        conversation = self._append(prepared)
        self._num_answered += 1
        self._num_ignored += call.ignored
        before = len(self._turns.token_ids)
        starts_in_thought = self._starts_in_thought()
        turn = await self._turns.sample(call.limit)
        conversation.num_sampled += len(turn.token_ids)
        response = _build_response(call, turn, before, starts_in_thought=starts_in_thought)
        if call.is_chat:
            conversation.messages = [*call.messages, response.message]
            conversation.keys = message_keys(conversation.messages)
        elif isinstance(call.text, str):
            conversation.text = call.text + response.text
        return response

    def _starts_in_thought(self) -> bool:
        """Return True if the template ends the prompt with an open thought, so that the response begins in it."""
        tail = decode_response(self._turns.tokenizer, self._turns.token_ids[-_TAIL_TOKENS:])
        return tail.rstrip().endswith("<think>")

    def _append(self, prepared: _PreparedCall) -> _Conversation:
        """Append the tokens of a call to its conversation, or start one."""
        call = prepared.request
        tokens = prepared.token_ids
        if prepared.conversation is not None:
            return self._extend(prepared.conversation, tokens, closes=call.is_chat)
        if len(tokens) >= self._turns.params.max_new_tokens or not tokens:
            raise self._too_long(len(tokens))
        # A response has one branch from the start; only further sequences need a new one.
        branch = self._turns.start_branch() if self._conversations else self._turns.branch
        self._turns.append(tokens)
        conversation = _Conversation(branch, len(tokens), tools=_tools_key(call), is_chat=call.is_chat)
        self._conversations.append(conversation)
        return conversation

    def _continue_chat(self, call: AgentRequest) -> _PreparedCall | None:
        """Continue the longest conversation that the messages of the call begin with; None if there is none."""
        keys = message_keys(call.messages)
        tools = _tools_key(call)
        prefixes = [
            each
            for each in self._conversations
            if each.is_chat and each.tools == tools and each.keys == keys[: len(each.keys)]
        ]
        # Longest first. The template may rule one out: it may rewrite earlier text, such as thoughts.
        for conversation in sorted(prefixes, key=lambda each: len(each.keys), reverse=True):
            count = len(conversation.keys)
            text = self._template.continuation(conversation.messages, call.messages[count:], call.tools)
            if text is not None:
                return _PreparedCall(request=call, token_ids=self._template.encode(text), conversation=conversation)
        return None

    def _continue_text(self, call: AgentRequest) -> _PreparedCall | None:
        """Continue the newest sequence that the prompt of the call begins with; None if there is none."""
        for conversation in reversed(self._conversations):
            if conversation.is_chat:
                continue
            known = conversation.text
            branch = conversation.branch
            tokens = tuple(branch.response.tokens[: branch.position])
            suffix: str | tuple[int, ...] | None = None
            if isinstance(call.text, tuple) and call.text[: len(tokens)] == tokens:
                suffix = call.text[len(tokens) :]
            elif isinstance(call.text, str) and known is not None and call.text.startswith(known):
                suffix = call.text[len(known) :]
            if suffix is not None:
                return _PreparedCall(request=call, token_ids=self._template.encode(suffix), conversation=conversation)
        return None

    def _extend(self, conversation: _Conversation, tokens: list[int], *, closes: bool) -> _Conversation:
        """Append the agent's tokens to a conversation.

        Args:
            conversation: The conversation.
            tokens: Tokens to append.
            closes: The tokens begin with the end of the last response. Its end token is not appended twice.
        """
        branch = self._turns.switch_branch(conversation.branch)
        last = branch.response.tokens[branch.position - 1]
        # A response that was cut off has no end token, and the template's must be added.
        if closes and branch.finish_reason == FinishReason.STOP and tokens[:1] == [last]:
            tokens = tokens[1:]
        if len(tokens) >= self._turns.tokens_left:
            raise self._too_long(branch.position + len(tokens))
        self._turns.append(tokens)
        return conversation

    def _too_long(self, tokens: int) -> CallError:
        self.is_cut_off = True
        return ContextLengthError(f"the conversation has {tokens} tokens", self._turns.params.max_new_tokens)


def _tools_key(call: AgentRequest) -> str:
    return json.dumps(call.tools, sort_keys=True)


def _build_response(call: AgentRequest, turn: Turn, prompt_tokens: int, *, starts_in_thought: bool) -> AgentResponse:
    text = turn.text
    calls: list[dict[str, Any]] = []
    if call.reads_tool_calls:
        text, calls = split_tool_calls(text, starts_in_thought=starts_in_thought)
    finish_reason = "tool_calls" if calls else "stop"
    if turn.finish_reason != FinishReason.STOP:
        finish_reason = "length"
    return AgentResponse(
        call=call,
        text=text,
        tool_calls=tuple(calls),
        finish_reason=finish_reason,
        prompt_tokens=prompt_tokens,
        completion_tokens=len(turn.token_ids),
    )
