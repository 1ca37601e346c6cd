"""The embedded engine: a transformers copy of the policy in this process, for small models and machines without GPU."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.engines.local.decode import Decoded, decode
from megatron_dppo.engines.local.perturbation import Perturbation, PerturbedModel
from megatron_dppo.engines.local.rescore import ForcedRoutes, rescore
from megatron_dppo.engines.local.rounds import Goal, PendingResponse, Rounds
from megatron_dppo.engines.local.sampler import RouteRecorder, Sampler
from megatron_dppo.hf.folder import build_hf_model, copy_into_model, end_tokens, routing_shape
from megatron_dppo.rollout.engine import GroupRequest, GroupState, SampledFuture
from megatron_dppo.rollout.response import GrowingResponse
from megatron_dppo.rollout.server import GenerateRequest, Generation
from megatron_dppo.rollout.turns import GenerateFunction
from megatron_dppo.types import Completion, FinishReason, Prompt, SamplingParams, TrainingSample, VersionSpan
from megatron_dppo.types.token_columns import asked_columns


class LocalEngine:
    """A ``RolloutEngine`` that samples batches with a transformers model, one after the other in a thread of its own.

    The same calls under the same weights give the same responses: the numbers that they draw come from the seed, the
    place in the batch, and the tokens that the responses of the call had before. A user's function has to do its part.

    Args:
        hf_config: the model's transformers config.
        tokenizer: decodes responses, names the end-of-sequence and the padding token.
        dtype: of this copy of the weights; another one than training's gives a real engine mismatch.
        device: where it runs.
        max_batch: sequences that are decoded together.
        function: a user's ``rollout.generate``; None = one response to each prompt.
        perturbation: how the engine is made to differ from the policy on purpose.

    Raises:
        ConfigError: the perturbation needs a package that is not installed.
    """

    def __init__(
        self,
        hf_config: Any,
        tokenizer: Any,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_batch: int = 512,
        function: GenerateFunction | None = None,
        perturbation: Perturbation | None = None,
    ) -> None:
        self.policy_version = -1
        self._tokenizer, self._max_batch, self._device = tokenizer, max_batch, device
        self._model = build_hf_model(hf_config, dtype).to(device)
        self._eos = end_tokens(hf_config, tokenizer)
        self._routing = routing_shape(hf_config)
        perturbation = perturbation or Perturbation()
        self._perturbed = PerturbedModel(self._model, perturbation, self._routing)
        self._unrecorded_top_p = perturbation.unrecorded_top_p
        self._reveals = False
        self._recorder = None if self._routing is None else RouteRecorder(self._model, self._routing)
        self._function, self._loop = function, asyncio.Runner()  # without a function no loop is ever made
        self._held: dict[int, GroupState] = {}
        self._thread = ThreadPoolExecutor(1, "rollout", initializer=_use, initargs=(device,))

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy full tensors into this copy; ``version`` goes into every later completion."""
        copy_into_model(self._model, weights)
        self._perturbed.weights_changed()
        self.policy_version = version

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Completion]:
        """Sample one response a prompt.

        Raises:
            RuntimeError: no weights were ever given.
            ValueError: routed experts are asked of a dense model.
            GenerateError: the user's function failed.
        """
        samples = [self._sample(prompt, params) for prompt in prompts]
        self._thread.submit(self._complete, samples, params, None).result()
        return [sample.completion for sample in samples if sample.completion is not None]

    def submit(
        self, groups: Sequence[GroupRequest], params: SamplingParams, enough: int, keep: Collection[int] = ()
    ) -> list[SampledFuture]:
        """See ``RolloutEngine``; returns at once. With a user's function it stops only between turns.

        Where sampling failed, no group of the call has a result, and what was held before is held as it was.
        """
        futures: list[SampledFuture] = [Future() for _ in groups]
        self._thread.submit(self._answer, groups, params, enough, keep, futures)
        return futures

    def _answer(
        self,
        groups: Sequence[GroupRequest],
        params: SamplingParams,
        enough: int,
        keep: Collection[int],
        futures: Sequence[SampledFuture],
    ) -> None:
        try:
            samples = [self._continued(group, params) for group in groups]
            goal = Goal(samples, enough) if enough < len(groups) else None
            self._complete([s for group in samples for s in group if s.completion is None], params, goal)
        except BaseException as error:
            for future in futures:
                future.set_exception(error)
            return
        for request, group, future in zip(groups, samples, futures, strict=True):
            self._held.pop(request.key, None)
            complete = [sample.completion for sample in group if sample.completion is not None]
            if len(complete) < len(group) and request.key in keep:
                self._held[request.key] = tuple(s.completion or s.response.state() for s in group)
            future.set_result(complete if len(complete) == len(group) else None)

    def unfinished(self) -> dict[int, GroupState]:
        """See ``RolloutEngine``; waits until nothing is under way."""
        return self._thread.submit(dict, self._held).result()

    def restore(self, groups: Mapping[int, GroupState]) -> None:
        """See ``RolloutEngine``."""
        self._held |= groups

    def reveal_filters(self) -> None:
        """From here on report what is drawn from: the same draws, with the sampling masks of a hidden filter."""
        self._reveals = self._unrecorded_top_p < 1

    def rescore(
        self, samples: Sequence[TrainingSample], temperature: float, *, fp32_head: bool = False
    ) -> list[Tensor]:
        """Log-probabilities ``[T]`` of the labels of each sample by this copy as it is, the samples' routes
        replayed where they have them. See ``rescore``."""

        def score() -> list[Tensor]:
            routes = samples[0].routed_experts if samples else None
            forced = None
            if self._routing is not None and routes is not None:
                has_weights = routes.shape[-1] > self._routing.topk
                forced = ForcedRoutes(self._model, replace(self._routing, weights=has_weights))
            return rescore(self._model, samples, temperature=temperature, forced=forced, fp32_head=fp32_head)

        return self._thread.submit(score).result()

    def close(self) -> None:
        """Free the copy of the weights, and end what a user's function left running."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._loop.close()
        self._held.clear()
        del self._model

    def _sample(self, prompt: Prompt, params: SamplingParams) -> PendingResponse:
        if self.policy_version < 0:
            raise RuntimeError("LocalEngine is to sample before the first update_weights")
        if params.routed_experts and self._routing is None:
            raise ValueError("SamplingParams.routed_experts = True, but the model of the local engine has no experts")
        routing = None
        if params.routed_experts and self._routing is not None:
            routing = replace(self._routing, weights=params.router_weights)
        response = GrowingResponse(
            prompt.start, routing=routing, sampling_mask=self._reveals, columns=asked_columns(params)
        )
        return PendingResponse(prompt, response)

    def _continued(self, request: GroupRequest, params: SamplingParams) -> list[PendingResponse]:
        """The responses of a group, as far as they were held."""
        samples = [self._sample(request.prompt, params) for _ in range(request.siblings)]
        held = self._held.get(request.key)
        if held is not None and len(held) != request.siblings:
            raise ValueError(f"group {request.key} is held with {len(held)} responses, not {request.siblings}")
        for sample, state in zip(samples, held or (), strict=False):
            if isinstance(state, Completion):
                sample.completion = state
            else:
                sample.response.restore(state)
        return samples

    def _complete(self, samples: Sequence[PendingResponse], params: SamplingParams, goal: Goal | None) -> None:
        """Complete the samples, or stop them when the goal is reached."""
        seed = _seed(samples, params)
        generator = torch.Generator(self._device).manual_seed(seed)
        self._perturbed.begin(seed, self._device)
        if self._function is None:
            self._complete_plain(samples, params, generator, goal)
            return

        def turns(requests: Sequence[GenerateRequest]) -> list[Generation]:
            batches = [requests[i : i + self._max_batch] for i in range(0, len(requests), self._max_batch)]
            return [answer for batch in batches for answer in self._decode(batch, params, generator, None)]

        self._loop.run(Rounds(self._function, params, self._tokenizer, turns, goal).run(samples))

    def _complete_plain(
        self, samples: Sequence[PendingResponse], params: SamplingParams, generator: torch.Generator, goal: Goal | None
    ) -> None:
        """Without a function: one turn each."""
        full = [sample for sample in samples if len(sample.response.tokens) >= params.max_new_tokens]
        for sample in full:
            sample.completion = sample.response.completion(FinishReason.LENGTH, self._tokenizer)
        if goal is not None:
            goal.ended(full)
        left = [sample for sample in samples if sample.completion is None]
        for start in range(0, len(left), self._max_batch):
            if goal is not None and goal.is_reached:
                return
            batch = left[start : start + self._max_batch]
            limits = [params.max_new_tokens - len(sample.response.tokens) for sample in batch]
            requests = [s.response.next_request("", params, (), limit) for s, limit in zip(batch, limits, strict=True)]
            ended = None if goal is None else _watcher(goal, batch)
            for sample, generation in zip(batch, self._decode(requests, params, generator, ended), strict=True):
                sample.response.append_sampled(generation)
                if generation.finish_reason != FinishReason.ABORT:
                    sample.completion = sample.response.completion(generation.finish_reason, self._tokenizer)

    def _decode(
        self,
        requests: Sequence[GenerateRequest],
        params: SamplingParams,
        generator: torch.Generator,
        ended: Callable[[list[int]], bool] | None,
    ) -> list[Generation]:
        """Answer a batch; ``ended`` as in ``decode``, those that it stops are aborted."""
        recorder = self._recorder if params.routed_experts else None
        with nullcontext() if recorder is None else recorder.watching(weights=params.router_weights):
            decoded = decode(
                self._model,
                [request.token_ids for request in requests],
                Sampler(
                    params,
                    generator,
                    len(requests),
                    unrecorded_top_p=self._unrecorded_top_p,
                    reveals=self._reveals,
                ),
                max_new_tokens=[request.params.max_new_tokens for request in requests],
                end=self._eos,
                pad=self._tokenizer.pad_token_id,
                further_ends=[request.stop_token_ids for request in requests],
                topk=params.topk_logprobs,
                return_sampling_mask=params.return_sampling_mask or self._reveals,
                recorder=recorder,
                ended=ended,
            )
        moved = decoded.cpu()
        return [
            generation_of(moved, row, request, self._eos, self.policy_version) for row, request in enumerate(requests)
        ]


def generation_of(
    decoded: Decoded, row: int, request: GenerateRequest, eos: Collection[int], version: int
) -> Generation:
    """What was decoded in a row, as the answer to its request; ``eos`` are the tokens that end any response."""
    limit, ends = request.params.max_new_tokens, {*eos, *request.stop_token_ids}
    tokens = decoded.tokens[row, :limit].tolist()
    end = next((i for i, token in enumerate(tokens) if token in ends), None)
    length = len(tokens) if end is None else end + 1
    unended = FinishReason.LENGTH if length == limit else FinishReason.ABORT
    return Generation(
        finish_reason=unended if end is None else FinishReason.STOP,
        versions=(VersionSpan(version, 0, length),),
        **decoded.response(row, length, request.routing_start),
    )


def _use(device: torch.device) -> None:
    """CUDA's current device is a property of each thread."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _watcher(goal: Goal, batch: Sequence[PendingResponse]) -> Callable[[list[int]], bool]:
    return lambda rows: goal.ended(batch[row] for row in rows)


def _seed(samples: Sequence[PendingResponse], params: SamplingParams) -> int:
    """That of the parameters for new responses; those that go on do not draw again what they drew before."""
    had = [len(sample.response.tokens) for sample in samples]
    return random.Random(f"{params.seed}/{had}").getrandbits(62) if any(had) else params.seed
