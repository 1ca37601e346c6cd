"""Responses of several turns, driven by a user function: sample, let a tool respond, sample again.

    async def generate(prompt: Prompt, turns: Turns) -> Completion:
        turn = await turns.sample()
        turns.append(tool(turn.text))
        await turns.sample()
        return turns.finish()

The tokens of all turns are one sequence, and every turn is sampled from exactly the tokens before it. Text is never
decoded and encoded again, which could give other tokens. ``rollout.generate`` names the function.

A response that was canceled, or restored from a checkpoint, continues by running the function again: its turns return
the recorded tokens until these are used up. A function that behaves differently this time continues from the first
difference, and the recorded tokens after it are dropped.
"""

import inspect
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_dppo.errors import FunctionError, GenerateError, UserError
from megatron_dppo.functions import load_function
from megatron_dppo.rewards.item import read_reward, short_repr
from megatron_dppo.rollout.response import GrowingResponse
from megatron_dppo.rollout.response_text import decode_response
from megatron_dppo.rollout.stop_strings import StopMatch, StopStrings
from megatron_dppo.types import Completion, FinishReason, Prompt, SamplingParams
from megatron_dppo.types.model_folder import Tokenizer

GenerateFunction = Callable[[Prompt, "Turns"], Awaitable[Completion]]
SampleTokens = Callable[[GrowingResponse, int, tuple[int, ...]], Awaitable[FinishReason | None]]
"""Function that extends a sequence of the response.

Its arguments are the sequence, the maximum number of new tokens and further stop tokens. It returns the finish reason,
or None if the response was canceled. Several sequences of one response may be extended at the same time.
"""


class TurnsStopped(BaseException):
    """The response is canceled. Not an ``Exception``, so that a user's ``except Exception`` does not catch it."""


@dataclass(frozen=True)
class Turn:
    """Tokens that were sampled by one call."""

    token_ids: tuple[int, ...]
    text: str
    """Decoded text without special tokens."""
    finish_reason: FinishReason
    """Reason of the end. ``length``: the limit of this turn or ``rollout.max_new_tokens`` is reached."""
    stop_match: StopMatch | None = None


