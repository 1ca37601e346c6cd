"""One episode: the calls of an agent as conversations, each a sequence of tokens that only grows.

A call that continues an earlier one extends its sequence, see ``conversations``. Any other call begins a sequence. All
of them are segments of the episode, and train. Responses stay the tokens that were sampled.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from megatron_dppo.rollout.response_text import decode_tokens
from megatron_dppo.rollout.stop_strings import StopStrings
from megatron_dppo.rollout.turns import Turns
from megatron_dppo.types import Completion, FinishReason, SegmentCredit, ToolTime
from megatron_dppo_agents.agent_request import AgentRequest, CallError, ContextLengthError
from megatron_dppo_agents.agent_response import AgentResponse
from megatron_dppo_agents.call_ids import CallIds
from megatron_dppo_agents.conversations import Conversation, TurnSpan, tools_key
from megatron_dppo_agents.episode_result import CallCounts, SegmentChoice, choose_segments, token_metrics
from megatron_dppo_agents.episode_rewards import AgentRun, EpisodeRewards
from megatron_dppo_agents.named_rewards import NamedRewards
from megatron_dppo_agents.prepared_call import PreparedCall, count_prompt_tokens, prepare_call
from megatron_dppo_agents.protocol_record import StoredResponses
from megatron_dppo_agents.response_reader import ResponseReader
from megatron_dppo_agents.running_calls import RunningCalls
from megatron_dppo_agents.segments import join_segments
from megatron_dppo_agents.template import ChatTemplate
from megatron_dppo_agents.tool_clock import ToolClock

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
    credit: Literal["episode", "turn", "agent"] = "episode"
    """``agent.credit``."""
    untrained_prompts: tuple[str, ...] = ()
    """``agent.untrained_prompts``."""
    rewards: NamedRewards = field(default_factory=NamedRewards)
    """Parts in which the agent gives its reward."""


class Episode:
    """Calls of an agent for one sample. Belongs to one event loop, except for what the endpoint counts.

    Calls are prepared one after the other by a thread of the executor, and sampled side by side. A call that is
    rejected, or names an unknown response, raises ``CallError``.
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
        self._rewards = EpisodeRewards(settings.rewards)
        self._prepare_lock = asyncio.Lock()
        self._counts = CallCounts()
        self.calls = RunningCalls(self._counts)
        self.stored_responses = StoredResponses()
        self._tool_clock = ToolClock()
        self._call_ids = CallIds()
        self._runs: tuple[AgentRun, ...] = ()

    @property
    def is_cut_off(self) -> bool:
        """True if a limit rejected a call. Not for its length, if the agent went on with a shorter conversation."""
        return self._has_reached_limit or self._is_too_long

    @property
    def reward(self) -> float | None:
        """Sum of the rewards that the agent sent for the episode and for single responses. None: it sent none."""
        return self._rewards.total

    def add_reward(self, reward: float, response_id: str | None = None) -> None:
        """Set the reward of the episode, or that of a response; a later one replaces it."""
        if response_id is None:
            self._rewards.episode = reward
            return
        _, order = self._find_response(response_id)
        self._rewards.by_response[order] = reward

    def add_rewards(self, parts: Mapping[str, float]) -> None:
        """Set the reward of the episode to the weighted sum of its parts; later ones replace them."""
        self._rewards.set_parts(parts)

    def set_runs(self, runs: Sequence[AgentRun]) -> None:
        """Assign the conversations to the runs of an environment's agents by their sessions.

        Conversations of other sessions, such as those of a run that was tried again, are left out of training.
        """
        self._runs = tuple(runs)
        by_session = {run.session: index for index, run in enumerate(runs)}
        for conversation in self._conversations:
            conversation.run = by_session.get(conversation.session)
            if conversation.run is None or not runs[conversation.run].is_trained:
                conversation.is_left_out = True

    @property
    def run_reward(self) -> float:
        """Mean reward of the runs with a conversation that trains; 0 if there is none."""
        trained = {each.run for each in self._conversations if each.num_sampled and not each.is_left_out}
        rewards = [run.reward for index, run in enumerate(self._runs) if index in trained]
        return sum(rewards) / max(1, len(rewards))

    def leave_out(self, response_id: str) -> None:
        """Leave the conversation of a response out of training, with its responses to come."""
        conversation, _ = self._find_response(response_id)
        conversation.is_left_out = True

    def _leave_out_last(self, name: str) -> None:
        """Remove a response that nobody got from the end of its conversation. One that was continued was read."""
        conversation, order = self._conversation_by_response[name]
        if conversation.last_order == order:
            conversation.turns.pop()
            conversation.branch.position = conversation.turns[-1].end if conversation.turns else 0
            conversation.branch.finish_reason = FinishReason.STOP

    def _find_response(self, response_id: str) -> tuple[Conversation, int]:
        # An id is a prefix of the protocol and the name of the response.
        name = response_id.replace("_", "-").rpartition("-")[2]
        if name not in self._conversation_by_response:
            raise CallError(f"'id' = {response_id!r:.80} is no response of this episode; send the 'id' of its body")
        return self._conversation_by_response[name]

    def admit_call(self) -> None:
        """Count a call, before its body is read."""
        if self._counts.admitted >= self.settings.max_calls:
            self._has_reached_limit = True
            key = self._turns.prompt.limit_key("agent.max_calls")
            raise CallError(f"the episode has made its {self.settings.max_calls} calls ({key})", 400, "max_calls")
        self._counts.admitted += 1

    async def respond(
        self, read: Callable[[], AgentRequest], *, digest: bytes = b"", is_trained: bool = True, session: str = ""
    ) -> AgentResponse:
        """Return the policy's response to a call; see ``RunningCalls.respond``."""
        process = partial(self._process, read, time.monotonic(), is_trained=is_trained, session=session)
        return await self.calls.respond(process, digest)

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens of a conversation."""
        return self._turns.params.max_new_tokens

    async def count_tokens(self, read: Callable[[], AgentRequest]) -> int:
        """Return the number of prompt tokens that a call would have as the first of its conversation."""
        counted = self._counts.token_counts
        if counted >= self.settings.max_calls * _COUNTS_PER_CALL:
            raise CallError(
                f"the episode has counted tokens {counted} times, {_COUNTS_PER_CALL} for each of its calls "
                f"({self._turns.prompt.limit_key('agent.max_calls')})",
                429,
                "too_many_requests",
            )
        self._counts.token_counts += 1
        async with self._prepare_lock:
            return await self.loop.run_in_executor(
                self.executor, partial(count_prompt_tokens, read, self._template, self._call_ids, self.max_tokens)
            )

    async def finish(self, failure: str, counts: Mapping[str, float]) -> Completion:
        """Return the response, with all segments that are trained on."""
        reward = None if failure else self.reward
        reward_parts = {} if failure else self._rewards.parts
        for response in self.calls.undelivered:
            self._leave_out_last(response.name)
        # Sampled by calls that were in progress when the agent ended, and responses that nobody read.
        interrupted = sum(c.branch.response.num_sampled_tokens(c.branch.position) for c in self._conversations)
        # Such a call may have begun a conversation and sampled nothing.
        self._conversations = [each for each in self._conversations if each.num_sampled]
        if not self._conversations:
            limit = self._turns.prompt.limit_key("rollout.max_new_tokens")
            too_long = f": its messages have more tokens than {limit}" if self.is_cut_off else ""
            failure = failure or f"the agent ended without a response of the policy{too_long}"
            await self._sample_one_token()
        choice = choose_segments(self._conversations, self.settings.segments)
        if not choice.trained:
            failure = failure or "the agent left all responses of the policy out of training; leave out some of them"
            last = self._conversations[-1]
            choice = SegmentChoice([last], choice.left_out - last.num_sampled, 0)
        trained = choice.trained
        last_index = max(range(len(trained)), key=lambda index: trained[index].last_order)
        completion = join_segments([self._segment(each) for each in trained], last_index)
        if self.settings.credit == "agent" and not failure:
            completion = replace(completion, segment_credits=tuple(map(self._credit, trained)))
        if self.is_cut_off:
            # Replaces the reason of the last response: the agent wanted to continue and was not allowed to.
            completion = replace(completion, finish_reason=FinishReason.LENGTH)
        tokens = token_metrics(self._conversations, choice, interrupted, self._turns.dropped_tokens())
        return self._turns.finish_with(
            completion,
            reward,
            reward_parts=reward_parts,
            failure=failure,
            counts={**self._counts.metrics(), **tokens, **self._tool_clock.metrics(), **counts},
        )

    def _credit(self, conversation: Conversation) -> SegmentCredit:
        assert conversation.run is not None, "conversations without a run are left out"
        run = self._runs[conversation.run]
        return SegmentCredit(run.agent, conversation.run, run.reward)

    def _segment(self, conversation: Conversation) -> Completion:
        """Return a conversation as a completion, with the text from its first response on."""
        branch = conversation.branch
        text = self._reader.answer_text(branch.token_ids[conversation.prompt_tokens :])
        past = self._rewards.past_rewards(conversation) if self.settings.credit == "turn" else None
        last_tokens = {turn.order: turn.end - 1 for turn in conversation.turns}
        times = tuple(
            ToolTime(last_tokens[span.order], span.seconds, span.tools)
            for span in self._tool_clock.spans
            if span.order in last_tokens
        )
        return replace(branch.completion(), text=text, past_rewards=past, tool_times=times)

    async def _sample_one_token(self) -> None:
        """Sample one token: a response must have one, even that of a failed sample, which gets no gradient."""
        branch = self._turns.begin_branch([self._turns.tokenizer.eos_token_id or 0])
        conversation = Conversation(branch, branch.position)
        await branch.sample(1)
        conversation.turns.append(TurnSpan(conversation.prompt_tokens, branch.position, 0))
        self._conversations.append(conversation)

    async def _process(
        self, read: Callable[[], AgentRequest], arrival: float, *, is_trained: bool, session: str
    ) -> AgentResponse:
        # One call after the other finds its conversation, so that two calls cannot continue the same one.
        async with self._prepare_lock:
            self.calls.check_interrupted()
            prepare = partial(
                prepare_call,
                read,
                self._conversations,
                self._template,
                self._reader,
                self._call_ids,
                max_tokens=self.max_tokens,
                is_trained=is_trained,
                session=session,
            )
            try:
                prepared = await self.loop.run_in_executor(self.executor, prepare)
                conversation = self._append(prepared, is_trained=is_trained, session=session)
            except ContextLengthError:
                self._is_too_long = True
                raise
            self._is_too_long = False
            self._tool_clock.end_tools(prepared.request.messages, arrival)
            conversation.is_busy = True
        try:
            with self.calls.sampling():
                return await self._sample_response(prepared, conversation)
        finally:
            conversation.is_busy = False

    async def _sample_response(self, prepared: PreparedCall, conversation: Conversation) -> AgentResponse:
        call = prepared.request
        self._counts.answered += 1
        self._counts.ignored.update([*call.ignored, *self._reader.unfollowed_settings(call)])
        branch = conversation.branch
        prompt = branch.token_ids
        decode = self._reader.text if call.is_chat else partial(decode_tokens, self._turns.tokenizer)
        strings = StopStrings(call.stop, decode) if call.stop else None
        turn = await branch.sample(call.limit, self._reader.stop_token_ids(call), strings)
        match = turn.stop_match
        parsed = None
        if call.is_chat:
            parsed = self._reader.parse(call, prompt, turn.token_ids, len(prepared.opening), match)
            parsed = replace(parsed, tool_calls=self._call_ids.make_unique(parsed.tool_calls, call.messages))
            message = self._reader.message(parsed)
        else:
            text = decode(turn.token_ids)
            message = {"role": "assistant", "content": text if match is None else text[: match.start]}
        finish_reason = "tool_calls" if "tool_calls" in message else "stop"
        response = AgentResponse(
            call=call,
            message=message,
            token_ids=turn.token_ids,
            prompt_token_ids=prompt,
            finish_reason=finish_reason if turn.finish_reason == FinishReason.STOP else "length",
            stop_string=None if match is None else match.text,
        )
        if call.returns_logprobs:
            values = branch.response.logprobs(len(prompt), branch.position)
            texts = tuple(self._turns.tokenizer.decode([token]) for token in turn.token_ids)
            response = replace(response, logprobs=values, token_texts=texts)
        order = len(self._conversation_by_response)
        conversation.turns.append(TurnSpan(len(prompt), branch.position, order))
        self._conversation_by_response[response.name] = (conversation, order)
        self._tool_clock.begin_tools(order, response.tool_calls)
        if parsed is not None:
            self._counts.malformed += parsed.num_malformed
            conversation.messages = [*call.messages, self._reader.sampled_message(parsed)]
            conversation.keys = self._reader.message_keys(conversation.messages)
            conversation.response_keys.add(conversation.keys[-1])
        elif isinstance(call.text, str):
            # With its stop string: a prompt without that does not continue these tokens.
            conversation.text = call.text + text
            conversation.prompt_text = call.text
        return response

    def _append(self, prepared: PreparedCall, *, is_trained: bool, session: str) -> Conversation:
        call = prepared.request
        tokens = [*prepared.continuation.token_ids, *prepared.opening]
        conversation = prepared.continuation.conversation
        if conversation is not None:
            self._extend(conversation, tokens, closes=call.is_chat)
            return conversation
        if len(tokens) >= self.max_tokens or not tokens:
            raise self._too_long(len(tokens))
        limit = self.settings.max_segments
        if limit is not None and len(self._conversations) >= limit:
            self._has_reached_limit = True
            key = self._turns.prompt.limit_key("agent.max_segments")
            raise CallError(
                f"the call continues none of the episode's {limit} conversations, and there may be no more ({key}); "
                "send the messages of an earlier call and its response before new ones",
                400,
                "max_segments",
            )
        if prepared.continuation.fork_reason is not None:
            self._counts.forks[prepared.continuation.fork_reason] += 1
        branch = self._turns.begin_branch(tokens)
        num_prompt = len(tokens) - len(prepared.opening)
        conversation = Conversation(
            branch, num_prompt, tools_key(call), is_chat=call.is_chat, is_trained=is_trained, session=session
        )
        conversation.is_left_out = any(each in text for each in self.settings.untrained_prompts for text in call.texts)
        self._conversations.append(conversation)
        return conversation

    def _extend(self, conversation: Conversation, tokens: list[int], *, closes: bool) -> None:
        """Append the agent's tokens to a conversation; with ``closes`` they begin with the end of its last response."""
        branch = conversation.branch
        last = branch.token_ids[-1]
        # A response that was cut off has no end token, and the template's must be added.
        is_closed = closes and branch.finish_reason == FinishReason.STOP
        # The end token is not appended twice.
        if is_closed and tokens and self._reader.is_same_end(last, tokens[0]):
            tokens = tokens[1:]
        if len(tokens) >= branch.tokens_left:
            raise self._too_long(branch.position + len(tokens))
        branch.append(tokens)

    def _too_long(self, tokens: int) -> CallError:
        return ContextLengthError(f"the conversation has {tokens} tokens", self.max_tokens)
