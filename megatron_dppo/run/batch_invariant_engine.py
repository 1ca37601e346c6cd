"""The engine of ``rollout.batch_invariant``: the trainer's own Megatron model samples, all ranks together.

There is no copy of the weights. Each token is read off a forward pass over all sequences as they are then, by the code
and the kernels that training runs (``mcore/invariant.py``); its log-probability is that of the same fused head. So it
equals, to the bit, what training computes for it at the same weights.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_dppo.engines.local.decode import Decoded, DecodeRecord, StopCriteria
from megatron_dppo.engines.local.engine import build_generation
from megatron_dppo.engines.local.sampler import Sampler
from megatron_dppo.hf.folder import end_tokens
from megatron_dppo.report.clock import PROGRESS
from megatron_dppo.rollout.engine import GroupRequest, GroupState, SampledFuture
from megatron_dppo.rollout.response import GrowingResponse
from megatron_dppo.types import Completion, Prompt, SamplingMask, SamplingParams, TrainingSample
from megatron_dppo.types.token_columns import requested_columns

if TYPE_CHECKING:
    from megatron_dppo.mcore.head import OutputHead
    from megatron_dppo.mcore.row import MicroBatchRow
    from megatron_dppo.policy.trainer import PolicyTrainer

_ROWS = 32
"""Rows that the head scores are filled up to a multiple of this."""


class BatchInvariantEngine:
    """A ``RolloutEngine`` whose calls are collectives of all ranks and return when everything is sampled.

    The ranks of a replica make the same calls; those of different data-parallel ranks may ask for different prompts, or
    for none.

    Args:
        trainer: the policy, built with ``rollout.batch_invariant``.
        hf_config: the model's transformers config.
        tokenizer: decodes responses, names the end-of-sequence token.
        budget: tokens of a micro-batch.
    """

    def __init__(self, trainer: PolicyTrainer, hf_config: Any, tokenizer: Any, budget: int) -> None:
        self.policy_version = -1
        """set by who publishes"""
        self._trainer, self._tokenizer, self._budget = trainer, tokenizer, budget
        self._eos = end_tokens(hf_config, tokenizer)

    def submit(
        self, groups: Sequence[GroupRequest], params: SamplingParams, enough: int, keep: Collection[int] = ()
    ) -> list[SampledFuture]:
        """See ``RolloutEngine``; all groups are completed, and nothing is sampling_mask."""
        del enough, keep
        prompts = [group.prompt for group in groups for _ in range(group.siblings)]
        completions = iter(self.generate(prompts, params))
        futures: list[SampledFuture] = []
        for group in groups:
            futures.append(Future())
            futures[-1].set_result([next(completions) for _ in range(group.siblings)])
        return futures

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Completion]:
        """Sample one response a prompt.

        Raises:
            RuntimeError: nothing was ever published.
        """
        if self.policy_version < 0:
            raise RuntimeError("BatchInvariantEngine is to sample before anything was published")
        with PROGRESS.part("rollout"):
            decoded = self._decode([list(prompt.token_ids) for prompt in prompts], params)
        found = []
        for row, prompt in enumerate(prompts):
            assert decoded is not None
            response = GrowingResponse(prompt.token_ids, columns=requested_columns(params))
            request = response.next_request("", params, (), params.max_new_tokens)
            generation = build_generation(decoded, row, request, self._eos, self.policy_version)
            response.append_sampled(generation)
            found.append(response.completion(generation.finish_reason, self._tokenizer))
        return found

    def unfinished(self) -> dict[int, GroupState]:
        """See ``RolloutEngine``; there is never anything."""
        return {}

    def restore(self, groups: Mapping[int, GroupState]) -> None:
        """See ``RolloutEngine``; what another engine had begun is sampled anew."""

    def close(self) -> None:
        """Nothing of its own to free."""

    @torch.no_grad()
    def _decode(self, sequences: list[list[int]], params: SamplingParams) -> Decoded | None:
        """Continue the sequences of this rank, which grow; None without any."""
        count, device = len(sequences), self._trainer.device
        generator = torch.Generator(device).manual_seed(params.seed)
        sampler = Sampler(params, generator, count)
        criteria = StopCriteria(self._eos, params.max_new_tokens, None, None, device)
        record = DecodeRecord(count, criteria.longest, params.topk_logprobs, device, None, params.return_sampling_mask)
        rows = torch.arange(count, device=device)
        for step in range(criteria.longest + 1):
            found = self._forward([sequences[i] for i in rows.tolist()])
            if found is None:
                return record.result(step).cpu() if count else None
            if not len(rows):
                continue
            head, hidden, logits = found
            chosen, distribution = sampler(logits, rows)
            record.add(step, rows, chosen, distribution)
            self._rescore(head, hidden, record, step, rows, chosen, distribution, params)
            for i, token in zip(rows.tolist(), chosen.tolist(), strict=True):
                sequences[i].append(token)
            alive, _ = criteria.update(step, rows, chosen, torch.ones_like(rows, dtype=torch.bool))
            rows = rows[alive]
        raise AssertionError("no sequence is left after the longest limit")

    def _forward(self, sequences: Sequence[Sequence[int]]) -> tuple[OutputHead, Tensor, Tensor] | None:
        """The head, and for the last token of each sequence its hidden state ``[b, H]`` and the logits ``[b, V]`` after
        it; None when no rank has a sequence left. A collective."""
        samples = [_ending(tokens) for tokens in sequences] or [_ending([0], wanted=False)]
        packed = self._trainer.pack(samples, self._budget)
        if not packed.totals.num_sequences:
            return None

        def read(head: OutputHead, hidden: Tensor, row: MicroBatchRow) -> tuple[OutputHead, Tensor, Tensor]:
            return head, *head.next_token_logits(hidden, row.batch.loss_mask.nonzero()[:, 0])

        parts, _ = self._trainer.token_logprobs(packed.batches, None, read)
        order = torch.tensor([i for part in packed.bins for i in part], device=self._trainer.device)
        hidden, logits = (torch.cat([part[i] for part in parts]) for i in (1, 2))
        place = order.argsort() if sequences else order[:0]
        return parts[0][0], hidden[place], logits[place]

    def _rescore(
        self,
        head: OutputHead,
        hidden: Tensor,
        record: DecodeRecord,
        step: int,
        rows: Tensor,
        chosen: Tensor,
        distribution: Tensor,
        params: SamplingParams,
    ) -> None:
        """Put the head's own log-probabilities, as training asks for them, in the place of the sampler's."""
        count = len(rows)
        fill = torch.zeros(-count % _ROWS, dtype=torch.int64, device=rows.device)
        places = torch.cat([torch.arange(count, device=rows.device), fill])
        ids = None
        if params.topk_logprobs:
            ids = record.topk_ids[rows, step, :-1].long()[places]
        sampling_mask = None
        if params.return_sampling_mask:
            inside = distribution > -torch.inf
            sampling_mask = SamplingMask(inside.nonzero()[:, 1].int(), inside.sum(1).int().cpu())[places.cpu()]
        at = head.at_temperature(params.temperature or 1.0)
        scored = at.row_statistics(hidden[places], chosen[places], ids, sampling_mask)
        own = scored.logprobs[:count]
        record.logprobs[rows, step] = own
        if scored.id_logprobs is not None and ids is not None:
            used = record.topk_ids[rows, step] >= 0
            values = torch.cat([scored.id_logprobs[:count], own[:, None]], 1)
            record.topk_logprobs[rows, step] = torch.where(used, values, 0.0)


def _ending(tokens: Sequence[int], *, wanted: bool = True) -> TrainingSample:
    """A sequence whose last position alone is looked at."""
    mask = torch.zeros(len(tokens), dtype=torch.bool)
    mask[-1] = wanted
    own = torch.tensor(tokens)
    return TrainingSample(tokens=own, labels=torch.zeros_like(own), loss_mask=mask, advantages=torch.zeros(len(tokens)))
