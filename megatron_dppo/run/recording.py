"""Recording of a step's samples (``log.rollouts_every``): gathered from all ranks, written by rank 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.config.loss import LossConfig
from megatron_dppo.config.run import LogConfig, RunConfig
from megatron_dppo.data.chat import token_texts
from megatron_dppo.data.training_samples import episode_indices, group_segments
from megatron_dppo.files import disk_errors
from megatron_dppo.parallel.objects import gather_objects, is_leader, run_on_leader
from megatron_dppo.policy.packed import SampleRecord, TokenRecorder
from megatron_dppo.process.marker import read_marker
from megatron_dppo.report.metrics import MetricsWriter
from megatron_dppo.report.steps.files import StepMeta, write_step
from megatron_dppo.report.steps.rows import RankSamples, TrainedTokens
from megatron_dppo.report.steps.tokens import TABLE_COLUMNS, masked_table, masked_tokens, read_tokens
from megatron_dppo.rollout.batch import CollectedRollouts
from megatron_dppo.run.run_records import Records
from megatron_dppo.types import Completion, TrainingSample
from megatron_dppo.types.model_folder import Tokenizer

if TYPE_CHECKING:
    from megatron_dppo.policy.trainer import PolicyTrainer


SampleRecords = dict[tuple[int, int], SampleRecord]
"""Records of samples by ``TrainingSample.number`` and ``segment``."""


class StepRecord:
    """Samples of one step and the results of the updates for their tokens, on this rank."""

    def __init__(self, policy_version: int) -> None:
        self.watch = TokenRecorder()
        self.policy_version = policy_version
        self._samples: list[TrainingSample] = []

    def number_samples(self, samples: Sequence[TrainingSample], dp_rank: int) -> list[TrainingSample]:
        """Remember the samples and return them with their episode's index; every rank must have as many episodes."""
        episodes = episode_indices(samples)
        first = dp_rank * (max(episodes, default=-1) + 1)
        self._samples = [replace(sample, number=first + i) for i, sample in zip(episodes, samples, strict=True)]
        return list(self._samples)

    def pop_sample_records(self, trainer: PolicyTrainer) -> SampleRecords:
        """Return the results of the updates since the last call, by ``TrainingSample.number`` and ``segment``.

        Tensor- and context-parallel ranks compute the same loss: only the first on the last pipeline stage returns it.
        """
        groups = trainer.groups
        is_first = all(group is None or dist.get_rank(group) == 0 for group in (groups.tp, groups.cp))
        samples = self.watch.samples if is_first and trainer.is_last_stage else {}
        self.watch = TokenRecorder()
        return samples

    def build_rank_part(self, collected: CollectedRollouts, dp_rank: int, sample_records: SampleRecords) -> RankSamples:
        """Return the samples of this rank, with the records of all ranks: balancing moves samples between them."""
        completions = [rollout.completion for group in collected.groups for rollout in group.rollouts]
        trained = []
        for completion, indices in zip(completions, group_segments(self._samples), strict=True):
            samples = [self._samples[i] for i in indices]
            parts = [
                _trained_tokens(sample, segment, sample_records.get((sample.number, sample.segment)))
                for sample, segment in zip(samples, completion.segments, strict=True)
            ]
            trained.append(_join_trained(parts))
        return RankSamples(dp_rank=dp_rank, groups=collected.groups, ages=collected.ages, trained=trained)


class _RankRecord(NamedTuple):
    """Record of one rank, as rank 0 receives it."""

    dp_rank: int
    rollouts: tuple[CollectedRollouts, StepRecord] | None
    """None on ranks other than the leader of their replica, which has the same rollouts."""
    sample_records: SampleRecords
    """Result of ``StepRecord.pop_sample_records``."""


