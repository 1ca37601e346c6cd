"""Greedy evaluation on held-out prompts, and generation as every rank of a model-parallel group sees it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from megatron_dppo.files.atomic import write_synced
from megatron_dppo.files.disk import disk_errors
from megatron_dppo.parallel.objects import agreed, from_leader, is_leader
from megatron_dppo.report.clock import Clock
from megatron_dppo.report.metrics import read_metrics, reduce_metrics
from megatron_dppo.rollout.collect import sample_completions, score_completions
from megatron_dppo.run.session import Session
from megatron_dppo.types import Metric, Prompt, RolloutGroup, SamplingParams

_SHOWN_ANSWERS = 4


def generate_groups(
    session: Session, prompts: Sequence[Prompt], samples: int, params: SamplingParams, clock: Clock
) -> list[RolloutGroup]:
    """Scored groups; the leader of each model-parallel group samples, its peers receive."""
    return from_leader(lambda: sample_and_score(session, prompts, samples, params, clock), session.groups.replica)


def sample_and_score(
    session: Session, prompts: Sequence[Prompt], samples: int, params: SamplingParams, clock: Clock
) -> list[RolloutGroup]:
    """Scored groups, on a rank with an engine; runs no collective."""
    assert session.engine is not None
    with clock.part("rollout"):
        completions = sample_completions(session.engine, prompts, samples, params)
    with clock.part("reward"):
        return score_completions(session.scorer, prompts, completions)


def evaluate(session: Session) -> dict[str, float]:
    """Accuracy on the held-out prompts, each data-parallel rank its share.

    ``eval/accuracy`` and the others are over the prompts of all sets together; a set with a name has them apart too,
    as ``eval/<name>/accuracy``.
    """
    sets = session.inputs.eval_prompts
    if not sets:
        return {}
    every = [(name, prompts[i]) for name, prompts in sets.items() for i in range(len(prompts))]
    share = every[session.trainer.dp_rank :: session.inputs.layout.dp]
    mine = [prompt for _, prompt in share]
    config = session.config.eval
    params = SamplingParams(
        max_new_tokens=session.config.rollout.max_new_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        seed=session.config.run.seed,
    )
    groups = generate_groups(session, mine, config.samples_per_prompt, params, Clock()) if mine else []
    record_answers(session, groups)
    local = _accuracy(groups)
    for name in filter(None, sets):
        of_set = [group for (owner, _), group in zip(share, groups, strict=True) if owner == name]
        local |= {f"{name}/{metric}": value for metric, value in _accuracy(of_set).items()}
    return prefixed("eval", reduce_over_samples(session, local))


def _accuracy(groups: Sequence[RolloutGroup]) -> dict[str, Metric]:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return {
        "accuracy": Metric(sum(r.score for r in rollouts), len(rollouts)),
        "pass_at_k": Metric(sum(max(r.score for r in g.rollouts) >= 1 for g in groups), len(groups)),
        "response_length": Metric(sum(len(r.completion.token_ids) for r in rollouts), len(rollouts)),
    }


def record_answers(session: Session, groups: Sequence[RolloutGroup]) -> None:
    """Keep some answers of this evaluation in ``samples.jsonl`` (rank 0); a collective."""
    agreed(lambda: _record_answers(session, groups) if dist.get_rank() == 0 else None, session.groups.world)


def _record_answers(session: Session, groups: Sequence[RolloutGroup]) -> None:
    answers = [
        {
            "prompt": group.prompt.text,
            "label": group.prompt.label,
            "response": group.rollouts[0].completion.text,
            "reward": group.rollouts[0].score,
        }
        for group in groups[:_SHOWN_ANSWERS]
    ]
    if session.step == 0:
        session.answers_before = answers
    earlier = [r for r in _read_samples(session) if r["step"] < session.step]  # a killed run may have left later ones
    records = [*earlier, *({"step": session.step, **a} for a in answers)]
    target = session.folder / "samples.jsonl"
    with disk_errors(target, "the answers"):
        write_synced(target, "".join(json.dumps(r) + "\n" for r in records))


def read_answers(session: Session) -> list[dict[str, Any]]:
    """The answers of the last evaluation."""
    records = _read_samples(session)
    return [r for r in records if r["step"] == records[-1]["step"]][-_SHOWN_ANSWERS:]


def _read_samples(session: Session) -> list[dict[str, Any]]:
    return read_metrics(session.folder / "samples.jsonl")


def reduce_over_samples(session: Session, local: dict[str, Metric]) -> dict[str, float]:
    """Reduce per-sample metrics: one rank of each model-parallel group contributes."""
    leader = is_leader(session.groups.replica)
    return reduce_metrics([local], session.groups.world, contributes=leader)


def prefixed(prefix: str, values: dict[str, float]) -> dict[str, float]:
    """The same values under ``prefix/name``."""
    return {f"{prefix}/{name}": value for name, value in values.items()}
