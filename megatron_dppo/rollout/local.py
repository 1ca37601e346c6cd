"""The embedded engine: a transformers copy of the policy in this process, for small models and machines without GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.hf import build_hf_model, copy_into_model, end_tokens, routing_shape
from megatron_dppo.rollout.decode import Decoded, Sampler, decode
from megatron_dppo.rollout.route_recorder import RouteRecorder
from megatron_dppo.types import Completion, FinishReason, Prompt, SamplingParams


class LocalEngine:
    """Batched sampling with a transformers model.

    Args:
        hf_config: the model's transformers config.
        tokenizer: decodes responses, names the end-of-sequence and the padding token.
        dtype: of this copy of the weights; another one than training's gives a real engine mismatch.
        device: where it runs.
        max_batch: sequences that are decoded together.
    """

    def __init__(
        self, hf_config: Any, tokenizer: Any, *, dtype: torch.dtype, device: torch.device, max_batch: int = 512
    ) -> None:
        self.policy_version = -1
        self._tokenizer, self._max_batch, self._device = tokenizer, max_batch, device
        self._model = build_hf_model(hf_config, dtype).to(device)
        self._eos = end_tokens(hf_config, tokenizer)
        routing = routing_shape(hf_config)
        self._recorder = None if routing is None else RouteRecorder(self._model, routing)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy full tensors into this copy; ``version`` goes into every later completion."""
        copy_into_model(self._model, weights)
        self.policy_version = version

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Completion]:
        """Sample one response a prompt. Same prompts, weights and seed give the same responses.

        Raises:
            RuntimeError: no weights were ever given.
            ValueError: routed experts are asked of a dense model.
        """
        if self.policy_version < 0:
            raise RuntimeError("LocalEngine.generate before the first update_weights")
        if params.routed_experts and self._recorder is None:
            raise ValueError("SamplingParams.routed_experts = True, but the model of the local engine has no experts")
        completions: list[Completion] = []
        generator = torch.Generator(self._device).manual_seed(params.seed)
        for start in range(0, len(prompts), self._max_batch):
            completions += self._generate_batch(prompts[start : start + self._max_batch], params, generator)
        return completions

    def _generate_batch(
        self, prompts: Sequence[Prompt], params: SamplingParams, generator: torch.Generator
    ) -> list[Completion]:
        recorder = self._recorder if params.routed_experts else None
        with nullcontext() if recorder is None else recorder.watching():
            decoded = decode(
                self._model,
                [prompt.token_ids for prompt in prompts],
                Sampler(params, generator, len(prompts)),
                max_new_tokens=params.max_new_tokens,
                end=self._eos,
                pad=self._tokenizer.pad_token_id,
                topk=params.topk_logprobs,
                recorder=recorder,
            )
        moved = decoded.cpu()
        return [self._completion(row, moved) for row in range(len(prompts))]

    def _completion(self, row: int, decoded: Decoded) -> Completion:
        tokens = decoded.tokens[row].tolist()
        end = next((i for i, token in enumerate(tokens) if token in self._eos), None)
        length = len(tokens) if end is None else end + 1
        reason = FinishReason.LENGTH if end is None else FinishReason.STOP
        ids, logprobs = decoded.topk_ids, decoded.topk_logprobs
        return Completion(
            token_ids=tuple(tokens[:length]),
            logprobs=tuple(decoded.logprobs[row, :length].tolist()),
            finish_reason=reason,
            policy_version=self.policy_version,
            text=self._tokenizer.decode(tokens[:length], skip_special_tokens=True),
            topk_token_ids=None if ids is None else ids[row, :length].clone(),
            topk_logprobs=None if logprobs is None else logprobs[row, :length].clone(),
            routed_experts=decoded.routes(row, length),
        )

    def close(self) -> None:
        """Free the copy of the weights."""
        del self._model
