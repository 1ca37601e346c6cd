"""The probe before a run, and after a weight sync: does the server mean by its log-probabilities what training means?

``ask`` sends one request; the trainer computes the log-probabilities of the same tokens (all its ranks take part, so
that this is left to the caller); ``judge`` compares and names the cause of a difference.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_dppo.errors import ServerError
from megatron_dppo.rollout.server import GenerateRequest, Generation, InferenceServer, ServerInfo
from megatron_dppo.types import RoutingShape, SamplingParams

Recompute = Callable[[Sequence[int], Sequence[int], float], Awaitable[Sequence[float]]]
"""(prompt, response, temperature) -> [R] log-probabilities of the response under the trainer's weights"""


class ProbeError(ServerError):
    """The server answers, but not what training needs."""


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How far apart the two programs' log-probabilities of a token may be, in nats."""

    mean: float
    """of the mean over the response of the absolute difference"""
    largest: float
    """of one token"""


TOLERANCES = {
    # Two programs that add up in another order differ by some 1e-6 a token; large models add longer sums.
    "fp32": Tolerance(mean=3e-5, largest=1e-4),
    # 8 bits of mantissa: 0.4 % of each logit. A token near the border of two experts may go to the other one, which
    # moves its log-probability by much; so the mean is the test, and the largest only catches what is absurd.
    "bf16": Tolerance(mean=0.05, largest=3.0),
    "fp16": Tolerance(mean=0.02, largest=3.0),
}
"""By the coarser dtype of server and trainer. In half precision a probe cannot tell the weights of one step from those
of the next: that is what versions and checksums are for."""

_RAW = {
    "sglang": "start the server without SGLANG_RETURN_ORIGINAL_LOGPROB=1 in its environment",
    "vllm": "start the server with --logprobs-mode processed_logprobs",
}
_FILTERED = {
    "sglang": "a gateway in between sets top_p, top_k or min_p: give the URL of the server itself",
    "vllm": "the server's defaults filter (generation_config.json): start it with --generation-config vllm",
}


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """What a run needs of its servers."""

    prompt: str
    """text of the request; long enough to fill pages of the prefix cache, so that stale ones show"""
    prompt_token_ids: tuple[int, ...]
    """the trainer's tokens of it, no special ones added"""
    vocab_size: int
    """of the trainer's model"""
    temperature: float
    dtype: str
    """``fp32``, ``bf16`` or ``fp16``: the coarser one of server and trainer"""
    topk_logprobs: int = 0
    routing: RoutingShape | None = None
    max_new_tokens: int = 32
    policy_version: int | None = None
    """the version that must have sampled every token; None = not asked"""


@dataclass(frozen=True, kw_only=True)
class ProbeAnswer:
    """What a server answered to the probe, complete and of the right vocabulary."""

    info: ServerInfo
    url: str
    generation: Generation


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """How well server and trainer agree."""

    mean_difference: float
    largest_difference: float


async def ask(server: InferenceServer, expected: Expectation, *, request_id: str = "probe") -> ProbeAnswer:
    """Send the probe's request, with everything that the run's requests ask for.

    Raises:
        ServerError: no answer, or a field is missing (the message names it and the flag to set).
        ProbeError: another tokenizer, another vocabulary, another policy version.
    """
    info = await server.info()
    tokens = await server.tokenize(expected.prompt)
    if tokens is not None and tokens != expected.prompt_token_ids:
        raise ProbeError(
            server.url,
            f"wrong tokenizer: the server makes {list(tokens[:8])}... ({len(tokens)} tokens) of the text of which "
            f"training makes {list(expected.prompt_token_ids[:8])}... ({len(expected.prompt_token_ids)}). It serves "
            f"{info.model!r}; start it with the tokenizer of model.path (--tokenizer-path, vLLM: --tokenizer)",
        )
    params = SamplingParams(
        max_new_tokens=expected.max_new_tokens,
        temperature=expected.temperature,
        topk_logprobs=expected.topk_logprobs,
    )
    request = GenerateRequest(
        request_id=request_id, token_ids=expected.prompt_token_ids, params=params, routing=expected.routing
    )
    generation = await server.generate(request)
    _check_tokens(generation, expected, info, server.url)
    return ProbeAnswer(info=info, url=server.url, generation=generation)