class StepRecorder:
    """Writes the samples of every ``log.rollouts_every`` steps to a Parquet file."""

    def __init__(
        self,
        run: RunConfig,
        log: LogConfig,
        loss: LossConfig,
        trainer: PolicyTrainer,
        records: Records,
        tokenizer: Tokenizer,
    ) -> None:
        self._every = log.rollouts_every
        self._loss = loss.name
        self._folder = Path(run.output_dir)
        self._trainer = trainer
        self._records = records
        self._tokenizer = tokenizer

    def begin(self, step: int) -> StepRecord | None:
        """Return an empty record for a step that will be written, else None. Steps count from 1."""
        if not self._every or step % self._every:
            return None
        return StepRecord(self._trainer.policy_version)

    def write(self, step: int, record: StepRecord, collected: CollectedRollouts) -> None:
        """Write the step that was just trained; a collective of all ranks, which returns after rank 0 has written."""
        groups = self._trainer.groups
        self._records.check_folder()
        sample_records = record.pop_sample_records(self._trainer)
        rollouts = (collected, record) if is_leader(groups.replica) else None
        records = gather_objects(_RankRecord(self._trainer.dp_rank, rollouts, sample_records), groups.world)

        def write() -> None:
            if records:
                file = self._write_file(step, record.policy_version, records)
                self._write_table(step, file, self._records.writer)

        run_on_leader(write, groups.world)

    def _write_file(self, step: int, policy_version: int, records: Sequence[_RankRecord]) -> Path:
        sample_records = {number: sample for record in records for number, sample in record.sample_records.items()}
        leaders = sorted((record for record in records if record.rollouts is not None), key=lambda r: r.dp_rank)
        marker = read_marker(self._folder)
        layout = self._trainer.layout
        meta = StepMeta(
            step=step,
            policy_version=policy_version,
            dp=layout.dp,
            world_size=layout.world_size,
            layout=str(layout),
            loss=self._loss,
            run_id=marker.run_id if marker is not None else "",
        )
        parts = []
        for leader in leaders:
            assert leader.rollouts is not None
            collected, step_record = leader.rollouts
            parts.append(step_record.build_rank_part(collected, leader.dp_rank, sample_records))
        return write_step(self._folder, meta, parts)

    def _write_table(self, step: int, file: Path, writer: MetricsWriter | None) -> None:
        """Send the masked tokens of the step to the trackers that have tables."""
        if writer is None or not writer.has_tables:
            return
        rows = masked_table(masked_tokens(read_tokens(file)), lambda ids: token_texts(self._tokenizer, ids))
        if not rows:
            return
        with disk_errors(writer.path, "the metrics"):
            writer.write_table(step, "rollouts/masked_tokens", TABLE_COLUMNS, rows)


def _trained_tokens(sample: TrainingSample, completion: Completion, record: SampleRecord | None) -> TrainedTokens:
    """Return a sample's columns, one row per response token; ``record`` is None if no update used the sample."""
    count = len(completion.token_ids)
    mask = _response_rows(sample.loss_mask, count)
    trained = TrainedTokens(
        update=None,
        policy_version=None,
        loss_mask=mask,
        advantages=_response_rows(sample.advantages, count),
        logprobs=None,
        keep=None,
    )
    if record is None:
        return trained
    return replace(
        trained,
        update=record.update,
        policy_version=record.policy_version,
        logprobs=torch.where(mask, _response_rows(record.logprobs, count), torch.nan),
        keep=mask & _response_rows(record.keep, count),
    )


def _join_trained(parts: Sequence[TrainedTokens]) -> TrainedTokens:
    """Return the tokens of all segments of an episode, which one update trained on."""
    if len(parts) == 1:
        return parts[0]
    logprobs = [part.logprobs for part in parts if part.logprobs is not None]
    keep = [part.keep for part in parts if part.keep is not None]
    return TrainedTokens(
        update=parts[0].update,
        policy_version=parts[0].policy_version,
        loss_mask=torch.cat([part.loss_mask for part in parts]),
        advantages=torch.cat([part.advantages for part in parts]),
        logprobs=torch.cat(logprobs) if len(logprobs) == len(parts) else None,
        keep=torch.cat(keep) if len(keep) == len(parts) else None,
    )


def join_records(records: SampleRecords, number: int, lengths: Sequence[int]) -> SampleRecord:
    """Return the record of an episode, one row per response token; ``lengths`` are the tokens of its segments."""
    parts = [records[number, segment] for segment in range(len(lengths))]
    return SampleRecord(
        parts[0].update,
        parts[0].policy_version,
        torch.cat([_response_rows(part.logprobs, count) for part, count in zip(parts, lengths, strict=True)]),
        torch.cat([_response_rows(part.keep, count) for part, count in zip(parts, lengths, strict=True)]),
    )


def _response_rows(column: Tensor, count: int) -> Tensor:
    """Return the last ``count`` rows of labels ``[T]``; an agent's first token has no label and no row, and gets 0."""
    result = column.new_zeros(count)
    rows = column[-count:]
    result[count - len(rows) :] = rows
    return result
