"""Sampling with the base model or with saved adapters, by the local engine."""

import secrets
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.engines.local.engine import LocalEngine
from megatron_dppo.types import Completion, FinishReason, Prompt, SamplingParams, TrainingSample
from megatron_dppo_doctor.diagnose.rescore import rescore_by_engine
from megatron_dppo_tinker.bodies import Sample
from megatron_dppo_tinker.errors import RequestError, require_finite
from megatron_dppo_tinker.models import AdapterSpec, AdapterState
from megatron_dppo_tinker.wire import SampledSequence, write_samples

Weights = Iterator[tuple[str, Tensor]]


@dataclass(eq=False)
class Sampler:
    """Weights that a sampling session uses; they never change."""

    spec: AdapterSpec | None
    """Adapters. None samples the base model."""
    adapters: AdapterState | None = None
    """Values of the adapters. None before they are read from ``checkpoint``."""
    checkpoint: Path | None = None
    path: str | None = None
    """Path by which the client named the weights."""

    @property
    def num_bytes(self) -> int:
        """Size of the adapters in memory."""
        return sum(value.nbytes for chunk in self.adapters or () for value in chunk.values())


@dataclass(frozen=True)
class SampleJob:
    """A request for samples, checked."""

    sampler: Sampler
    body: Sample
    prompt: tuple[int, ...]
    params: SamplingParams
    stop_token_ids: tuple[int, ...]
    stop_strings: tuple[str, ...]

    @property
    def has_seed(self) -> bool:
        """True if the client chose the random numbers."""
        return self.body.sampling_params.seed is not None

    @property
    def key(self) -> tuple[object, ...] | None:
        """Jobs with equal keys can be sampled in one batch. None: this job's random numbers are its own."""
        return None if self.has_seed else (self.sampler, self.params, self.stop_token_ids)


def read_job(body: Sample, sampler: Sampler, *, vocab_size: int, max_tokens: int) -> SampleJob:
    """Return the job of a request."""
    prompt = tuple(token for chunk in body.prompt.chunks for token in chunk.tokens)
    options = body.sampling_params
    if not prompt or not all(0 <= token < vocab_size for token in prompt):
        raise RequestError(f"the prompt is empty or has ids outside 0 to {vocab_size - 1}")
    limit = max_tokens - len(prompt) if options.max_tokens is None else options.max_tokens
    if limit < 1 or len(prompt) + limit > max_tokens:
        raise RequestError(
            f"a prompt of {len(prompt)} tokens and max_tokens = {options.max_tokens} are more than {max_tokens}, the "
            "context of the model"
        )
    last_n = body.prompt_logprobs_last_n
    if last_n is not None and not (body.prompt_logprobs and last_n < len(prompt)):
        raise RequestError(f"prompt_logprobs_last_n = {last_n} needs prompt_logprobs, and at most {len(prompt) - 1}")
    stops = [options.stop] if isinstance(options.stop, str) else options.stop or []
    stop_token_ids = tuple(stop for stop in stops if isinstance(stop, int))
    if not all(0 <= token < vocab_size for token in stop_token_ids):
        raise RequestError(f"stop has ids outside 0 to {vocab_size - 1}")
    params = SamplingParams(
        max_new_tokens=limit,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=max(options.top_k, 0),
        seed=options.seed or 0,
    )
    return SampleJob(
        sampler=sampler,
        body=body,
        prompt=prompt,
        params=params,
        stop_token_ids=stop_token_ids,
        stop_strings=tuple(stop for stop in stops if isinstance(stop, str)),
    )


class SamplingEngine:
    """The local engine, which holds the weights of one sampler at a time."""

    def __init__(
        self, engine: LocalEngine, tokenizer: Any, weights: Callable[[Sampler], AbstractContextManager[Weights]]
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._weights = weights
        self._loaded: Sampler | None = None

    def run(self, jobs: Sequence[SampleJob]) -> list[bytes]:
        """Return the response of each job. All have the same key, or there is one."""
        first = jobs[0]
        self._load(first.sampler)
        params = first.params
        if not first.has_seed:
            params = SamplingParams(**vars(params) | {"seed": secrets.randbits(62)})
        prompts = [_prompt(job.prompt) for job in jobs for _ in range(job.body.num_samples)]
        completions = iter(self._engine.generate(prompts, params, first.stop_token_ids))
        responses = []
        for job in jobs:
            sequences = [self._sequence(next(completions), job.stop_strings) for _ in range(job.body.num_samples)]
            responses.append(write_samples(sequences, self._prompt_logprobs(job) if job.body.prompt_logprobs else None))
        return responses

    def close(self) -> None:
        """Free the engine."""
        self._engine.close()

    def _load(self, sampler: Sampler) -> None:
        if sampler is self._loaded:
            return
        # No sampler until the copy is complete: a failed one leaves a mixture.
        self._loaded = None
        with self._weights(sampler) as weights:
            self._engine.update_weights(weights, self._engine.policy_version + 1)
        self._loaded = sampler

    def _sequence(self, completion: Completion, stop_strings: Sequence[str]) -> SampledSequence:
        tokens = completion.token_ids
        assert completion.logprobs is not None
        is_stopped = completion.finish_reason == FinishReason.STOP
        ids = tokens.tolist()
        # A response that stops earlier is a prefix of one that does not: the rest of the tokens is cut off.
        end = min((self._stop_length(ids, text) for text in stop_strings), default=len(ids) + 1)
        if end <= len(ids):
            tokens = tokens[:end]
            is_stopped = True
        return SampledSequence(tokens, completion.logprobs[: len(tokens)], "stop" if is_stopped else "length")

    def _stop_length(self, ids: list[int], text: str) -> int:
        """Return the number of tokens whose text first contains the stop string; ``len(ids) + 1`` if it never does."""
        lengths = range(1, len(ids) + 1)
        return 1 + bisect_left(lengths, True, key=lambda n: text in self._tokenizer.decode(ids[:n]))

    def _prompt_logprobs(self, job: SampleJob) -> Tensor:
        result = torch.full((len(job.prompt),), torch.nan)
        if len(job.prompt) > 1:
            tokens = torch.tensor(job.prompt)
            count = len(tokens) - 1
            sample = TrainingSample(
                tokens=tokens[:-1],
                labels=tokens[1:],
                loss_mask=torch.ones(count, dtype=torch.bool),
                advantages=torch.zeros(count),
            )
            result[1:] = require_finite(rescore_by_engine(self._engine, [sample], 1.0)[0])
        if job.body.prompt_logprobs_last_n is not None:
            result[: -job.body.prompt_logprobs_last_n] = torch.nan
        return result


def _prompt(token_ids: tuple[int, ...]) -> Prompt:
    return Prompt(prompt_id="tinker", text="", token_ids=token_ids, label="")
