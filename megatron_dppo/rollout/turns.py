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

from __future__ import annotations

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
from megatron_dppo.types import Completion, FinishReason, Prompt, SamplingParams

GenerateFunction = Callable[[Prompt, "Turns"], Awaitable[Completion]]
SampleTokens = Callable[[int, tuple[int, ...]], Awaitable[FinishReason | None]]
"""Function that extends the response.

Its arguments are the maximum number of new tokens and further stop tokens. It returns the finish reason, or None if the
response was canceled.
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


@dataclass(eq=False)
class ResponseBranch:
    """One sequence of tokens. A response that was started anew has several branches, one of which is finished."""

    response: GrowingResponse
    position: int = 0
    """Number of tokens that the user function has sampled or added so far."""
    finish_reason: FinishReason = FinishReason.STOP


class Turns:
    """One response in progress, as a user function sees it.

    Args:
        prompt: Prompt of the response.
        response: Tokens of the response; recorded ones are replayed.
        params: Sampling parameters; ``max_new_tokens`` limits the whole response, added tokens included.
        tokenizer: Tokenizer of the model.
        sample: Function that extends the response.
    """

    def __init__(
        self, prompt: Prompt, response: GrowingResponse, params: SamplingParams, tokenizer: Any, sample: SampleTokens
    ) -> None:
        self.prompt = prompt
        self.params = params
        self.tokenizer = tokenizer
        self._branch = ResponseBranch(response)
        self._sample = sample
        self.completion: Completion | None = None
        """Completion that ``finish`` returned."""

    @property
    def branch(self) -> ResponseBranch:
        """Current branch."""
        return self._branch

    @property
    def response(self) -> GrowingResponse:
        """Response of the current branch."""
        return self._branch.response

    def start_branch(self) -> ResponseBranch:
        """Continue with a new, empty branch and return it."""
        return self.switch_branch(ResponseBranch(self.response.empty_copy()))

    def switch_branch(self, branch: ResponseBranch) -> ResponseBranch:
        """Continue with an existing branch and return it; ``finish`` applies to the last one."""
        self._branch = branch
        return branch

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens of the response so far, without the prompt."""
        return tuple(self.response.tokens[: self._branch.position])

    @property
    def tokens_left(self) -> int:
        """Number of tokens that can still be sampled or added."""
        return self.params.max_new_tokens - self._branch.position

    async def sample(self, max_new_tokens: int | None = None, stop_token_ids: Sequence[int] = ()) -> Turn:
        """Sample until an end token, a token of ``stop_token_ids`` (it stays in the response), or the limit.

        Returns an empty turn with ``length`` if no token is left.

        Raises:
            ServerError: No server responded.
        """
        limit = self.tokens_left if max_new_tokens is None else min(max_new_tokens, self.tokens_left)
        start = self._branch.position
        self._branch.finish_reason = (
            FinishReason.LENGTH if limit <= 0 else await self._sample_turn(start, limit, tuple(stop_token_ids))
        )
        tokens = tuple(self.response.tokens[start : self._branch.position])
        text = decode_response(self.tokenizer, tokens)
        return Turn(tokens, text, self._branch.finish_reason)

    async def _sample_turn(self, start: int, limit: int, stop: tuple[int, ...]) -> FinishReason:
        """Replay the recorded turn that begins at ``start``, or sample its remaining tokens."""
        response = self.response
        recorded = next(((end, reason) for end, reason in response.turn_ends if end > start), None)
        # Without a recorded end, the last turn was interrupted: all tokens after ``start`` belong to it.
        end = len(response.tokens) if recorded is None else recorded[0]
        # The function behaves differently this time: it samples where it appended, or with a lower limit.
        if not response.is_fully_sampled(start, end) or end - start > limit:
            response.truncate(start)
            recorded = None
            end = start
        if recorded is None:
            reason = await self._sample(limit - (end - start), stop)
            # Canceled. The exception unwinds the user's function, which runs anew when the response continues.
            if reason is None:
                raise TurnsStopped
            recorded = (len(response.tokens), reason)
            response.turn_ends.append(recorded)
        self._branch.position = recorded[0]
        return recorded[1]

    def append(self, given: str | Sequence[int]) -> int:
        """Add text or token ids that are not trained on, and return how many tokens fit.

        Text is encoded without special tokens. Tokens beyond ``tokens_left`` are dropped, and the response then ends
        with ``length``.
        """
        tokens = self.tokenizer.encode(given, add_special_tokens=False) if isinstance(given, str) else list(given)
        fitting = tokens[: self.tokens_left]
        response = self.response
        start = self._branch.position
        end = start + len(fitting)
        # Recorded tokens are kept only if they are the same and were added then, too.
        if response.tokens[start:end].tolist() != fitting or response.has_sampled_tokens(start, end):
            response.truncate(start)
            response.append_unsampled(fitting)
        self._branch.position = end
        if len(fitting) < len(tokens):
            self._branch.finish_reason = FinishReason.LENGTH
        return len(fitting)

    def finish(self, reward: float | None = None, **fields: Any) -> Completion:
        """Return the response.

        Args:
            reward: Reward of the response. None: the reward function is called.
            fields: Other fields of ``Completion``.

        Raises:
            ValueError, TypeError: Nothing was sampled, or the reward is no finite float32.
        """
        reward = None if reward is None else check_reward(reward)
        # Recorded tokens that the function did not ask for this time are no part of the response.
        self.response.truncate(self._branch.position)
        completion = self.response.completion(self._branch.finish_reason, self.tokenizer)
        self.completion = replace(completion, reward=reward, **fields)
        return self.completion


def check_reward(value: object) -> float:
    """Return a reward as a float.

    Raises:
        ValueError, TypeError: It is no number, or not finite in float32, in which advantages are computed.
    """
    if isinstance(value, Mapping):
        raise TypeError(f"the reward must be a number, got {short_repr(value)}")
    return read_reward(value)[0]


def load_generate(name: str) -> GenerateFunction:
    """Return the function that ``rollout.generate`` names.

    Raises:
        GenerateError: The function cannot be imported, is not ``async def``, or does not take two arguments.
    """
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


async def call_generate(function: GenerateFunction, turns: Turns) -> Completion:
    """Run a user function.

    Raises:
        GenerateError: It raised an exception, or did not return ``turns.finish()``.
        ServerError: No server responded.
    """
    name = f"rollout.generate: {getattr(function, '__name__', function)}"
    try:
        result = await function(turns.prompt, turns)
    # Errors of this package already say what to do.
    except UserError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise GenerateError(
            f"{name} failed on prompt {turns.prompt.prompt_id}: {type(error).__name__}: {error} "
            f"({frame.filename}, line {frame.lineno})"
        ) from error
    if result is not turns.completion or result is None:
        raise GenerateError(f"{name} returned {result!r:.200}; expected the result of turns.finish()")
    return result
