"""The probe before a run, and after a weight sync: does the server mean by its answers what training means?

``ask`` sends requests; the trainer computes the same for the same tokens (``Reading``; all its ranks take part, so that
this is left to the caller); ``verdict.judge`` compares and names the cause of a difference.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megatron_dppo.engines.servers.contract import Contract, check_frame, check_values
from megatron_dppo.errors import ContractViolation, ServerError
from megatron_dppo.rollout.server import GenerateRequest, Generation, InferenceServer, ServerInfo
from megatron_dppo.types import RoutingShape, SamplingParams

_MOST_REQUESTS = 16
"""of one probe: a policy that ends at once gives no more tokens than that"""


class ProbeError(ServerError):
    """The server answers, but not what training needs."""


class LostWeightsError(ProbeError):
    """The server says itself that it samples from other weights than it was sent, as one does that has restarted."""


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """What a run needs of its servers."""

    prompt: str
    """text of the request; long enough to fill pages of the prefix cache, so that stale ones show"""
    prompt_token_ids: tuple[int, ...]
    """the trainer's tokens of it, no special ones added"""
    vocab_size: int
    """of the trainer's model"""
    end_tokens: tuple[int, ...]
    """after which a response is complete"""
    temperature: float
    dtype: str
    """``fp32``, ``bf16`` or ``fp16``: the coarser one of server and trainer"""
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    topk_logprobs: int = 0
    routing: RoutingShape | None = None
    max_new_tokens: int = 64
    """of one request"""
    enough_tokens: int = 64
    """more requests of the same prompt follow until the answers have as many together"""
    policy_version: int | None = None
    """the version that must have sampled every token; None = not asked"""


@dataclass(frozen=True, kw_only=True)
class ProbeAnswer:
    """What a server answered to the probe, complete and of the right vocabulary."""

    info: ServerInfo
    url: str
    generations: tuple[Generation, ...]
    """at least one; none is empty"""
    breach: str | None = None
    """Of the contract that every rollout keeps: probabilities that no weights can have. The verdict tells it when the
    trainer's own numbers show no cause that could be named."""


class RouteCounts:
    """How many rows of a response's routes (one token in one layer) the trainer's live routers choose differently."""

    def __init__(self, counts: NDArray[np.int64] | None = None) -> None:
        self._counts = np.zeros((3, 2), dtype=np.int64) if counts is None else counts

    @property
    def rows(self) -> int:
        """Rows that both sides know."""
        return int(self._counts[0, 0])

    @property
    def share(self) -> float:
        """Of rows with other experts; 0 without rows."""
        return self._share(0)

    @property
    def shifted_share(self) -> float:
        """The same if each row belonged to the token before or after, whichever fits better."""
        return min(self._share(1), self._share(2))

    def _share(self, index: int) -> float:
        rows, differ = self._counts[index].tolist()
        return differ / rows if rows else 0.0

    def __add__(self, other: RouteCounts) -> RouteCounts:
        return RouteCounts(self._counts + other._counts)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What the trainer computes for one response of R tokens, float64, in nats."""

    logprobs: NDArray[np.float64]
    """[R] of the tokens at the sampling temperature, like all others but those that are called raw"""
    raw_logprobs: NDArray[np.float64]
    """[R] at temperature 1"""
    topk_logprobs: NDArray[np.float64] | None = None
    """[R, K] at the server's Top-K ids; None = not asked for"""
    raw_topk_logprobs: NDArray[np.float64] | None = None
    """[R, K] at the same ids, at temperature 1"""
    best_logprobs: NDArray[np.float64] | None = None
    """[R, K] of the trainer's own Top-K by rank"""
    routes: RouteCounts | None = None
    """the server's routes against the live ones; None = not asked for"""
    replayed_logprobs: NDArray[np.float64] | None = None
    """[R] with the server's routes"""


async def ask(server: InferenceServer, expected: Expectation, *, request_id: str = "probe") -> ProbeAnswer:
    """Send the probe's requests, with everything that the run's requests ask for.

    Raises:
        ServerError: no answer, a field is missing (the message names it and the flag to set), or the answer breaks
            the contract of a rollout in anything but its probabilities.
        ProbeError: another tokenizer, another vocabulary, another policy version, an impossible Top-K.
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
    contract = Contract(vocab_size=expected.vocab_size, end_tokens=expected.end_tokens)

    async def one(number: int) -> tuple[Generation, str | None]:
        params = SamplingParams(
            max_new_tokens=expected.max_new_tokens,
            temperature=expected.temperature,
            top_p=expected.top_p,
            top_k=expected.top_k,
            min_p=expected.min_p,
            topk_logprobs=expected.topk_logprobs,
            seed=number,
        )
        params = replace(params, return_sampling_mask=params.filters)
        request = GenerateRequest(
            request_id=f"{request_id}-{number}",
            token_ids=expected.prompt_token_ids,
            params=params,
            routing=expected.routing,
        )
        generation = await server.generate(request)
        _check(generation, expected, info, server.url)
        check_frame(generation, request, contract, server.url)
        try:
            check_values(generation, request, contract, server.url)
        except ContractViolation as error:
            return generation, error.detail
        return generation, None

    generations: list[Generation] = []
    breach: str | None = None
    # One after the other: together they take no longer than one long response.
    while len(generations) < _MOST_REQUESTS and sum(len(g.token_ids) for g in generations) < expected.enough_tokens:
        generation, broken = await one(len(generations))
        generations.append(generation)
        breach = breach or broken
    return ProbeAnswer(info=info, url=server.url, generations=tuple(generations), breach=breach)


def _check(generation: Generation, expected: Expectation, info: ServerInfo, url: str) -> None:
    """What the trainer's own computation of the answer relies on."""
    if not len(generation.token_ids):
        raise ProbeError(url, f"the server generated nothing (finish reason {generation.finish_reason!r})")
    tokens = generation.token_ids.numpy()
    topk = tokens[:, None] if generation.topk_token_ids is None else generation.topk_token_ids.numpy()
    # Under a filter a set may have fewer than K ids: what is unused stands for itself.
    unused = (topk == -1) & (generation.sampling_mask is not None)
    best = np.where(unused, 0, topk)[:, :-1]
    largest, smallest = (
        max(int(tokens.max()), int(topk.max())),
        min(int(tokens.min()), int(best.min(initial=0))),
    )
    if largest >= expected.vocab_size or smallest < 0:
        raise ProbeError(
            url,
            f"wrong model or tokenizer: the server gives token {largest if smallest >= 0 else smallest}, and the "
            f"trainer's vocabulary has {expected.vocab_size} tokens, from 0. It serves {info.model!r}; start it with "
            "model.path",
        )
    in_order = np.sort(np.where(unused, -1 - np.arange(topk.shape[1]), topk)[:, :-1], 1)
    if (twice := (in_order[:, 1:] == in_order[:, :-1]).any(1)).any():
        row = int(twice.argmax())
        raise ProbeError(
            url, f"wrong Top-K: the {expected.topk_logprobs} ids of token {row} are not different: {topk[row].tolist()}"
        )
    versions = sorted({span.policy_version for span in generation.versions})
    if expected.policy_version is not None and versions != [expected.policy_version]:
        raise LostWeightsError(
            url,
            f"wrong weights: the tokens come from version {versions}, expected {expected.policy_version} "
            "(-1 = weights that this run did not send); sync the weights again",
        )
