"""The embedded engine: a transformers copy of the policy in this process, for small models and machines without GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.hf import build_hf_model, copy_into_model
from megatron_dppo.types import Completion, FinishReason, Prompt, SamplingParams


class LocalEngine:
    """Batched sampling by transformers' ``generate``.

    Args:
        hf_config: the model's transformers config.
        tokenizer: decodes responses, names the end-of-sequence and the padding token.
        dtype: of this copy of the weights; another one than training's gives a real engine mismatch.
        device: where it runs.
        max_batch: sequences of one ``generate`` call.
    """

    def __init__(
        self, hf_config: Any, tokenizer: Any, *, dtype: torch.dtype, device: torch.device, max_batch: int = 512
    ) -> None:
        self.policy_version = -1
        self._tokenizer, self._max_batch, self._device = tokenizer, max_batch, device
        self._model = build_hf_model(hf_config, dtype).to(device)
        self._eos = _end_tokens(hf_config, tokenizer)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy full tensors into this copy; ``version`` goes into every later completion."""
        copy_into_model(self._model, weights)
        self.policy_version = version

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Completion]:
        """Sample one response a prompt. Same prompts, weights and seed give the same responses.

        Raises:
            RuntimeError: no weights were ever given.
        """
        if self.policy_version < 0:
            raise RuntimeError("LocalEngine.generate before the first update_weights")
        completions: list[Completion] = []
        generator = torch.Generator(self._device).manual_seed(params.seed)
        for start in range(0, len(prompts), self._max_batch):
            completions += self._generate_batch(prompts[start : start + self._max_batch], params, generator)
        return completions

    @torch.no_grad()
    def _generate_batch(
        self, prompts: Sequence[Prompt], params: SamplingParams, generator: torch.Generator
    ) -> list[Completion]:
        from megatron_dppo.rollout.draw import Draw

        pad = self._tokenizer.pad_token_id
        width = max(len(p.token_ids) for p in prompts)
        ids = torch.full((len(prompts), width), pad)
        attention = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt.token_ids) :] = torch.tensor(prompt.token_ids)
            attention[row, width - len(prompt.token_ids) :] = 1
        draw = Draw(params, generator) if params.temperature > 0 else None
        output = self._model.generate(
            input_ids=ids.to(self._device),
            attention_mask=attention.to(self._device),
            generation_config=self._generation_config(params),
            logits_processor=[] if draw is None else [draw],
        )
        tokens = output.sequences[:, width:]
        # On CUDA generate looks late whether all are finished, and takes back the steps that it did too much.
        steps = (output.logits if draw is None else draw.scores)[: tokens.shape[1]]
        distribution = torch.stack([s.float().log_softmax(-1) for s in steps], 1)
        logprobs = distribution.gather(2, tokens[..., None]).squeeze(2)
        topk = _with_sampled(distribution, tokens, logprobs, params.topk_logprobs) if params.topk_logprobs else None
        rows = enumerate(zip(tokens.tolist(), logprobs.tolist(), strict=True))
        return [self._completion(t, lp, None if topk is None else (topk[0][i], topk[1][i])) for i, (t, lp) in rows]

    def _generation_config(self, params: SamplingParams) -> Any:
        from transformers import GenerationConfig

        return GenerationConfig(
            max_new_tokens=params.max_new_tokens,
            pad_token_id=self._tokenizer.pad_token_id,
            eos_token_id=sorted(self._eos),
            return_dict_in_generate=True,
            output_logits=params.temperature == 0,
            do_sample=False,
        )

    def _completion(self, tokens: list[int], logprobs: list[float], topk: tuple[Tensor, Tensor] | None) -> Completion:
        end = next((i for i, token in enumerate(tokens) if token in self._eos), None)
        length = len(tokens) if end is None else end + 1
        reason: FinishReason = "length" if end is None else "stop"
        return Completion(
            token_ids=tuple(tokens[:length]),
            logprobs=tuple(logprobs[:length]),
            finish_reason=reason,
            policy_version=self.policy_version,
            text=self._tokenizer.decode(tokens[:length], skip_special_tokens=True),
            topk_token_ids=None if topk is None else topk[0][:length].clone(),
            topk_logprobs=None if topk is None else topk[1][:length].clone(),
        )

    def close(self) -> None:
        """Free the copy of the weights."""
        del self._model


def _with_sampled(distribution: Tensor, tokens: Tensor, logprobs: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The K most probable ids and the sampled one, ``[B, R, K+1]`` int32 and fp32 on the CPU (see ``Completion``)."""
    top_logprobs, top_ids = distribution.topk(k, dim=-1)
    outside = ~(top_ids == tokens[..., None]).any(-1, keepdim=True)
    ids = torch.cat([top_ids, torch.where(outside, tokens[..., None], -1)], -1)
    values = torch.cat([top_logprobs, torch.where(outside, logprobs[..., None], 0.0)], -1)
    return ids.int().cpu(), values.cpu()


def _end_tokens(hf_config: Any, tokenizer: Any) -> set[int]:
    configured = hf_config.eos_token_id
    several = configured if isinstance(configured, list) else [configured]
    return {tokenizer.eos_token_id} | {token for token in several if token is not None}
