"""Responses that a user function ``rollout.generate`` makes of several turns."""

from __future__ import annotations

from typing import Protocol

from megatron_dppo.rollout.response import GrowingResponse
from megatron_dppo.rollout.turns import GenerateFunction, SampleTokens, Turns, TurnsStopped, call_generate
from megatron_dppo.types import Completion, FinishReason, Prompt, SamplingParams
from megatron_dppo.types.model_folder import Tokenizer


class ResponseInProgress(Protocol):
    """A response that an engine extends."""

    prompt: Prompt
    response: GrowingResponse


async def run_user_function(
    function: GenerateFunction,
    sample: ResponseInProgress,
    params: SamplingParams,
    tokenizer: Tokenizer,
    sample_tokens: SampleTokens,
) -> Completion | None:
    """Run a user function until its response is complete or canceled.

    Args:
        function: The user function.
        sample: The response.
        params: Sampling parameters of the complete response.
        tokenizer: Decodes the tokens of each turn.
        sample_tokens: Extends ``sample.response`` or one of its branches by one turn.

    Returns:
        The completion; None if a turn was canceled.

    Raises:
        GenerateError: The function failed.
    """
    was_canceled = False

    async def sample_turn(
        response: GrowingResponse, limit: int, stop_token_ids: tuple[int, ...]
    ) -> FinishReason | None:
        nonlocal was_canceled
        reason = await sample_tokens(response, limit, stop_token_ids)
        was_canceled = was_canceled or reason is None
        return reason

    turns = Turns(sample.prompt, sample.response, params, tokenizer, sample_turn)
    try:
        completion = await call_generate(function, turns)
    except TurnsStopped:
        return None
    # A function that catches every exception may return a completion of a response that was canceled.
    return None if was_canceled else completion
