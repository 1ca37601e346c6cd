"""A teacher behind inference servers: log-probabilities of given tokens, from the pass over a prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from megatron_dppo.engines.servers.http import HttpClient
from megatron_dppo.errors import ServerError
from megatron_dppo.types import TrainingSample

_PATHS = {"sglang": "/generate", "vllm": "/v1/completions"}


class Asked(NamedTuple):
    """The tokens whose log-probabilities are asked for."""

    ids: list[int]
    """of the whole sequence"""
    first: int
    """the first one whose log-probability is wanted; at least 1"""

    @classmethod
    def of(cls, sample: TrainingSample) -> Asked:
        """Those of the loss mask and what is between them; there is one at least."""
        ids = [*sample.tokens.tolist(), int(sample.labels[-1])]
        return cls(ids, int(sample.loss_mask.nonzero()[0]) + 1)


class TeacherServers:
    """SGLang or vLLM servers with the teacher's weights, asked in turn; none is sampled from.

    Their log-probabilities are those at temperature 1 over the whole vocabulary.

    Args:
        urls: ``http://host:port`` of each.
        engine: what they are.
        api_key: of all of them.
        timeout_seconds: of one answer, the time in the server's queue included.
        max_in_flight: requests at a time.
    """

    def __init__(
        self,
        urls: Sequence[str],
        engine: Literal["sglang", "vllm"],
        *,
        api_key: str | None = None,
        timeout_seconds: float = 600.0,
        max_in_flight: int = 64,
    ) -> None:
        self.urls = [url.rstrip("/") for url in urls]
        self._engine, self._key = engine, api_key
        self._timeout, self._most = timeout_seconds, max_in_flight

    def logprobs(self, samples: Sequence[TrainingSample]) -> list[Tensor]:
        """``[T]`` float32 of each sample, 0 before the first token of its loss mask.

        Raises:
            ServerError: a sample could be scored by none of the servers, or an answer is of other tokens.
        """
        return asyncio.run(self._all(samples))

    def problems(self) -> list[ServerError]:
        """What is wrong with each server, which is asked for the log-probabilities of two tokens."""

        async def one(url: str) -> ServerError | None:
            client = HttpClient(url, api_key=self._key)
            try:
                await self._ask([client], 0, Asked([0, 1, 2], 1))
            except ServerError as error:
                return error
            finally:
                await client.close()
            return None

        async def every() -> list[ServerError | None]:
            return await asyncio.gather(*map(one, self.urls))

        return [error for error in asyncio.run(every()) if error is not None]

    async def _all(self, samples: Sequence[TrainingSample]) -> list[Tensor]:
        clients = [HttpClient(url, api_key=self._key, connections=self._most) for url in self.urls]
        free = asyncio.Semaphore(self._most)

        async def one(number: int, sample: TrainingSample) -> Tensor:
            found = torch.zeros(sample.num_tokens)
            if sample.loss_mask.any():
                asked = Asked.of(sample)
                async with free:
                    found[asked.first - 1 :] = torch.tensor(await self._ask(clients, number, asked))
            return found

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(i, sample)) for i, sample in enumerate(samples)]
        except* ServerError as errors:
            raise errors.exceptions[0] from None
        finally:
            for client in clients:
                await client.close()
        return [task.result() for task in tasks]

    async def _ask(self, clients: Sequence[HttpClient], number: int, asked: Asked) -> list[float]:
        """From the first server that answers, beginning with another one for each sample."""
        path, body = _PATHS[self._engine], _BODIES[self._engine](asked)
        for attempt in range(len(clients)):
            client = clients[(number + attempt) % len(clients)]
            try:
                answer = await client.post(path, body, timeout=self._timeout, repeat=True)
                return _READERS[self._engine](answer, asked, client.url + path)
            except ServerError:
                if attempt + 1 == len(clients):
                    raise
        raise AssertionError("the last attempt returns or raises")


def _sglang_body(asked: Asked) -> dict[str, Any]:
    return {
        "input_ids": asked.ids,
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        # The first entry of the answer is of the token here, and None: nothing was read before it.
        "logprob_start_len": asked.first - 1,
    }


def _sglang_logprobs(answer: Any, asked: Asked, url: str) -> list[float]:
    meta = answer.get("meta_info") if isinstance(answer, Mapping) else None
    rows = meta.get("input_token_logprobs") if isinstance(meta, Mapping) else None
    wanted = asked.ids[asked.first :]
    if not isinstance(rows, list) or len(rows) < len(wanted):
        raise ServerError(url, "the answer has no meta_info.input_token_logprobs of the tokens asked for", 200)
    pairs = [row[:2] if isinstance(row, list) and len(row) > 1 else (None, None) for row in rows[-len(wanted) :]]
    return [_checked(value, found, token, url) for (value, found), token in zip(pairs, wanted, strict=True)]


def _vllm_body(asked: Asked) -> dict[str, Any]:
    return {"prompt": asked.ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}


def _vllm_logprobs(answer: Any, asked: Asked, url: str) -> list[float]:
    choices = answer.get("choices") if isinstance(answer, Mapping) else None
    first = choices[0] if isinstance(choices, list) and choices else None
    rows = first.get("prompt_logprobs") if isinstance(first, Mapping) else None
    if not isinstance(rows, list) or len(rows) != len(asked.ids):
        raise ServerError(url, "the answer has no choices[0].prompt_logprobs of the tokens asked for", 200)
    found = []
    for row, token in zip(rows[asked.first :], asked.ids[asked.first :], strict=True):
        entry = row.get(str(token)) if isinstance(row, Mapping) else None
        found.append(_checked(None if entry is None else entry.get("logprob"), token, token, url))
    return found


def _checked(value: Any, found: Any, token: int, url: str) -> float:
    if found != token or not isinstance(value, int | float) or not -float("inf") < value <= 1e-3:
        raise ServerError(url, f"expected the log-probability of token {token}, got {value!r} of token {found!r}", 200)
    return float(value)


_BODIES = {"sglang": _sglang_body, "vllm": _vllm_body}
_READERS = {"sglang": _sglang_logprobs, "vllm": _vllm_logprobs}
