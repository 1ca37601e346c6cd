"""One episode: the calls of an agent as conversations, each a sequence of tokens that only grows.

A call that continues an earlier one extends its sequence, see ``conversations``. Any other call begins a sequence. All
of them are segments of the episode, and train. Responses stay the tokens that were sampled.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from megatron_dppo.engines.agents.agent_clock import AgentClock
from megatron_dppo.engines.agents.agent_response import AgentResponse, build_response
from megatron_dppo.engines.agents.conversations import (
    Continuation,
    Conversation,
    ForkReason,
    TurnSpan,
    find_continuation,
    order_tool_results,
    tools_key,
)
from megatron_dppo.engines.agents.named_rewards import NamedRewards
from megatron_dppo.engines.agents.request_bodies import AgentRequest, CallError, ContextLengthError, Message
from megatron_dppo.engines.agents.response_reader import ResponseReader
from megatron_dppo.engines.agents.template import ChatTemplate
from megatron_dppo.rollout.response_text import decode_response
from megatron_dppo.rollout.stop_strings import StopStrings
from megatron_dppo.rollout.turns import Turns, TurnsStopped
from megatron_dppo.types import Completion, FinishReason
from megatron_dppo.types.segments import join_segments

_COUNTS_PER_CALL = 10
"""Number of requests that count tokens, for each call that an episode may make."""


@dataclass(frozen=True, kw_only=True)
class EpisodeSettings:
    """Settings of ``[agent]`` that an episode needs."""

    max_calls: int
    """Maximum number of calls, rejected ones included; further ones are rejected."""
    max_segments: int | None = None
    """Maximum number of conversations. None sets no limit."""
    segments: Literal["all", "longest"] = "all"
    """Conversations that are trained on."""
    credit: Literal["episode", "turn"] = "episode"
    """Tokens that a reward of a single response is credited to."""
    rewards: NamedRewards = field(default_factory=NamedRewards)
    """Parts in which the agent gives its reward."""


class _PreparedCall(NamedTuple):
    """A call that is parsed, rendered and tokenized."""

    request: AgentRequest
    continuation: Continuation
    opening: list[int]
    """Tokens with which the response begins, and which are not sampled: those of a forced tool call."""


class Episode:
    """Calls of an agent for one sample. Belongs to one event loop, except for what the endpoint counts.

    Calls are prepared one after the other, and sampled side by side.

    Args:
        turns: Turns of the response.
        template: Chat template of the model.
        reader: Reader of the model's responses.
        settings: Limits, and what is trained on.
        executor: Threads that parse, render and tokenize. An episode uses one at a time.
    """

    def __init__(
        self,
        turns: Turns,
        template: ChatTemplate,
        reader: ResponseReader,
        settings: EpisodeSettings,
        executor: Executor,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.interrupted: asyncio.Future[None] = self.loop.create_future()
        """Raises the exception that ends the episode from the policy's side: a cancellation or a server error."""
        self.takes_reward = False
        """True if the agent may send the reward."""
        self.settings = settings
        self.executor = executor
        self._has_reached_limit = False
        """True if a call was rejected because the number of calls or of conversations reached its limit."""
        self._is_too_long = False
        """True if a call was rejected for its length, and none was accepted since."""
        self._turns = turns
        self._template = template
        self._reader = reader
        self._conversations: list[Conversation] = []
        self._conversation_by_response: dict[str, tuple[Conversation, int]] = {}
        """Conversation and ``TurnSpan.order`` of each response, by ``AgentResponse.name``."""
        self._episode_reward: float | None = None
        """Last reward that the agent sent for the episode."""
        self._reward_parts: dict[str, float] = {}
        """Parts of that reward, if the agent gives them."""
        self._turn_rewards: dict[int, float] = {}
        """Last reward that the agent sent for each response, by ``TurnSpan.order``."""
        self._prepare_lock = asyncio.Lock()
        self._running: dict[bytes, asyncio.Task[AgentResponse]] = {}
        """Calls in progress by the digest of their bodies."""
        self._undelivered: dict[bytes, AgentResponse] = {}
        """Responses whose client was gone when they were complete, by the digest of the call's body."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._num_sampling = 0
        self._stop_error: TurnsStopped | None = None
        self._num_admitted = 0
        self._num_answered = 0
        self._num_repeated = 0
        self._num_ignored = Counter[str]()
        self.stored_messages: dict[str, Sequence[Message]] = {}
        """Messages up to each response of the Responses API, by its id."""
        self._num_counted = 0
        """Number of requests that counted tokens."""
        self._num_malformed = 0
        self._forks = Counter[ForkReason]()
        self.clock = AgentClock()
        """Time of the agent."""

    @property
    def max_calls(self) -> int:
        """Maximum number of calls."""
        return self.settings.max_calls

    @property
    def is_cut_off(self) -> bool:
        """True if a limit rejected a call. Not for its length, if the agent went on with a shorter conversation."""
        return self._has_reached_limit or self._is_too_long

    @property
    def reward(self) -> float | None:
        """Sum of the rewards that the agent sent for the episode and for single responses. None: it sent none."""
        if self._episode_reward is None and not self._turn_rewards:
            return None
        return (self._episode_reward or 0.0) + sum(self._turn_rewards.values())

    def add_reward(self, reward: float, response_id: str | None = None) -> None:
        """Set the reward of the episode, or that of a response; a later one replaces it.

        Args:
            reward: A finite number.
            response_id: Id of the response as the client has got it. None: the episode.

        Raises:
            CallError: No response of the episode has the id.
        """
        if response_id is None:
            self._episode_reward = reward
            return
        _, order = self._find_response(response_id)
        self._turn_rewards[order] = reward

    def add_rewards(self, parts: Mapping[str, float]) -> None:
        """Set the reward of the episode to the weighted sum of its parts; later ones replace them."""
        self._reward_parts = dict(parts)
        self._episode_reward = self.settings.rewards.total(parts)

    def leave_out(self, response_id: str) -> None:
        """Leave the conversation of a response out of training, with its responses to come.

        Raises:
            CallError: No response of the episode has the id.
        """
        conversation, _ = self._find_response(response_id)
        conversation.is_left_out = True

    def _find_response(self, response_id: str) -> tuple[Conversation, int]:
        # An id is a prefix of the protocol and the name of the response.
        name = response_id.replace("_", "-").rpartition("-")[2]
        if name not in self._conversation_by_response:
            raise CallError(f"'id' = {response_id!r:.80} is no response of this episode; send the 'id' of its body")
        return self._conversation_by_response[name]

    def admit_call(self) -> None:
        """Count a call, before its body is read.

        Raises:
            CallError: The episode has made all its calls.
        """
        if self._num_admitted >= self.max_calls:
            self._has_reached_limit = True
            raise CallError(f"the episode has made its {self.max_calls} calls (agent.max_calls)", 400, "max_calls")
        self._num_admitted += 1

    async def respond(
        self, read: Callable[[], AgentRequest], *, digest: bytes = b"", is_trained: bool = True
    ) -> AgentResponse:
        """Return the policy's response to a call.

        A body that is sent again while its first call is in progress gets the same response. So does one whose first
        response found no client to read it.

        Args:
            read: Parses the body of the call. Runs in a thread.
            digest: Digest of the body. Empty: no call is the same.
            is_trained: False if the agent leaves the call out of training.

        Raises:
            CallError: The call is rejected, or the episode has ended.
        """
        if digest in self._undelivered:
            self._num_repeated += 1
            return self._undelivered.pop(digest)
        task = self._running.get(digest)
        if task is None:
            task = asyncio.create_task(self._respond(read, is_trained=is_trained))
            self._tasks.add(task)
            if digest:
                self._running[digest] = task
            task.add_done_callback(lambda done: self._forget(done, digest))
        else:
            self._num_repeated += 1
        # The call goes on for a client that sends it again.
        return await asyncio.shield(task)

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens of a conversation."""
        return self._turns.params.max_new_tokens

    async def count_tokens(self, read: Callable[[], AgentRequest]) -> int:
        """Return the number of prompt tokens that a call would have as the first of its conversation.

        Raises:
            CallError: The call is invalid, or the episode has counted too often.
        """
        if self._num_counted >= self.max_calls * _COUNTS_PER_CALL:
            raise CallError(
                f"the episode has counted tokens {self._num_counted} times, {_COUNTS_PER_CALL} for each of its calls "
                "(agent.max_calls)",
                429,
                "too_many_requests",
            )
        self._num_counted += 1
        async with self._prepare_lock:
            return await self.loop.run_in_executor(self.executor, lambda: self._count_tokens(read))

    def _count_tokens(self, read: Callable[[], AgentRequest]) -> int:
        try:
            call = read()
            self._template.check_size(call, self.max_tokens)
            return len(self._template.opening(call.messages, call.tools))
        except CallError:
            raise
        except BaseException as error:  # see ``_prepare``
            raise CallError(f"the call cannot be processed: {type(error).__name__}: {error!s:.200}") from error

    def keep_undelivered(self, digest: bytes, response: AgentResponse) -> None:
        """Keep a response whose client was gone, for the same body that is sent again."""
        self._undelivered[digest] = response

    def _forget(self, task: asyncio.Task[AgentResponse], digest: bytes) -> None:
        self._tasks.discard(task)
        self._running.pop(digest, None)
        if not task.cancelled():
            task.exception()  # marks it as retrieved: all clients of the call may be gone

    async def _respond(self, read: Callable[[], AgentRequest], *, is_trained: bool) -> AgentResponse:
        task = asyncio.current_task()
        assert task is not None
        is_answered = False
        self.clock.begin_call(task)
        try:
            response = await self._process(read, is_trained=is_trained)
            is_answered = True
            return response
        except (CallError, asyncio.CancelledError):
            raise
        except TurnsStopped as error:
            # The other calls in progress are being stopped too. Their tokens are kept only if nothing cancels them.
            self._stop_error = error
            if not self._num_sampling:
                self._interrupt(error)
            await asyncio.wait([self.interrupted])
            raise CallError("the episode has ended", 503, "episode_over") from error
        except BaseException as error:
            self._interrupt(error)
            raise CallError("the episode has ended", 503, "episode_over") from error
        finally:
            self.clock.end_call(task, is_answered=is_answered)

    def _interrupt(self, error: BaseException) -> None:
        """End the episode by an error that is the run's, not the agent's: ``run_with_time_limit`` raises it."""
        if not self.interrupted.done():
            self.interrupted.set_exception(error)

    def close(self) -> None:
        """Cancel the calls in progress."""
        for task in self._tasks:
            task.cancel()
        if self.interrupted.done():
            self.interrupted.exception()  # marks it as retrieved: asyncio reports an exception that is never read
        else:
            self.interrupted.cancel()

    async def finish(self, failure: str, counts: Mapping[str, float]) -> Completion:
        """Return the response, with all segments that are trained on.

        Args:
            failure: Reason why the agent failed, else empty.
            counts: Further counters of the episode.
        """
        turns = self._turns
        reward = None if failure else self.reward
        reward_parts = {} if failure else self._reward_parts
        # Sampled by calls that were in progress when the agent ended, and sent to nobody.
        interrupted = sum(c.branch.response.num_sampled_tokens(c.branch.position) for c in self._conversations)
        # Such a call may have begun a conversation and sampled nothing.
        self._conversations = [each for each in self._conversations if each.num_sampled]
        if not self._conversations:
            too_long = ": its messages have more tokens than rollout.max_new_tokens" if self.is_cut_off else ""
            failure = failure or f"the agent ended without a response of the policy{too_long}"
            await self._sample_one_token()
        trained = [each for each in self._conversations if each.is_trained and not each.is_left_out]
        if not trained:
            failure = failure or "the agent left all responses of the policy out of training; leave out some of them"
            trained = self._conversations[-1:]
        left_out = sum(each.num_sampled for each in self._conversations if each not in trained)
        shorter = 0
        if self.settings.segments == "longest":
            # Reversed, so that of equally long conversations the newest is trained on.
            best = max(reversed(trained), key=lambda conversation: conversation.num_sampled)
            shorter = sum(each.num_sampled for each in trained if each is not best)
            trained = [best]
        last = max(range(len(trained)), key=lambda index: trained[index].last_order)
        completion = join_segments([self._segment(each) for each in trained], last)
        if self.is_cut_off:
            # Replaces the reason of the last response: the agent wanted to continue and was not allowed to.
            completion = replace(completion, finish_reason=FinishReason.LENGTH)
        after_stop = sum(each.branch.num_dropped for each in self._conversations)
        sampled = sum(each.num_sampled for each in self._conversations) + interrupted + after_stop
        return turns.finish_with(
            completion,
            reward,
            reward_parts=reward_parts,
            failure=failure,
            counts={
                "agent/calls": self._num_answered,
                "agent/repeated_calls": self._num_repeated,
                "agent/rejected_calls": self._num_admitted - self._num_answered - self._num_repeated,
                "agent/sequences": len(self._conversations),
                "agent/segments": len(trained),
                **{f"agent/forks/{reason}": self._forks[reason] for reason in ForkReason},
                "agent/untrained_fraction": (left_out + shorter + interrupted + after_stop) / sampled,
                "agent/untrained/left_out": left_out / sampled,
                "agent/untrained/shorter": shorter / sampled,
                "agent/untrained/interrupted": interrupted / sampled,
                "agent/untrained/after_stop": after_stop / sampled,
                "agent/ignored_settings": self._num_ignored.total(),
                **{f"agent/ignored/{name}": number for name, number in self._num_ignored.items()},
                **counts,
                "agent/malformed_calls": self._num_malformed,
            },
        )

    def _segment(self, conversation: Conversation) -> Completion:
        """Return a conversation as a completion, with the text from its first response on."""
        branch = conversation.branch
        text = decode_response(self._turns.tokenizer, branch.token_ids[conversation.prompt_tokens :])
        past: torch.Tensor | None = None
        if self.settings.credit == "turn":
            past = torch.zeros(branch.position)
            for turn in conversation.turns:
                earlier = (value for order, value in self._turn_rewards.items() if order < turn.order)
                past[turn.start : turn.end] = sum(earlier)
        return replace(branch.completion(), text=text, past_rewards=past)

    async def _sample_one_token(self) -> None:
        """Sample one token: a response must have one, even that of a failed sample, which gets no gradient."""
        branch = self._turns.begin_branch([self._turns.tokenizer.eos_token_id or 0])
        conversation = Conversation(branch, branch.position)
        await branch.sample(1)
        conversation.turns.append(TurnSpan(conversation.prompt_tokens, branch.position, 0))
        self._conversations.append(conversation)

    async def _process(self, read: Callable[[], AgentRequest], *, is_trained: bool) -> AgentResponse:
        # One call after the other finds its conversation, so that two calls cannot continue the same one.
        async with self._prepare_lock:
            if self.interrupted.done():
                raise CallError("the episode has ended", 503, "episode_over")
            prepared = await self.loop.run_in_executor(
                self.executor, lambda: self._prepare(read, is_trained=is_trained)
            )
            conversation = self._append(prepared, is_trained=is_trained)
            self._is_too_long = False
            conversation.is_busy = True
        self._num_sampling += 1
        try:
            return await self._sample_response(prepared, conversation)
        finally:
            conversation.is_busy = False
            self._num_sampling -= 1
            if not self._num_sampling and self._stop_error is not None:
                self._interrupt(self._stop_error)

    def _prepare(self, read: Callable[[], AgentRequest], *, is_trained: bool) -> _PreparedCall:
        """Parse, render and tokenize a call. Runs in a thread and changes no conversation."""
        try:
            call = read()
            self._template.check_size(call, self._turns.params.max_new_tokens)
            call = replace(call, messages=tuple(order_tool_results(call.messages)))
            self._reader.check(call)
            continuation = find_continuation(
                call, self._conversations, self._template, self._reader, is_trained=is_trained
            )
            opening: list[int] = []
            if call.forced_tool is not None:
                opening = self._template.call_opening(call.forced_tool, call.tools)
            return _PreparedCall(call, continuation, opening)
        except ContextLengthError:
            self._is_too_long = True
            raise
        except CallError:
            raise
        except BaseException as error:
            # Everything here depends on the text of the call alone, which must not end the run. A panic of the
            # tokenizer is no ``Exception``.
            raise CallError(f"the call cannot be processed: {type(error).__name__}: {error!s:.200}") from error

    async def _sample_response(self, prepared: _PreparedCall, conversation: Conversation) -> AgentResponse:
        call = prepared.request
        self._num_answered += 1
        self._num_ignored.update([*call.ignored, *self._reader.unfollowed_settings(call)])
        branch = conversation.branch
        prompt = branch.token_ids
        decode = self._reader.text if call.is_chat else partial(decode_response, self._turns.tokenizer)
        strings = StopStrings(call.stop, decode) if call.stop else None
        turn = await branch.sample(call.limit, self._reader.stop_token_ids(call), strings)
        match = None if strings is None else strings.find(turn.token_ids)
        parsed = self._reader.parse(call, prompt, turn.token_ids, len(prepared.opening)) if call.is_chat else None
        if parsed is None:
            message = {"role": "assistant", "content": turn.text if match is None else turn.text[: match.start]}
        else:
            message = self._reader.message(parsed)
        response = build_response(call, turn, prompt, message, None if match is None else match.text)
        if call.returns_logprobs:
            values = branch.response.logprobs(len(prompt), branch.position)
            texts = tuple(self._turns.tokenizer.decode([token]) for token in turn.token_ids)
            response = replace(response, logprobs=values, token_texts=texts)
        order = len(self._conversation_by_response)
        conversation.turns.append(TurnSpan(len(prompt), branch.position, order))
        self._conversation_by_response[response.name] = (conversation, order)
        if parsed is not None:
            self._num_malformed += parsed.num_malformed
            conversation.messages = [*call.messages, self._reader.sampled_message(parsed)]
            conversation.keys = self._reader.message_keys(conversation.messages)
            conversation.response_keys.add(conversation.keys[-1])
        elif isinstance(call.text, str):
            # With its stop string: a prompt without that does not continue these tokens.
            conversation.text = call.text + turn.text
        return response

    def _append(self, prepared: _PreparedCall, *, is_trained: bool) -> Conversation:
        """Append the tokens of a call to its conversation, or begin one."""
        call = prepared.request
        tokens = [*prepared.continuation.token_ids, *prepared.opening]
        conversation = prepared.continuation.conversation
        if conversation is not None:
            self._extend(conversation, tokens, closes=call.is_chat)
            return conversation
        if len(tokens) >= self._turns.params.max_new_tokens or not tokens:
            raise self._too_long(len(tokens))
        limit = self.settings.max_segments
        if limit is not None and len(self._conversations) >= limit:
            self._has_reached_limit = True
            raise CallError(
                f"the call continues none of the episode's {limit} conversations, and there may be no more "
                "(agent.max_segments); send the messages of an earlier call and its response before new ones",
                400,
                "max_segments",
            )
        if prepared.continuation.fork_reason is not None:
            self._forks[prepared.continuation.fork_reason] += 1
        branch = self._turns.begin_branch(tokens)
        num_prompt = len(tokens) - len(prepared.opening)
        conversation = Conversation(branch, num_prompt, tools_key(call), is_chat=call.is_chat, is_trained=is_trained)
        self._conversations.append(conversation)
        return conversation

    def _extend(self, conversation: Conversation, tokens: list[int], *, closes: bool) -> None:
        """Append the agent's tokens to a conversation.

        Args:
            conversation: The conversation.
            tokens: Tokens to append.
            closes: The tokens begin with the end of the last response. Its end token is not appended twice.
        """
        branch = conversation.branch
        last = branch.token_ids[-1]
        # A response that was cut off has no end token, and the template's must be added.
        is_closed = closes and branch.finish_reason == FinishReason.STOP
        if is_closed and tokens and self._reader.is_same_end(last, tokens[0]):
            tokens = tokens[1:]
        if len(tokens) >= branch.tokens_left:
            raise self._too_long(branch.position + len(tokens))
        branch.append(tokens)

    def _too_long(self, tokens: int) -> CallError:
        self._is_too_long = True
        return ContextLengthError(f"the conversation has {tokens} tokens", self._turns.params.max_new_tokens)