class ResponseBranch:
    """One sequence of tokens: of an agent's response one of several. Added tokens count to ``max_new_tokens``, too."""

    def __init__(
        self, response: GrowingResponse, params: SamplingParams, tokenizer: Tokenizer, sample: SampleTokens
    ) -> None:
        self.params = params
        self.tokenizer = tokenizer
        self.response = response
        self.position = 0
        """Number of tokens that were sampled or added so far, without recorded ones that are yet to be replayed."""
        self.finish_reason = FinishReason.STOP
        self._sample = sample

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens so far, without the prompt."""
        return tuple(self.response.tokens[: self.position])

    @property
    def tokens_left(self) -> int:
        """Number of tokens that can still be sampled or added."""
        return self.params.max_new_tokens - self.position

    async def sample(
        self,
        max_new_tokens: int | None = None,
        stop_token_ids: Sequence[int] = (),
        stop_strings: StopStrings | None = None,
    ) -> Turn:
        """Sample until an end token, a token of ``stop_token_ids`` (it stays in the response), a string, or the limit.

        An empty turn with ``length`` if no token is left; a ServerError if no server responded.
        """
        limit = self.tokens_left if max_new_tokens is None else min(max_new_tokens, self.tokens_left)
        start = self.position
        match = None
        if limit <= 0:
            self.finish_reason = FinishReason.LENGTH
        else:
            self.finish_reason, match = await self._sample_turn(start, limit, tuple(stop_token_ids), stop_strings)
        tokens = tuple(self.response.tokens[start : self.position])
        return Turn(tokens, decode_response(self.tokenizer, tokens), self.finish_reason, match)

    async def _sample_turn(
        self, start: int, limit: int, stop: tuple[int, ...], strings: StopStrings | None
    ) -> tuple[FinishReason, StopMatch | None]:
        """Replay the recorded turn that begins at ``start``, or sample its remaining tokens."""
        response = self.response
        recorded = next(((end, reason) for end, reason in response.turn_ends if end > start), None)
        # Without a recorded end, the last turn was interrupted: all tokens after ``start`` belong to it.
        end = len(response.tokens) if recorded is None else recorded[0]
        # The function behaves differently this time: it samples where it appended, or with a lower limit.
        if not response.is_fully_sampled(start, end) or end - start > limit:
            self._drop_recorded(start)
            recorded = None
            end = start
        match = None
        if recorded is not None:
            match = None if strings is None else strings.find(response.tokens[start:end].tolist())
        else:
            if strings is None:
                reason = await self._sample(response, limit - (end - start), stop)
            else:
                reason, match = await self._sample_until_string(start, limit, stop, strings)
            # Canceled. The exception unwinds the user's function, which runs anew when the response continues.
            if reason is None:
                raise TurnsStopped
            recorded = (len(response.tokens), reason)
            response.turn_ends.append(recorded)
        self.position = recorded[0]
        return recorded[1], match

    async def _sample_until_string(
        self, start: int, limit: int, stop: tuple[int, ...], strings: StopStrings
    ) -> tuple[FinishReason | None, StopMatch | None]:
        """Sample in parts, and drop the tokens behind the first stop string."""
        response = self.response
        reason: FinishReason | None = FinishReason.LENGTH
        for size in (0, *strings.request_sizes(limit - (len(response.tokens) - start))):
            # A part that was interrupted may have a stop string already.
            if size:
                reason = await self._sample(response, size, stop)
            match = strings.find(response.tokens[start:].tolist())
            if match is not None:
                response.num_after_stop += len(response.tokens) - start - match.num_tokens
                response.truncate(start + match.num_tokens)
                return FinishReason.STOP, match
            if size and reason != FinishReason.LENGTH:
                break
        return reason, None

    def append(self, given: str | Sequence[int]) -> int:
        """Add text or token ids that are not trained on, and return how many tokens fit.

        Text is encoded without special tokens. Tokens beyond ``tokens_left`` are dropped, and the response then ends
        with ``length``.
        """
        tokens = self.tokenizer.encode(given, add_special_tokens=False) if isinstance(given, str) else list(given)
        fitting = tokens[: self.tokens_left]
        response = self.response
        start = self.position
        end = start + len(fitting)
        # Recorded tokens are kept only if they are the same and were added then, too.
        if response.tokens[start:end].tolist() != fitting or response.has_sampled_tokens(start, end):
            self._drop_recorded(start)
            response.append_unsampled(fitting)
        self.position = end
        if len(fitting) < len(tokens):
            self.finish_reason = FinishReason.LENGTH
        return len(fitting)

    def _drop_recorded(self, start: int) -> None:
        """Drop recorded tokens that the function does not repeat, and count the sampled ones."""
        self.response.num_not_repeated += self.response.num_sampled_tokens(start)
        self.response.truncate(start)

    def completion(self) -> Completion:
        """Return the sequence as a completion, without recorded tokens that were not replayed."""
        self.response.truncate(self.position)
        return self.response.completion(self.finish_reason, self.tokenizer)


class Turns(ResponseBranch):
    """One response in progress, as a user function sees it."""

    def __init__(
        self,
        prompt: Prompt,
        response: GrowingResponse,
        params: SamplingParams,
        tokenizer: Tokenizer,
        sample: SampleTokens,
    ) -> None:
        super().__init__(response, params, tokenizer, sample)
        self.prompt = prompt
        self._begun: set[GrowingResponse] = set()
        """Sequences that an agent has begun."""
        self.finished: Completion | None = None
        """Completion that ``finish`` returned."""

    def begin_branch(self, token_ids: Sequence[int]) -> ResponseBranch:
        """Begin a sequence of an agent's episode with tokens that are not trained on, and return it.

        A recorded sequence that begins with the same tokens is replayed, in whatever order they begin this time.
        """
        recorded = [each for each in (self.response, *self.response.branches) if each not in self._begun]
        response = next((each for each in recorded if each.starts_with_given(token_ids)), None)
        if response is None:
            response = next((each for each in recorded if not each.tokens), None) or self.response.add_branch()
        self._begun.add(response)
        branch = ResponseBranch(response, self.params, self.tokenizer, self._sample)
        branch.append(token_ids)
        return branch

    def dropped_tokens(self) -> dict[str, int]:
        """Return the number of sampled tokens that no begun sequence has, by reason."""
        responses = (self.response, *self.response.branches)
        not_begun = sum(each.num_sampled_tokens(0) for each in responses if each not in self._begun)
        return {
            "after_stop": sum(each.num_after_stop for each in responses),
            "not_repeated": sum(each.num_not_repeated for each in responses) + not_begun,
        }

    def finish(self, reward: float | None = None, **fields: object) -> Completion:
        """Return the response, with other fields of ``Completion``. Without a reward the reward function is called.

        Raises:
            ValueError, TypeError: Nothing was sampled, or the reward is no finite float32.
        """
        return self.finish_with(self.completion(), reward, **fields)

    def finish_with(self, completion: Completion, reward: float | None, **fields: object) -> Completion:
        """Return a response that was put together from branches; the other arguments are those of ``finish``."""
        reward = None if reward is None else check_reward(reward)
        changes: dict[str, Any] = fields
        self.finished = replace(completion, reward=reward, **changes)
        return self.finished


def check_reward(value: object) -> float:
    """Return a reward as a float, which must be finite in float32, in which advantages are computed."""
    if isinstance(value, Mapping):
        raise TypeError(f"the reward must be a number, got {short_repr(value)}")
    return read_reward(value)[0]


def load_generate(name: str) -> GenerateFunction:
    """Return the function that ``rollout.generate`` names."""
    try:
        function = load_function(name, "rollout.generate")
    except FunctionError as error:
        raise GenerateError(str(error)) from error
    if not inspect.iscoroutinefunction(function):
        raise GenerateError(f"rollout.generate = {name!r} is not 'async def'; expected async def f(prompt, turns)")
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise GenerateError(
            f"rollout.generate = {name!r} has the parameters {inspect.signature(function)}; expected (prompt, turns)"
        ) from error
    return function


async def run_user_function(
    function: GenerateFunction,
    prompt: Prompt,
    response: GrowingResponse,
    params: SamplingParams,
    tokenizer: Tokenizer,
    sample_tokens: SampleTokens,
) -> Completion | None:
    """Run a user function; ``sample_tokens`` samples its turns. None if one of them was canceled.

    A GenerateError if it raised an exception, or did not return ``turns.finish()``.
    """
    was_canceled = False

    async def sample_turn(
        sequence: GrowingResponse, limit: int, stop_token_ids: tuple[int, ...]
    ) -> FinishReason | None:
        nonlocal was_canceled
        reason = await sample_tokens(sequence, limit, stop_token_ids)
        was_canceled = was_canceled or reason is None
        return reason

    turns = Turns(prompt, response, params, tokenizer, sample_turn)
    name = f"rollout.generate: {getattr(function, '__name__', function)}"
    try:
        result = await function(prompt, turns)
    except TurnsStopped:
        return None
    # Errors of this package already say what to do.
    except UserError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise GenerateError(
            f"{name} failed on prompt {prompt.prompt_id}: {type(error).__name__}: {error} "
            f"({frame.filename}, line {frame.lineno})"
        ) from error
    if result is not turns.finished or result is None:
        raise GenerateError(f"{name} returned {result!r:.200}; expected the result of turns.finish()")
    # A function that catches every exception may return a completion of a response that was canceled.
    return None if was_canceled else result
