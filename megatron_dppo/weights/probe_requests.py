"""Requests of the probe, which checks before a run and after a weight sync that server and trainer agree.

``send_probe`` sends requests. The trainer computes the same for the same tokens (``TrainerReading``), a collective that
is left to the caller. ``verdict.verify_response`` compares them and names the cause of a difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megatron_dppo.errors import ContractViolation, ServerError
from megatron_dppo.types import RoutingShape, SamplingParams
from megatron_dppo_engines.server import GenerateRequest, Generation, InferenceServer, ServerInfo
from megatron_dppo_engines.servers.contract import Contract, check_frame, check_values

_MAX_REQUESTS = 16
"""Limit of one probe, for a policy that ends every response at once."""


class ProbeError(ServerError):
    """The server responds, but not as training needs."""


class LostWeightsError(ProbeError):
    """The server reports other weights than it was sent, for example after a restart."""


@dataclass(frozen=True, kw_only=True)
class ProbeExpectation:
    """Properties that a run needs of its servers."""

    prompt: str
    """Text of the request, long enough to fill pages of the prefix cache, so that stale pages show."""
    prompt_token_ids: tuple[int, ...]
    """Trainer's tokens of the text, without special tokens."""
    vocab_size: int
    end_tokens: tuple[int, ...]
    special_tokens: tuple[int, ...] = ()
    temperature: float
    dtype: str
    """Coarser dtype of server and trainer: ``fp32``, ``bf16`` or ``fp16``."""
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    topk_logprobs: int = 0
    routing: RoutingShape | None = None
    max_new_tokens: int = 64
    enough_tokens: int = 64
    """Number of tokens in all responses together; more requests of the same prompt follow until it is reached."""
    policy_version: int | None = None
    """Version that must have sampled every token. None: not checked."""


@dataclass(frozen=True, kw_only=True)
class ProbeResponse:
    """Responses of a server to the probe, complete and of the right vocabulary."""

    info: ServerInfo
    url: str
    generations: tuple[Generation, ...]
    """At least one; none is empty."""
    breach: str | None = None
    """Violation of the rollout contract: probabilities that no weights can have.

    It is reported if the trainer's own numbers show no cause that can be named.
    """


class RouteCounts:
    """Rows of routes (a token in a layer) that the live routers choose differently (``count_differences``)."""

    def __init__(self, counts: NDArray[np.int64] | None = None) -> None:
        self._counts = np.zeros((1, 3, 2), dtype=np.int64) if counts is None else counts

    @staticmethod
    def from_stages(stages: Sequence[RouteCounts]) -> RouteCounts:
        """Return the counts of the layers of all stages, for the same tokens."""
        return RouteCounts(np.concatenate([stage._counts for stage in stages]))

    @property
    def rows(self) -> int:
        """Number of rows that both sides know."""
        return int(self._counts[:, 0, 0].sum())

    @property
    def worst_layer_share(self) -> float:
        """Share of rows with other experts in the layer where it is largest."""
        rows, differ = self._counts[:, 0].T
        return float((differ / np.maximum(rows, 1)).max())

    @property
    def share(self) -> float:
        """Share of rows with other experts; 0 without rows."""
        return self._share(0)

    @property
    def shifted_share(self) -> float:
        """``share`` if each row belonged to the token before or after, whichever fits better."""
        return min(self._share(1), self._share(2))

    def _share(self, index: int) -> float:
        rows, differ = self._counts[:, index].sum(0).tolist()
        return differ / rows if rows else 0.0

    def __add__(self, other: RouteCounts) -> RouteCounts:
        return RouteCounts(self._counts + other._counts)


@dataclass(frozen=True, kw_only=True)
class TrainerReading:
    """Trainer's own numbers for one response of R tokens, float64, in nats."""

    logprobs: NDArray[np.float64]
    """Log-probabilities at the sampling temperature, like all others that are not called raw. Shape [R]."""
    raw_logprobs: NDArray[np.float64]
    """Log-probabilities at temperature 1. Shape [R]."""
    topk_logprobs: NDArray[np.float64] | None = None
    """Log-probabilities at the server's Top-K ids. Shape [R, K]. None: not requested."""
    raw_topk_logprobs: NDArray[np.float64] | None = None
    """Log-probabilities at the same ids at temperature 1. Shape [R, K]."""
    best_logprobs: NDArray[np.float64] | None = None
    """Log-probabilities of the trainer's own Top-K, the best first. Shape [R, K]."""
    routes: RouteCounts | None = None
    """Server's routes compared with the live ones. None: not requested."""
    replayed_logprobs: NDArray[np.float64] | None = None
    """Log-probabilities with the server's routes. Shape [R]."""