def _check_tokens(generation: Generation, expected: Expectation, info: ServerInfo, url: str) -> None:
    if not generation.token_ids:
        raise ProbeError(url, f"the server generated nothing (finish reason {generation.finish_reason!r})")
    largest = max(generation.token_ids)
    if generation.topk_token_ids is not None:
        largest = max(largest, int(generation.topk_token_ids.max()))
    if largest >= expected.vocab_size:
        raise ProbeError(
            url,
            f"wrong model or tokenizer: the server gives token {largest}, and the trainer's vocabulary has "
            f"{expected.vocab_size} tokens. It serves {info.model!r}; start it with model.path",
        )
    versions = sorted({span.policy_version for span in generation.versions})
    if expected.policy_version is not None and versions != [expected.policy_version]:
        raise ProbeError(
            url,
            f"wrong weights: the tokens come from version {versions}, expected {expected.policy_version} "
            "(-1 = weights that this run did not send); sync the weights again",
        )


def judge(
    answer: ProbeAnswer, expected: Expectation, recomputed: Sequence[float], recomputed_raw: Sequence[float]
) -> ProbeResult:
    """Compare the server's log-probabilities with the trainer's.

    Args:
        answer: what ``ask`` gave.
        expected: what ``ask`` got.
        recomputed: [R] the trainer's log-probabilities of the response at the sampling temperature.
        recomputed_raw: [R] those at temperature 1.

    Raises:
        ProbeError: they differ by more than the dtype explains; the message names the likely cause and the fix.
    """
    tolerance = TOLERANCES[expected.dtype]
    reported = np.array(answer.generation.logprobs, dtype=np.float64)
    difference = reported - np.asarray(recomputed, dtype=np.float64)
    if _within(difference, tolerance):
        size = np.abs(difference)
        return ProbeResult(mean_difference=float(size.mean()), largest_difference=float(size.max()))
    raw = reported - np.asarray(recomputed_raw, dtype=np.float64)
    raise ProbeError(answer.url, _diagnose(answer, expected, difference, raw, tolerance))


def _within(difference: NDArray[np.float64], tolerance: Tolerance) -> bool:
    size = np.abs(difference)
    # Not a number compares as False: not within.
    return bool(size.mean() <= tolerance.mean and size.max() <= tolerance.largest)


def _diagnose(
    answer: ProbeAnswer,
    expected: Expectation,
    difference: NDArray[np.float64],
    raw: NDArray[np.float64],
    tolerance: Tolerance,
) -> str:
    """The most likely cause, the most certain ones first."""
    info, size = answer.info, np.abs(difference)
    numbers = (
        f"its log-probabilities differ from the trainer's by {size.mean():.2g} on average and {size.max():.2g} at most "
        f"over {len(size)} tokens; {expected.dtype} allows {tolerance.mean:g} and {tolerance.largest:g}"
    )
    if _within(raw, tolerance):
        return (
            f"raw log-probabilities: the server reports those at temperature 1, not at the sampling temperature "
            f"{expected.temperature:g} ({numbers}). {_RAW[info.engine]}"
        )
    topk = answer.generation.topk_logprobs
    if _renormalised(difference, tolerance) or (topk is not None and bool((topk == float("-inf")).any())):
        return (
            "filtered distribution: every token is at least as probable as in training, as after top-p, top-k or "
            f"min-p ({numbers}). {_FILTERED[info.engine]}"
        )
    cause = (
        f"wrong weights: {numbers}. The server serves {info.model!r}, version {info.policy_version}; compare it with "
        "model.path, and check that its weights were synced"
    )
    if size.mean() < 10 * tolerance.mean:
        cause += (
            f". The difference is small: the server may compute in a coarser type than {expected.dtype} "
            "(--dtype, --quantization, --kv-cache-dtype)"
        )
    return cause


def _renormalised(difference: NDArray[np.float64], tolerance: Tolerance) -> bool:
    """Whether the server's probabilities are the trainer's divided by what a filter kept, at most 1, at each token."""
    return bool((difference >= -tolerance.mean).all() and len(difference) >= 8)


async def probe(
    server: InferenceServer, expected: Expectation, recompute: Recompute, *, request_id: str = "probe"
) -> ProbeResult:
    """``ask`` and ``judge``, where the trainer is one callable.

    Raises:
        ServerError: see ``ask`` and ``judge``.
    """
    answer = await ask(server, expected, request_id=request_id)
    prompt, response = expected.prompt_token_ids, answer.generation.token_ids
    at_temperature = await recompute(prompt, response, expected.temperature)
    raw = at_temperature if expected.temperature == 1 else await recompute(prompt, response, 1.0)
    return judge(answer, expected, at_temperature, raw)
