"""The local engine: a transformers copy of the policy in this process, for small models and machines without a GPU."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from megatron_dppo.engines.local.batches import MAX_BATCH, MAX_VALUES, BatchMemory, split_batch
from megatron_dppo.engines.local.decode import Decoded, decode
from megatron_dppo.engines.local.lockstep import CompletionTarget, LockstepRunner, PendingResponse
from megatron_dppo.engines.local.perturbation import Perturbation
from megatron_dppo.engines.local.sampler import RouteRecorder, Sampler
from megatron_dppo.errors import TrainingStopped
from megatron_dppo.hf.folder import build_hf_model, copy_into_model, end_tokens, routing_shape
from megatron_dppo.rollout.engine import GroupRequest, GroupState, SampledFuture
from megatron_dppo.rollout.response import GrowingResponse
from megatron_dppo.rollout.turns import GenerateFunction
from megatron_dppo.types import Completion, FinishReason, Prompt, RoutingShape, SamplingParams, VersionSpan
from megatron_dppo.types.model_folder import HfConfig, Tokenizer
from megatron_dppo.types.token_columns import requested_columns
from megatron_dppo_engines.server import GenerateRequest, Generation

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_R = TypeVar("_R")


class LocalEngine:
    """A ``RolloutEngine`` that samples one batch after another with a transformers model, in its own thread.

    The same calls under the same weights give the same responses. The random numbers depend on the seed, the row of the
    batch, and the tokens that the responses of the call had before. They do not depend on the parts into which a batch
    is split for its memory. A user function has to be deterministic too.

    Another ``dtype`` than training's gives a real engine mismatch.
    """

    def __init__(
        self,
        hf_config: HfConfig,
        tokenizer: Tokenizer,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_batch: int = MAX_BATCH,
        function: GenerateFunction | None = None,
        perturbation: Perturbation | None = None,
    ) -> None:
        self.policy_version = -1
        self._tokenizer = tokenizer
        self._max_batch = max_batch
        self._device = device
        self._model = build_hf_model(hf_config, dtype).to(device)
        self._end_tokens = end_tokens(hf_config, tokenizer)
        self._routing = routing_shape(hf_config)
        self._memory = BatchMemory.from_config(hf_config)
        # Before the RouteRecorder, whose hooks must see the choices of perturbed routers.
        self._perturbed = None if perturbation is None else perturbation.apply(self._model, self._routing)
        self._unrecorded_top_p = 1.0 if perturbation is None else perturbation.unrecorded_top_p
        self._unrecorded_temperature = 1.0 if perturbation is None else perturbation.unrecorded_temperature
        self._reveals_hidden_filter = False
        self._recorder = None if self._routing is None else RouteRecorder(self._model, self._routing)
        self._function = function
        self._loop = asyncio.Runner()  # creates its loop at the first run, so never without a function
        self._held: dict[int, GroupState] = {}
        """Responses of incomplete groups, by key."""
        self.thread = ThreadPoolExecutor(1, "rollout", initializer=_set_cuda_device, initargs=(device,))

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy full tensors into this copy; every later completion has ``version``."""
        copy_into_model(self._model, weights)
        # The copy is in full precision, so every update is rounded anew.
        if self._perturbed is not None:
            self._perturbed.quantize_weights()
        self.policy_version = version

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams, stop_token_ids: tuple[int, ...] = ()
    ) -> list[Completion]:
        """Sample one response per prompt."""
        samples = [self._sample(prompt, params) for prompt in prompts]
        for sample in samples:
            sample.stop_token_ids = stop_token_ids
        # Waits behind rollouts that were submitted before.
        self.thread.submit(self._complete, samples, params, None).result()
        return [sample.completion for sample in samples if sample.completion is not None]

    def submit(
        self, groups: Sequence[GroupRequest], params: SamplingParams, enough: int, keep: Collection[int] = ()
    ) -> list[SampledFuture]:
        """See ``RolloutEngine``; returns at once. With a user function it stops only between turns.

        If sampling fails, no group of the call gets a result, and held responses stay as they were.
        """
        futures: list[SampledFuture] = [Future() for _ in groups]
        self.thread.submit(self._run_groups, groups, params, enough, keep, futures)
        return futures

    def _run_groups(
        self,
        groups: Sequence[GroupRequest],
        params: SamplingParams,
        enough: int,
        keep: Collection[int],
        futures: Sequence[SampledFuture],
    ) -> None:
        try:
            samples = [self._restored_samples(group, params) for group in groups]
            target = CompletionTarget(samples, enough) if enough < len(groups) else None
            self._complete([s for group in samples for s in group if s.completion is None], params, target)
        # SystemExit of a user's function too: the scheduler waits for these futures.
        except BaseException as error:
            for future in futures:
                future.set_exception(error)
            return
        for request, group, future in zip(groups, samples, futures, strict=True):
            # Only here, after success: a failed call leaves held responses as they were.
            self._held.pop(request.key, None)
            complete = [sample.completion for sample in group if sample.completion is not None]
            if len(complete) < len(group) and request.key in keep:
                self._held[request.key] = tuple(s.completion or s.response.state() for s in group)
            future.set_result(complete if len(complete) == len(group) else None)

    def unfinished(self) -> dict[int, GroupState]:
        """See ``RolloutEngine``; waits until nothing is running."""
        return self.thread.submit(dict, self._held).result()

    def restore(self, groups: Mapping[int, GroupState]) -> None:
        """See ``RolloutEngine``."""
        self._held |= groups

    def reveal_filters(self) -> None:
        """Include the hidden filter in later log-probabilities and sampling masks; the samples stay the same."""
        self._reveals_hidden_filter = self._unrecorded_top_p < 1

    def call_with_model(self, function: Callable[[PreTrainedModel, RoutingShape | None], _R]) -> _R:
        """Return the result of a function of this copy and the shape of its routes, in the thread that samples."""
        return self.thread.submit(function, self._model, self._routing).result()

    def close(self) -> None:
        """Free the copy of the weights, and cancel whatever a user function left running."""
        self.thread.shutdown(wait=True, cancel_futures=True)
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
        has_mask = params.return_sampling_mask or self._reveals_hidden_filter
        columns = requested_columns(replace(params, return_sampling_mask=has_mask))
        return PendingResponse(prompt, GrowingResponse(prompt.context_ids, routing=routing, columns=columns))

    def _restored_samples(self, request: GroupRequest, params: SamplingParams) -> list[PendingResponse]:
        """Return the responses of a group, with the tokens that are held of them."""
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

    def _complete(
        self, samples: Sequence[PendingResponse], params: SamplingParams, target: CompletionTarget | None
    ) -> None:
        """Complete the samples, or stop them when the target is reached."""
        seed = _call_seed(samples, params)
        generator = torch.Generator(self._device).manual_seed(seed)
        if self._perturbed is not None:
            self._perturbed.seed_noise(seed, self._device)
        if self._function is None:
            self._complete_single_turns(samples, params, generator, target)
            return

        def decode_turns(requests: Sequence[GenerateRequest]) -> list[Generation]:
            batches = [requests[i : i + self._max_batch] for i in range(0, len(requests), self._max_batch)]
            return [generation for batch in batches for generation in self._decode(batch, params, generator, None)]

        runner = LockstepRunner(self._function, params, self._tokenizer, decode_turns, target)
        self._loop.run(runner.run(samples))

    def _complete_single_turns(
        self,
        samples: Sequence[PendingResponse],
        params: SamplingParams,
        generator: torch.Generator,
        target: CompletionTarget | None,
    ) -> None:
        """Complete samples without a user function."""
        # Restored responses may already have all their tokens.
        tokens_left = {
            sample: sample.prompt.limited(params).max_new_tokens - len(sample.response.tokens) for sample in samples
        }
        full = [sample for sample in samples if tokens_left[sample] <= 0]
        for sample in full:
            sample.completion = sample.response.completion(FinishReason.LENGTH, self._tokenizer)
        if target is not None:
            target.mark_complete(full)
        pending = [sample for sample in samples if sample.completion is None]
        for start in range(0, len(pending), self._max_batch):
            if target is not None and target.is_reached:
                return
            batch = pending[start : start + self._max_batch]
            requests = [
                sample.response.next_request("", params, sample.stop_token_ids, tokens_left[sample]) for sample in batch
            ]
            should_stop = None if target is None else _stop_callback(target, batch)
            generations = self._decode(requests, params, generator, should_stop)
            # Fewer generations than requests: the target was reached before the last part of the batch.
            for generation, sample in zip(generations, batch, strict=False):
                sample.response.append_sampled(generation)
                if generation.finish_reason != FinishReason.ABORT:
                    sample.completion = sample.response.completion(generation.finish_reason, self._tokenizer)

    def _decode(
        self,
        requests: Sequence[GenerateRequest],
        params: SamplingParams,
        generator: torch.Generator,
        should_stop: Callable[[list[int]], bool] | None,
    ) -> Iterator[Generation]:
        """Decode a batch of requests, in parts that memory has room for.

        Requests that ``should_stop`` stops (see ``decode``) are aborted, and later parts are left out.
        """
        limits = [request.params.max_new_tokens for request in requests]
        initial_state = generator.get_state()
        last_state = initial_state
        longest = 0
        for rows in split_batch(self._memory, [request.token_ids for request in requests], limits, MAX_VALUES):
            # Every part draws the numbers of the complete batch, from its first step on.
            generator.set_state(initial_state)
            part = [requests[row] for row in rows]
            callback = None if should_stop is None else _PartCallback(should_stop, rows.start)
            decoded = self._decode_part(part, params, generator, callback, rows.start, len(requests))
            if decoded.tokens.shape[1] > longest:
                longest = decoded.tokens.shape[1]
                last_state = generator.get_state()
            for row, request in enumerate(part):
                yield build_generation(decoded, row, request, self._end_tokens, self.policy_version)
            if callback is not None and callback.has_stopped:
                break
        generator.set_state(last_state)

    def _decode_part(
        self,
        requests: Sequence[GenerateRequest],
        params: SamplingParams,
        generator: torch.Generator,
        should_stop: Callable[[list[int]], bool] | None,
        first_row: int,
        batch: int,
    ) -> Decoded:
        """Decode consecutive requests of a batch of ``batch`` requests, from ``first_row`` on."""
        recorder = self._recorder if params.routed_experts else None
        with nullcontext() if recorder is None else recorder.recording(weights=params.router_weights):
            return decode(
                self._model,
                [request.token_ids for request in requests],
                Sampler(
                    params,
                    generator,
                    batch,
                    first_row=first_row,
                    unrecorded_top_p=self._unrecorded_top_p,
                    unrecorded_temperature=self._unrecorded_temperature,
                    reveals_hidden_filter=self._reveals_hidden_filter,
                ),
                max_new_tokens=[request.params.max_new_tokens for request in requests],
                end_tokens=self._end_tokens,
                pad_token=self._tokenizer.pad_token_id,
                extra_end_tokens=[request.stop_token_ids for request in requests],
                topk=params.topk_logprobs,
                return_sampling_mask=params.return_sampling_mask or self._reveals_hidden_filter,
                columns=params.columns,
                recorder=recorder,
                should_stop=should_stop,
            ).cpu()


