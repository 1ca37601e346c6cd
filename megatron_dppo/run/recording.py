"""A step's samples to its file (``log.rollouts_every``): from the ranks that have them, by rank 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.data.tokenizer import token_texts
from megatron_dppo.files.disk import disk_errors
from megatron_dppo.parallel.objects import agreed, at_leader, is_leader
from megatron_dppo.policy.watch import SeenSample, TokenWatch
from megatron_dppo.record.files import StepMeta, write_step
from megatron_dppo.record.rows import RankPart, TrainedTokens
from megatron_dppo.record.tokens import TABLE_COLUMNS, masked_table, masked_tokens, read_tokens
from megatron_dppo.run.folder import read_marker
from megatron_dppo.run.session import Session
from megatron_dppo.run.stream.collected import Collected
from megatron_dppo.types import Completion, TrainingSample


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


def begin_record(session: Session) -> StepRecord | None:
    """What the next step is remembered in; None when it is not written."""
    every = session.config.log.rollouts_every
    if not every or (session.step + 1) % every:
        return None
    return StepRecord(session.trainer.policy_version)


def write_record(session: Session, record: StepRecord, collected: Collected) -> None:
    """Write the step that was just trained; a collective of all ranks, after which rank 0 has written.

    Raises:
        DiskError: on all ranks, when it cannot be written.
    """
    groups, layout = session.groups, session.inputs.layout
    first = all(group is None or dist.get_rank(group) == 0 for group in (groups.tp, groups.cp))
    seen = record.watch.samples if first and session.trainer.is_last_stage else {}
    record.watch = TokenWatch()  # what was seen is sent once
    own = (collected, record) if is_leader(groups.replica) else None
    every = at_leader(_FromRank(session.trainer.dp_rank, own, seen), groups.world)

    def write() -> None:
        if not every:
            return
        together = {number: sample for each in every for number, sample in each.seen.items()}
        leaders = sorted((each for each in every if each.own is not None), key=lambda each: each.dp_rank)
        marker = read_marker(session.folder)
        meta = StepMeta(
            step=session.step,
            policy_version=record.policy_version,
            dp=layout.dp,
            world_size=layout.world_size,
            layout=str(layout),
            loss=session.config.loss.name,
            run_id=marker.run_id if marker is not None else "",
        )
        parts = [each.own[1].part(each.own[0], each.dp_rank, together) for each in leaders if each.own]
        _write_table(session, write_step(session.folder, meta, parts))

    agreed(write, groups.world)


def _write_table(session: Session, file: Path) -> None:
    """What the step masked, to the sinks that show tables."""
    if session.writer is None or not session.writer.has_tables:
        return
    tokenizer = session.inputs.tokenizer
    found = masked_table(masked_tokens(read_tokens(file)), lambda ids: token_texts(tokenizer, ids))
    if not found:
        return
    with disk_errors(session.writer.path, "the metrics"):
        session.writer.write_table(session.step, "rollouts/masked_tokens", TABLE_COLUMNS, found)


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
