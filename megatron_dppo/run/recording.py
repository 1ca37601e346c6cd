"""A step's samples to its file (``log.rollouts_every``): from the ranks that have them, by rank 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.config.schema import Config
from megatron_dppo.data.chat import token_texts
from megatron_dppo.files import disk_errors
from megatron_dppo.parallel.groups import ParallelGroups
from megatron_dppo.parallel.objects import agreed, at_leader, is_leader
from megatron_dppo.policy.packed import SeenSample, TokenWatch
from megatron_dppo.report.metrics import MetricsWriter
from megatron_dppo.report.steps.files import StepMeta, write_step
from megatron_dppo.report.steps.rows import RankPart, TrainedTokens
from megatron_dppo.report.steps.tokens import TABLE_COLUMNS, masked_table, masked_tokens, read_tokens
from megatron_dppo.rollout.batch import Collected
from megatron_dppo.run.run_folder import read_marker
from megatron_dppo.types import Completion, TrainingSample

if TYPE_CHECKING:
    from megatron_dppo.policy.trainer import PolicyTrainer


class StepRecord:
    """What is remembered of a step while it trains.

    Attributes:
        watch: gets the tokens of the updates.
        policy_version: before the first of them.
    """

    def __init__(self, policy_version: int) -> None:
        self.watch, self.policy_version = TokenWatch(), policy_version
        self._samples: list[TrainingSample] = []

    def numbered(self, samples: Sequence[TrainingSample], dp_rank: int) -> list[TrainingSample]:
        """The samples that are trained on, each with its place in the step; every rank has as many."""
        first = dp_rank * len(samples)
        self._samples = [replace(sample, number=first + i) for i, sample in enumerate(samples)]
        return list(self._samples)

    def take_seen(self, trainer: PolicyTrainer) -> dict[int, SeenSample]:
        """Return what the updates saw since the last call, by ``TrainingSample.number``.

        Of the ranks that compute the same loss the first has it; the others return nothing.
        """
        groups = trainer.groups
        is_first = all(group is None or dist.get_rank(group) == 0 for group in (groups.tp, groups.cp))
        seen = self.watch.samples if is_first and trainer.is_last_stage else {}
        self.watch = TokenWatch()
        return seen

    def part(self, collected: Collected, dp_rank: int, seen: dict[int, SeenSample]) -> RankPart:
        """The samples of one data-parallel rank, with what was seen of them anywhere."""
        completions = [rollout.completion for group in collected.groups for rollout in group.rollouts]
        trained = [
            _trained(sample, completion, seen.get(sample.number))
            for sample, completion in zip(self._samples, completions, strict=True)
        ]
        return RankPart(dp_rank=dp_rank, groups=collected.groups, ages=collected.ages, trained=trained)


class _FromRank(NamedTuple):
    """What one rank gives."""

    dp_rank: int
    own: tuple[Collected, StepRecord] | None
    """None = another rank of the same replica gives it"""
    seen: dict[int, SeenSample]
    """by ``TrainingSample.number``, from one rank of those that compute the same loss"""


class StepRecorder:
    """Writes the samples of every ``log.rollouts_every`` steps to a Parquet file.

    Args:
        config: configuration of the run.
        trainer: policy of this rank.
        groups: parallel groups of this rank.
        tokenizer: turns masked tokens to text for the trackers that show tables.
    """

    def __init__(self, config: Config, trainer: PolicyTrainer, groups: ParallelGroups, tokenizer: Any) -> None:
        self._every = config.log.rollouts_every
        self._loss = config.loss.name
        self._folder = Path(config.run.output_dir)
        self._trainer = trainer
        self._groups = groups
        self._tokenizer = tokenizer

    def begin(self, step: int) -> StepRecord | None:
        """Return an empty record for a step that will be written, or None. Steps count from 1."""
        if not self._every or step % self._every:
            return None
        return StepRecord(self._trainer.policy_version)

    def write(self, step: int, record: StepRecord, collected: Collected, writer: MetricsWriter | None) -> None:
        """Write the step that was just trained; a collective of all ranks, after which rank 0 has written.

        Args:
            step: rollout steps done.
            record: what ``begin`` returned for it.
            collected: rollouts of this rank.
            writer: gets a table of masked tokens, on rank 0.

        Raises:
            DiskError: on all ranks, when it cannot be written.
        """
        groups, trainer = self._groups, self._trainer
        seen = record.take_seen(trainer)
        own = (collected, record) if is_leader(groups.replica) else None
        every = at_leader(_FromRank(trainer.dp_rank, own, seen), groups.world)

        def write() -> None:
            if every:
                file = self._write_file(step, record.policy_version, every)
                self._write_table(step, file, writer)

        agreed(write, groups.world)

    def _write_file(self, step: int, policy_version: int, every: Sequence[_FromRank]) -> Path:
        together = {number: sample for each in every for number, sample in each.seen.items()}
        leaders = sorted((each for each in every if each.own is not None), key=lambda each: each.dp_rank)
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
        parts = [each.own[1].part(each.own[0], each.dp_rank, together) for each in leaders if each.own]
        return write_step(self._folder, meta, parts)

    def _write_table(self, step: int, file: Path, writer: MetricsWriter | None) -> None:
        """Show what the step masked in the trackers that have tables."""
        if writer is None or not writer.has_tables:
            return
        rows = masked_table(masked_tokens(read_tokens(file)), lambda ids: token_texts(self._tokenizer, ids))
        if not rows:
            return
        with disk_errors(writer.path, "the metrics"):
            writer.write_table(step, "rollouts/masked_tokens", TABLE_COLUMNS, rows)


def _trained(sample: TrainingSample, completion: Completion, seen: SeenSample | None) -> TrainedTokens:
    count = len(completion.token_ids)
    mask = _last(sample.loss_mask, count)
    logprobs = None if seen is None else torch.where(mask, _last(seen.logprobs, count), torch.nan)
    return TrainedTokens(
        update=None if seen is None else seen.update,
        loss_mask=mask,
        advantages=_last(sample.advantages, count),
        logprobs=logprobs,
        keep=None if seen is None else mask & _last(seen.keep, count),
    )


def _last(column: Tensor, count: int) -> Tensor:
    """``[T]`` of the labels to the ``[count]`` response tokens; an agent's first token has no label, and gets 0."""
    result = column.new_zeros(count)
    own = column[-count:]
    result[count - len(own) :] = own
    return result
