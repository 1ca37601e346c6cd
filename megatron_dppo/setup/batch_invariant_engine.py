"""Engine of ``rollout.batch_invariant``: the trainer's Megatron model samples, on all ranks together.

There is no copy of the weights. Each token needs one forward pass over all sequences so far, with the code and the
kernels of training (``mcore/invariant.py``). Its log-probability comes from the same fused head. So it equals bitwise
what training computes for this token at the same weights.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple

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
from megatron_dppo.types.model_folder import HfConfig, Tokenizer
from megatron_dppo.types.token_columns import requested_columns

if TYPE_CHECKING:
    from megatron_dppo.mcore.head import OutputHead
    from megatron_dppo.mcore.row import MicroBatchRow
    from megatron_dppo.policy.trainer import PolicyTrainer

_ROW_MULTIPLE = 32
"""The head scores a multiple of this number of rows; row 0 is repeated to fill it up."""


class _NextTokenLogits(NamedTuple):
    """Output of a forward pass for the last token of each sequence."""

    head: OutputHead
    hidden: Tensor
    """Hidden states. Shape [num_sequences, hidden_size]."""
    logits: Tensor
    """Shape [num_sequences, vocab_size]."""


class BatchInvariantEngine:
    """``RolloutEngine`` whose calls are collectives of all ranks and return when all responses are complete.

    The ranks of a replica make the same calls. Different data-parallel ranks may pass different prompts, or none. The
    publisher sets ``policy_version``, which is -1 before the first weights.
    """

    def __init__(self, trainer: PolicyTrainer, hf_config: HfConfig, tokenizer: Tokenizer, budget: int) -> None:
        self.policy_version = -1
        self._trainer = trainer
        self._tokenizer = tokenizer
        self._budget = budget
        self._eos = end_tokens(hf_config, tokenizer)

    def submit(
        self, groups: Sequence[GroupRequest], params: SamplingParams, enough: int, keep: Collection[int] = ()
    ) -> list[SampledFuture]:
        """Complete all groups at once (see ``RolloutEngine``), so that ``enough`` and ``keep`` have no effect."""
        del enough, keep
        prompts = [group.prompt for group in groups for _ in range(group.siblings)]
        completions = iter(self.generate(prompts, params))
        futures: list[SampledFuture] = []
        for group in groups:
            futures.append(Future())
            futures[-1].set_result([next(completions) for _ in range(group.siblings)])
        return futures

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Completion]:
        """Sample one response per prompt."""
        if self.policy_version < 0:
            raise RuntimeError("BatchInvariantEngine needs published weights before it can sample")
        with PROGRESS.part("rollout"):
            limits = [prompt.limited(params).max_new_tokens for prompt in prompts]
            decoded = self._decode([list(prompt.token_ids) for prompt in prompts], params, limits)
        completions = []
        for row, prompt in enumerate(prompts):
            assert decoded is not None
            response = GrowingResponse(prompt.token_ids, columns=requested_columns(params))
            request = response.next_request("", params, (), limits[row])
            generation = build_generation(decoded, row, request, self._eos, self.policy_version)
            response.append_sampled(generation)
            completions.append(response.completion(generation.finish_reason, self._tokenizer))
        return completions

    def unfinished(self) -> dict[int, GroupState]:
        """Return an empty dictionary (see ``RolloutEngine``): every call completes its requests."""
        return {}

    def restore(self, groups: Mapping[int, GroupState]) -> None:
        """Ignore the groups (see ``RolloutEngine``): responses that another engine began are sampled anew."""

    def close(self) -> None:
        """Do nothing: the model belongs to the trainer."""

    @torch.no_grad()
    def _decode(self, sequences: list[list[int]], params: SamplingParams, limits: list[int]) -> Decoded | None:
        """Append sampled tokens to the sequences of this rank, in place. Return None if it has no sequence.

        Every rank takes part in each forward pass until no rank has a sequence left.
        """
        count, device = len(sequences), self._trainer.device
        generator = torch.Generator(device).manual_seed(params.seed)
        sampler = Sampler(params, generator, count)
        criteria = StopCriteria(self._eos, limits or params.max_new_tokens, None, None, device)
        recorded = params.return_sampling_mask, params.columns
        record = DecodeRecord(count, criteria.longest, params.topk_logprobs, device, None, *recorded)
        rows = torch.arange(count, device=device)
        # One pass more than the longest response: in the last one no rank has a sequence left.
        # All ranks make the same number of passes, so the limit of the run counts here.
        for step in range(params.max_new_tokens + 1):
            output = self._forward([sequences[i] for i in rows.tolist()])
            if output is None:
                return record.result(step).cpu() if count else None
            if not len(rows):
                continue
            chosen, distribution = sampler(output.logits, rows)
            record.add(step, rows, chosen, distribution)
            self._rescore(output.head, output.hidden, record, step, rows, chosen, distribution, params)
            for i, token in zip(rows.tolist(), chosen.tolist(), strict=True):
                sequences[i].append(token)
            alive, _ = criteria.update(step, rows, chosen, torch.ones_like(rows, dtype=torch.bool))
            rows = rows[alive]
        raise AssertionError("no sequence is left after the longest limit")

    def _forward(self, sequences: Sequence[Sequence[int]]) -> _NextTokenLogits | None:
        """Run the model over the sequences of all ranks; None if no rank has one left. A collective."""
        # A rank without sequences still needs a sample, as it takes part in the collectives.
        samples = [_last_token_sample(tokens) for tokens in sequences] or [_last_token_sample([0], is_used=False)]
        packed = self._trainer.pack(samples, self._budget)
        # Counted over all ranks, so that all of them return here.
        if not packed.totals.num_sequences:
            return None

        def read(head: OutputHead, hidden: Tensor, row: MicroBatchRow) -> tuple[OutputHead, Tensor, Tensor]:
            return head, *head.next_token_logits(hidden, row.batch.loss_mask.nonzero()[:, 0])

        parts, _ = self._trainer.read_rows(packed.batches, read)
        order = torch.tensor([i for part in packed.bins for i in part], device=self._trainer.device)
        hidden = torch.cat([part[1] for part in parts])
        logits = torch.cat([part[2] for part in parts])
        # Packing has sorted the sequences into bins: undo that.
        inverse = order.argsort() if sequences else order[:0]
        return _NextTokenLogits(parts[0][0], hidden[inverse], logits[inverse])

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
        """Replace the sampler's log-probabilities by those of the fused head, which training uses."""
        count = len(rows)
        fill = torch.zeros(-count % _ROW_MULTIPLE, dtype=torch.int64, device=rows.device)
        indices = torch.cat([torch.arange(count, device=rows.device), fill])
        ids = None
        if params.topk_logprobs:
            ids = record.topk_ids[rows, step, :-1].long()[indices]
        sampling_mask = None
        if params.return_sampling_mask:
            inside = distribution > -torch.inf
            sampling_mask = SamplingMask(inside.nonzero()[:, 1].int(), inside.sum(1).int().cpu())[indices.cpu()]
        at = head.at_temperature(params.temperature or 1.0)
        scored = at.row_statistics(hidden[indices], chosen[indices], ids, sampling_mask)
        logprobs = scored.logprobs[:count]
        record.logprobs[rows, step] = logprobs
        if scored.id_logprobs is not None and ids is not None:
            used = record.topk_ids[rows, step] >= 0
            values = torch.cat([scored.id_logprobs[:count], logprobs[:, None]], 1)
            record.topk_logprobs[rows, step] = torch.where(used, values, 0.0)


def _last_token_sample(tokens: Sequence[int], *, is_used: bool = True) -> TrainingSample:
    """Return a sample whose loss mask selects the last token. It selects no token unless ``is_used``."""
    mask = torch.zeros(len(tokens), dtype=torch.bool)
    mask[-1] = is_used
    ids = torch.tensor(tokens)
    return TrainingSample(tokens=ids, labels=torch.zeros_like(ids), loss_mask=mask, advantages=torch.zeros(len(tokens)))