async def send_probe(
    server: InferenceServer, expected: ProbeExpectation, *, request_id: str = "probe"
) -> ProbeResponse:
    """Send the probe's requests, with all fields that the run's requests have.

    A ProbeError for another tokenizer, vocabulary or policy version, or an impossible Top-K. Another ServerError for no
    response, a missing field (it names the flag to set), or a breach of the rollout contract in anything but the
    probabilities.
    """
    info = await server.info()
    tokens = await server.tokenize(expected.prompt)
    if tokens is not None and tokens != expected.prompt_token_ids:
        raise ProbeError(
            server.url,
            f"wrong tokenizer: for the same text the server has {list(tokens[:8])}... ({len(tokens)} tokens), the "
            f"trainer {list(expected.prompt_token_ids[:8])}... ({len(expected.prompt_token_ids)}). It serves "
            f"{info.model!r}; start it with the tokenizer of model.path (--tokenizer-path, vLLM: --tokenizer)",
        )
    contract = Contract(
        vocab_size=expected.vocab_size, end_tokens=expected.end_tokens, special_tokens=expected.special_tokens
    )

    async def send_one(number: int) -> tuple[Generation, str | None]:
        params = SamplingParams(
            max_new_tokens=expected.max_new_tokens,
            temperature=expected.temperature,
            top_p=expected.top_p,
            top_k=expected.top_k,
            min_p=expected.min_p,
            topk_logprobs=expected.topk_logprobs,
            seed=number,
        )
        params = replace(params, return_sampling_mask=params.has_filters)
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
    # One after the other: short responses together take no longer than one long response.
    while len(generations) < _MAX_REQUESTS and sum(len(g.token_ids) for g in generations) < expected.enough_tokens:
        generation, violation = await send_one(len(generations))
        generations.append(generation)
        breach = breach or violation
    return ProbeResponse(info=info, url=server.url, generations=tuple(generations), breach=breach)


def _check(generation: Generation, expected: ProbeExpectation, info: ServerInfo, url: str) -> None:
    """Check what the trainer's computation for the response relies on."""
    if not len(generation.token_ids):
        raise ProbeError(url, f"the server generated nothing (finish reason {generation.finish_reason!r})")
    tokens = generation.token_ids.numpy()
    topk = tokens[:, None] if generation.topk_token_ids is None else generation.topk_token_ids.numpy()
    # Sampling filters may leave fewer than K ids; unused slots hold -1.
    unused = (topk == -1) & (generation.sampling_mask is not None)
    best = np.where(unused, 0, topk)[:, :-1]
    largest = max(int(tokens.max()), int(topk.max()))
    smallest = min(int(tokens.min()), int(best.min(initial=0)))
    if largest >= expected.vocab_size or smallest < 0:
        raise ProbeError(
            url,
            f"wrong model or tokenizer: the server gives token {largest if smallest >= 0 else smallest}, and the "
            f"trainer's vocabulary has {expected.vocab_size} tokens, from 0. It serves {info.model!r}; start it with "
            "model.path",
        )
    # Equal ids are neighbors after sorting; unused slots get negative ids of their own.
    in_order = np.sort(np.where(unused, -1 - np.arange(topk.shape[1]), topk)[:, :-1], 1)
    if (has_duplicate := (in_order[:, 1:] == in_order[:, :-1]).any(1)).any():
        row = int(has_duplicate.argmax())
        raise ProbeError(
            url, f"wrong Top-K: the {expected.topk_logprobs} ids of token {row} are not distinct: {topk[row].tolist()}"
        )
    versions = sorted({span.policy_version for span in generation.versions})
    if expected.policy_version is not None and versions != [expected.policy_version]:
        raise LostWeightsError(
            url,
            f"wrong weights: the tokens come from version {versions}, expected {expected.policy_version} "
            "(-1 = weights that this run did not send); sync the weights again",
        )
