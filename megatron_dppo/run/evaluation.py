"""Evaluation on held-out prompts, each data-parallel rank its share; training may go on meanwhile."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megatron_dppo.files.atomic import write_synced
from megatron_dppo.files.disk import disk_errors
from megatron_dppo.parallel.groups import ParallelGroups
from megatron_dppo.parallel.objects import agreed, is_leader
from megatron_dppo.report.clock import Clock
from megatron_dppo.report.metrics import reduce_metrics
from megatron_dppo.report.records import read_records
from megatron_dppo.run.eval_scores import eval_params, metrics_by_set
from megatron_dppo.run.session import Session
from megatron_dppo.run.stream.draw import Draw
from megatron_dppo.types import Metric, Prompt, RolloutGroup

_SHOWN_ANSWERS = 4


@dataclass(frozen=True)
class Evaluation:
    """Held-out prompts that the engine was asked for."""

    step: int
    """whose weights answer"""
    prompts: list[tuple[str, Prompt]]
    """of this data-parallel rank, with the name of their set"""
    draw: Draw


def evaluate(session: Session) -> dict[str, float]:
    """Ask for answers to the held-out prompts; what they show, or nothing when training goes on meanwhile or
    ``eval.every`` is 0.

    ``eval/accuracy`` and the others are over the prompts of all sets together; a set with a name has them apart too,
    as ``eval/<name>/accuracy``.
    """
    sets, config = session.inputs.eval_prompts, session.config
    if not sets or not config.eval.every:
        return {}
    every = [(name, prompts[i]) for name, prompts in sets.items() for i in range(len(prompts))]
    share = every[session.trainer.dp_rank :: session.inputs.layout.dp]
    prompts = [prompt for _, prompt in share]
    draw = session.stream.ask(prompts, config.eval.samples_per_prompt, eval_params(config), session.step)
    evaluation = Evaluation(session.step, share, draw)
    if config.evaluates_beside_training and session.step < config.run.num_steps:
        session.evaluation = evaluation
        return {}
    return _values(session, evaluation)


def finish_evaluation(session: Session) -> tuple[int, dict[str, float]] | None:
    """The step and the values of the evaluation that ran beside training, if one did; waits for it."""
    if session.evaluation is None:
        return None
    evaluation, session.evaluation = session.evaluation, None
    return evaluation.step, _values(session, evaluation)


def _values(session: Session, evaluation: Evaluation) -> dict[str, float]:
    groups = session.stream.answered(evaluation.draw, Clock())
    record_answers(session, groups, evaluation.step)
    owners, n = [name for name, _ in evaluation.prompts], session.config.eval.samples_per_prompt
    local = metrics_by_set(list(session.inputs.eval_prompts), owners, groups, n)
    return prefixed("eval", reduce_over_samples(session.groups, local))


def record_answers(session: Session, groups: Sequence[RolloutGroup], step: int) -> None:
    """Keep some answers of this evaluation in ``samples.jsonl`` (rank 0); a collective."""
    agreed(lambda: _record_answers(session, groups, step) if dist.get_rank() == 0 else None, session.groups.world)


def _record_answers(session: Session, groups: Sequence[RolloutGroup], step: int) -> None:
    answers = [
        {
            "prompt": group.prompt.text,
            "label": group.prompt.label,
            "response": group.rollouts[0].completion.text,
            "reward": group.rollouts[0].score,
        }
        for group in groups[:_SHOWN_ANSWERS]
    ]
    if step == 0:
        session.answers_before = answers
    earlier = [r for r in _read_samples(session) if r["step"] < step]  # a killed run may have left later ones
    records = [*earlier, *({"step": step, **a} for a in answers)]
    target = session.folder / "samples.jsonl"
    with disk_errors(target, "the answers"):
        write_synced(target, "".join(json.dumps(r) + "\n" for r in records))


def read_answers(session: Session) -> list[dict[str, Any]]:
    """The answers of the last evaluation."""
    records = _read_samples(session)
    return [r for r in records if r["step"] == records[-1]["step"]][-_SHOWN_ANSWERS:]


def _read_samples(session: Session) -> list[dict[str, Any]]:
    return read_records(session.folder / "samples.jsonl")


def reduce_over_samples(groups: ParallelGroups, local: dict[str, Metric]) -> dict[str, float]:
    """Reduce per-sample metrics: one rank of each model-parallel group contributes."""
    return reduce_metrics([local], groups.world, contributes=is_leader(groups.replica))


def prefixed(prefix: str, values: dict[str, float]) -> dict[str, float]:
    """The same values under ``prefix/name``."""
    return {f"{prefix}/{name}": value for name, value in values.items()}