@dataclass
class _PartCallback:
    """``should_stop`` of a part of a batch, called with rows of the part."""

    should_stop: Callable[[list[int]], bool]
    first_row: int
    has_stopped: bool = False

    def __call__(self, rows: list[int]) -> bool:
        self.has_stopped = self.should_stop([self.first_row + row for row in rows])
        return self.has_stopped


def build_generation(
    decoded: Decoded, row: int, request: GenerateRequest, end_tokens: Collection[int], version: int
) -> Generation:
    """Return one decoded row as the response to its request."""
    limit = request.params.max_new_tokens
    stops = {*end_tokens, *request.stop_token_ids}
    tokens = decoded.tokens[row, :limit].tolist()
    end = next((i for i, token in enumerate(tokens) if token in stops), None)
    length = len(tokens) if end is None else end + 1
    # Shorter than the limit and without an end token: other rows reached the target, which stopped this one.
    if not bool(decoded.logprobs[row, :length].isfinite().all()):
        raise TrainingStopped(
            f"the logits of weights version {version} are not finite: no token can be sampled. Fix: lower the learning "
            "rate, and resume from a checkpoint before these weights"
        )
    reason = FinishReason.LENGTH if length == limit else FinishReason.ABORT
    if end is not None:
        reason = FinishReason.STOP
    return Generation(
        finish_reason=reason,
        versions=(VersionSpan(version, 0, length),),
        **decoded.row_columns(row, length, request.routing_start),
    )


def _set_cuda_device(device: torch.device) -> None:
    """Select the device in a new thread: CUDA's current device belongs to the thread."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _stop_callback(target: CompletionTarget, batch: Sequence[PendingResponse]) -> Callable[[list[int]], bool]:
    return lambda rows: target.mark_complete(batch[row] for row in rows)


def _call_seed(samples: Sequence[PendingResponse], params: SamplingParams) -> int:
    """Return the seed of a call: that of ``params`` for new responses.

    Restored responses change the seed, so that they do not get the random numbers of their first tokens again.
    """
    lengths = [len(sample.response.tokens) for sample in samples]
    return random.Random(f"{params.seed}/{lengths}").getrandbits(62) if any(lengths) else params.seed
