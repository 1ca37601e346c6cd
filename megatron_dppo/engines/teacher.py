"""A teacher behind inference servers: log-probabilities of given tokens, from the prefill of a prompt."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor

from megatron_dppo.errors import ServerError
from megatron_dppo.types import TrainingSample
from megatron_dppo_engines.servers.http import HttpClient


class _ScoringRequest(NamedTuple):
    """Tokens whose log-probabilities are requested."""

    token_ids: list[int]
    first: int
    """Index of the first token whose log-probability is requested; at least 1."""

    @classmethod
    def from_sample(cls, sample: TrainingSample) -> Self:
        """Return the request for all tokens from the first one of the loss mask, which must not be empty."""
        token_ids = [*sample.tokens.tolist(), int(sample.labels[-1])]
        return cls(token_ids, int(sample.loss_mask.nonzero()[0]) + 1)


class TeacherServers:
    """SGLang or vLLM servers with the teacher's weights, used in turn from ``first`` on. They only score tokens.

    Their log-probabilities are those at temperature 1 over the complete vocabulary.
    """

    def __init__(
        self,
        urls: Sequence[str],
        engine: Literal["sglang", "vllm"],
        *,
        api_key: str | None = None,
        timeout_seconds: float = 600.0,
        max_in_flight: int = 64,
        first: int = 0,
    ) -> None:
        self.urls = [url.rstrip("/") for url in urls]
        self._api = _APIS[engine]
        self._api_key = api_key
        self._timeout = timeout_seconds
        self._max_in_flight = max_in_flight
        self._first = first

    def logprobs(self, samples: Sequence[TrainingSample]) -> list[Tensor]:
        """Return float32 log-probabilities ``[T]`` of each sample, 0 before the first token of its loss mask.

        A ServerError if no server could score a sample, or a response is for other tokens.
        """
        return asyncio.run(self._score_all(samples))

    def problems(self) -> list[ServerError]:
        """Return the error of each server that cannot return the log-probabilities of two tokens."""

        async def check(url: str) -> ServerError | None:
            client = HttpClient(url, api_key=self._api_key)
            try:
                # Ids that every vocabulary has.
                await self._score([client], 0, _ScoringRequest([0, 1, 2], 1))
            except ServerError as error:
                return error
            finally:
                await client.close()
            return None

        async def check_all() -> list[ServerError | None]:
            return await asyncio.gather(*map(check, self.urls))

        return [error for error in asyncio.run(check_all()) if error is not None]

    async def _score_all(self, samples: Sequence[TrainingSample]) -> list[Tensor]:
        clients = [HttpClient(url, api_key=self._api_key, connections=self._max_in_flight) for url in self.urls]
        slots = asyncio.Semaphore(self._max_in_flight)

        async def score(number: int, sample: TrainingSample) -> Tensor:
            logprobs = torch.zeros(sample.num_tokens)
            if sample.loss_mask.any():
                request = _ScoringRequest.from_sample(sample)
                async with slots:
                    logprobs[request.first - 1 :] = torch.tensor(await self._score(clients, number, request))
            return logprobs

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(score(i, sample)) for i, sample in enumerate(samples)]
        except* ServerError as errors:
            # One is enough: servers mostly fail for one reason.
            raise errors.exceptions[0] from None
        finally:
            for client in clients:
                await client.close()
        return [task.result() for task in tasks]

    async def _score(self, clients: Sequence[HttpClient], number: int, request: _ScoringRequest) -> list[float]:
        """Return the log-probabilities from the first server that responds; each sample starts with another server."""
        body = self._api.build_body(request)
        for attempt in range(len(clients)):
            client = clients[(self._first + number + attempt) % len(clients)]
            try:
                response = await client.post(self._api.path, body, timeout=self._timeout, repeat=True)
                return self._api.read_logprobs(response, request, client.url + self._api.path)
            except ServerError:
                if attempt + 1 == len(clients):
                    raise
        raise AssertionError("the last attempt returns or raises")


def _sglang_body(request: _ScoringRequest) -> dict[str, object]:
    return {
        "input_ids": request.token_ids,
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        # The first entry of the response is for the token at this index, and None: nothing was read before it.
        "logprob_start_len": request.first - 1,
    }


def _read_sglang_logprobs(response: object, request: _ScoringRequest, url: str) -> list[float]:
    meta = response.get("meta_info") if isinstance(response, Mapping) else None
    rows = meta.get("input_token_logprobs") if isinstance(meta, Mapping) else None
    expected = request.token_ids[request.first :]
    if not isinstance(rows, list) or len(rows) < len(expected):
        raise ServerError(url, "the response has no meta_info.input_token_logprobs of the requested tokens", 200)
    # From the end: an entry without a value may come first.
    pairs = [row[:2] if isinstance(row, list) and len(row) > 1 else (None, None) for row in rows[-len(expected) :]]
    return [
        _check_logprob(value, returned, token, url) for (value, returned), token in zip(pairs, expected, strict=True)
    ]


def _vllm_body(request: _ScoringRequest) -> dict[str, object]:
    # 0: of each prompt token itself, and of no others. vLLM samples at least one token.
    return {"prompt": request.token_ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}


def _read_vllm_logprobs(response: object, request: _ScoringRequest, url: str) -> list[float]:
    choices = response.get("choices") if isinstance(response, Mapping) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    rows = choice.get("prompt_logprobs") if isinstance(choice, Mapping) else None
    if not isinstance(rows, list) or len(rows) != len(request.token_ids):
        raise ServerError(url, "the response has no choices[0].prompt_logprobs of the requested tokens", 200)
    logprobs = []
    for row, token in zip(rows[request.first :], request.token_ids[request.first :], strict=True):
        entry = row.get(str(token)) if isinstance(row, Mapping) else None
        logprobs.append(_check_logprob(None if entry is None else entry.get("logprob"), token, token, url))
    return logprobs


def _check_logprob(value: object, returned_token: object, token: int, url: str) -> float:
    # Rounding may lift a probability of 1 slightly above it.
    is_logprob = isinstance(value, int | float) and -float("inf") < value <= 1e-3
    if returned_token != token or not is_logprob:
        detail = f"expected the log-probability of token {token}, got {value!r} of token {returned_token!r}"
        raise ServerError(url, detail, 200)
    assert isinstance(value, int | float)
    return float(value)


class _ScoringApi(NamedTuple):
    """The call of an engine that scores tokens."""

    path: str
    build_body: Callable[[_ScoringRequest], dict[str, object]]
    read_logprobs: Callable[[object, _ScoringRequest, str], list[float]]


_APIS = {
    "sglang": _ScoringApi("/generate", _sglang_body, _read_sglang_logprobs),
    "vllm": _ScoringApi("/v1/completions", _vllm_body, _read_vllm_logprobs),
}
