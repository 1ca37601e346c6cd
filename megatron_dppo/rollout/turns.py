"""Responses of several turns, driven by a user's function: sample, let a tool answer, sample again.

    async def generate(prompt: Prompt, turns: Turns) -> Completion:
        turn = await turns.sample()
        turns.append(tool(turn.text))
        await turns.sample()
        return turns.finish()

The tokens of all turns are one sequence, and every turn is sampled from exactly the tokens before it; text is never
decoded and encoded again, which could give other tokens. ``rollout.generate`` names the function.

A response that is stopped, or found in a checkpoint, goes on by running the function again: its turns get what they got
before, until it asks for more than that. A function that does not ask for the same again goes on from where it differs;
what came after is dropped.
"""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_dppo.errors import FunctionError, GenerateError, UserError
from megatron_dppo.functions import load_function
from megatron_dppo.rollout.response import GrowingResponse
from megatron_dppo.types import Completion, FinishReason, Prompt, SamplingParams

GenerateFunction = Callable[[Prompt, "Turns"], Awaitable[Completion]]
Sample = Callable[[int, tuple[int, ...]], Awaitable[FinishReason | None]]
"""(new tokens at most, further tokens to stop at) -> why it ended, when the response has grown; None = told to"""


class TurnsStopped(BaseException):
    """A response is to stop now; passes through a user's ``except Exception``."""


@dataclass(frozen=True)
class Turn:
    """What was sampled at one go."""

    token_ids: tuple[int, ...]
    text: str
    """without special tokens"""
    finish_reason: FinishReason
    """``length``: nothing is left of ``rollout.max_new_tokens``, or of the limit of this turn"""


@dataclass(eq=False)
class Strand:
    """One sequence of tokens. A response that is begun anew has several, of which one is finished."""

    response: GrowingResponse
    place: int = 0
    """what was sampled and given before lies behind it"""
    reason: FinishReason = FinishReason.STOP


class Turns:
    """One response on its way: what a user's function works with.

    Args:
        prompt: what it answers.
        response: what it fills.
        params: ``max_new_tokens`` limits the whole response, given tokens included.
        tokenizer: of the model.
        sample: extends the response.
    """

    def __init__(
        self, prompt: Prompt, response: GrowingResponse, params: SamplingParams, tokenizer: Any, sample: Sample
    ) -> None:
        self.prompt, self.params, self.tokenizer = prompt, params, tokenizer
        self._strand, self._sample = Strand(response), sample
        self.completion: Completion | None = None
        """what ``finish`` gave"""

    @property
    def strand(self) -> Strand:
        """The sequence that grows now."""
        return self._strand

    @property
    def response(self) -> GrowingResponse:
        """What grows now."""
        return self._strand.response

    def begin(self) -> Strand:
        """Go on with another, empty sequence; returns it."""
        return self.use(Strand(self.response.fresh()))

    def use(self, strand: Strand) -> Strand:
        """Go on with a sequence that was begun; ``finish`` is of the last one that was used."""
        self._strand = strand
        return strand

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The response so far, without the prompt."""
        return tuple(self.response.tokens[: self._strand.place])

    @property
    def tokens_left(self) -> int:
        """What can still be sampled or given."""
        return self.params.max_new_tokens - self._strand.place

    async def sample(self, max_new_tokens: int | None = None, stop_token_ids: Sequence[int] = ()) -> Turn:
        """Let the model go on, until an end token, a token of ``stop_token_ids`` (it stays), or the limit.

        An empty turn with ``length`` when no token is left.

        Raises:
            ServerError: no server gave an answer.
        """
        limit = self.tokens_left if max_new_tokens is None else min(max_new_tokens, self.tokens_left)
        start = self._strand.place
        self._strand.reason = (
            FinishReason.LENGTH if limit <= 0 else await self._turn(start, limit, tuple(stop_token_ids))
        )
        tokens = tuple(self.response.tokens[start : self._strand.place])
        return Turn(tokens, self.tokenizer.decode(tokens, skip_special_tokens=True), self._strand.reason)

    async def _turn(self, start: int, limit: int, stop: tuple[int, ...]) -> FinishReason:
        response = self.response
        known = next(((end, why) for end, why in response.turn_ends if end > start), None)
        until = len(response.tokens) if known is None else known[0]
        if not response.was_all_sampled(start, until) or until - start > limit:
            response.cut(start)
            known, until = None, start
        if known is None:
            reason = await self._sample(limit - (until - start), stop)
            if reason is None:
                raise TurnsStopped
            known = (len(response.tokens), reason)
            response.turn_ends.append(known)
        self._strand.place = known[0]
        return known[1]

    def append(self, given: str | Sequence[int]) -> int:
        """Add text (no special tokens are put around it) or token ids that are not trained on; returns how many fit.

        What is longer than ``tokens_left`` is cut off, and the response counts as cut off, too.
        """
        tokens = self.tokenizer.encode(given, add_special_tokens=False) if isinstance(given, str) else list(given)
        fits, start, response = tokens[: self.tokens_left], self._strand.place, self.response
        end = start + len(fits)
        if response.tokens[start:end].tolist() != fits or response.was_sampled(start, end):
            response.cut(start)
            response.append_given(fits)
        self._strand.place = end
        if len(fits) < len(tokens):
            self._strand.reason = FinishReason.LENGTH
        return len(fits)

    def finish(self, reward: float | None = None, **more: Any) -> Completion:
        """The response, with a reward or for the reward function.

        Args:
            reward: None = the reward function is asked.
            more: other fields of ``Completion``.

        Raises:
            ValueError: nothing was sampled, or a reward that is not finite.
        """
        if reward is not None and not math.isfinite(reward):
            raise ValueError(f"reward = {reward}, expected a finite number or None")
        self.response.cut(self._strand.place)
        completion = self.response.completion(self._strand.reason, self.tokenizer)
        self.completion = replace(completion, reward=None if reward is None else float(reward), **more)
        return self.completion


def load_generate(name: str) -> GenerateFunction:
    """The function that ``rollout.generate`` names.

    Raises:
        GenerateError: it cannot be imported, is not ``async def``, or does not take two arguments.
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
    """Run a user's function.

    Raises:
        GenerateError: it raised, or returned something else than ``turns.finish()``.
        ServerError: no server gave an answer.
    """
    name = f"rollout.generate: {getattr(function, '__name__', function)}"
    try:
        result = await function(turns.prompt, turns)
    except UserError:
        raise
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise GenerateError(
            f"{name} failed on prompt {turns.prompt.prompt_id}: {type(error).__name__}: {error} "
            f"({place.filename}, line {place.lineno})"
        ) from error
    if result is not turns.completion or result is None:
        raise GenerateError(f"{name} returned {result!r:.200}; expected what turns.finish() gives")
    return result
