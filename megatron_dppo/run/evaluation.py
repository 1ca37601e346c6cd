"""Evaluation on held-out prompts, each data-parallel rank its share; training may go on meanwhile."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_dppo.config.schema import Config
from megatron_dppo.data.prompts import PromptDataset
from megatron_dppo.files import disk_errors, write_synced
from megatron_dppo.parallel.groups import ParallelGroups
from megatron_dppo.parallel.objects import agreed
from megatron_dppo.report.clock import Clock
from megatron_dppo.report.metrics import prefixed, reduce_over_samples
from megatron_dppo.report.records import read_records
from megatron_dppo.rewards.math import extract_answer
from megatron_dppo.rollout.pending import Draw
from megatron_dppo.rollout.requests import sampling_params
from megatron_dppo.rollout.stream import Stream
from megatron_dppo.types import Metric, Prompt, Rollout, RolloutGroup, SamplingParams


def eval_sampling_params(config: Config) -> SamplingParams:
    """How ``[eval]`` says that answers are sampled."""
    return sampling_params(config.eval, config.eval_max_new_tokens, config.run.seed)


def metrics_by_set(
    sets: Sequence[str], owners: Sequence[str], groups: Sequence[RolloutGroup], n: int
) -> dict[str, Metric]:
    """The metrics of all groups together, and of each set that has a name under ``<name>/``.

    Args:
        sets: names of all held-out sets.
        owners: the set that each group's prompt is of.
        groups: answered prompts, maybe none.
        n: answers to each.
    """
    values = eval_metrics(groups, n)
    for name in filter(None, sets):
        own = [group for owner, group in zip(owners, groups, strict=True) if owner == name]
        values |= {f"{name}/{metric}": value for metric, value in eval_metrics(own, n).items()}
    return values


def eval_metrics(groups: Sequence[RolloutGroup], n: int) -> dict[str, Metric]:
    """The metrics of some prompts, maybe none (each rank has the same names), with n answers each.

    ``accuracy`` is the mean score of all answers (avg@n). With several answers, ``pass_at_k`` for k = 1, 2, 4 ... and n
    is the chance that the best of k answers drawn without replacement has a score of 1 or more (the unbiased estimate
    of arXiv 2107.03374, section 2.1), and ``maj_at_n`` the score of the answer that most responses give.

    Example:
        Scores 1, 0, 0, 0 of one prompt: accuracy .25, pass_at_1 .25, pass_at_2 .5, pass_at_4 1.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    values = {
        "accuracy": Metric(sum(r.score for r in rollouts), len(rollouts)),
        "response_length": Metric(sum(len(r.completion.token_ids) for r in rollouts), len(rollouts)),
    }
    if n == 1:
        return values
    for k in _ks(n):
        values[f"pass_at_{k}"] = Metric(sum(pass_at_k(n, _solved(group), k) for group in groups), len(groups))
    values[f"maj_at_{n}"] = Metric(sum(majority_score(group.rollouts) for group in groups), len(groups))
    return values


def pass_at_k(n: int, solved: int, k: int) -> float:
    """The chance that at least one of k answers, drawn without replacement from n, is among the solved ones."""
    return 1 - comb(n - solved, k) / comb(n, k)


def majority_score(rollouts: Sequence[Rollout]) -> float:
    """The mean score of the responses that give the most frequent answer; of equally frequent ones the first counts.

    An answer is the text of the last box or ``Answer:`` line; a response with neither is its own whole text.
    """
    by_answer: dict[str, list[float]] = {}
    for rollout in rollouts:
        text = rollout.completion.text
        by_answer.setdefault(extract_answer(text) or text.strip(), []).append(rollout.score)
    scores = max(by_answer.values(), key=len)
    return sum(scores) / len(scores)


def _ks(n: int) -> list[int]:
    return sorted({2**i for i in range(n.bit_length())} | {n})


def _solved(group: RolloutGroup) -> int:
    return sum(rollout.score >= 1 for rollout in group.rollouts)


_SHOWN_ANSWERS = 4


@dataclass(frozen=True)
class Evaluation:
    """Held-out prompts that were submitted to the engine."""

    step: int
    """Rollout step whose weights answer."""
    prompts: list[tuple[str, Prompt]]
    """Prompts of this data-parallel rank, each with the name of its set."""
    draw: Draw


class Evaluator:
    """Submits the held-out prompts and scores the answers.

    Args:
        config: configuration of the run.
        sets: held-out prompts by the name of their set; empty disables evaluation.
        stream: source of the answers.
        groups: parallel groups of this rank.
        dp: number of data-parallel ranks.
        dp_rank: data-parallel rank of this process.

    Attributes:
        answers_before: a few answers from before training, on rank 0.
    """

    def __init__(
        self,
        config: Config,
        sets: Mapping[str, PromptDataset],
        stream: Stream,
        groups: ParallelGroups,
        *,
        dp: int,
        dp_rank: int,
    ) -> None:
        self._config = config
        self._sets = sets
        self._stream = stream
        self._groups = groups
        self._dp = dp
        self._dp_rank = dp_rank
        self._folder = Path(config.run.output_dir)
        self._running: Evaluation | None = None
        self.answers_before: list[dict[str, Any]] = []

    @property
    def is_running(self) -> bool:
        """Whether an evaluation runs beside training."""
        return self._running is not None

    def evaluate(self, step: int) -> dict[str, float]:
        """Evaluate the engine's weights.

        Returns:
            ``eval/accuracy`` and others over the prompts of all sets together, and of each set with a name as
            ``eval/<name>/accuracy``. Empty when the evaluation runs beside training, or when ``eval.every`` is 0.
        """
        config = self._config
        if not self._sets or not config.eval.every:
            return {}
        every = [(name, prompts[i]) for name, prompts in self._sets.items() for i in range(len(prompts))]
        share = every[self._dp_rank :: self._dp]
        prompts = [prompt for _, prompt in share]
        draw = self._stream.ask(prompts, config.eval.samples_per_prompt, eval_sampling_params(config), step)
        evaluation = Evaluation(step, share, draw)
        if config.evaluates_beside_training and step < config.run.num_steps:
            self._running = evaluation
            return {}
        return self._metrics(evaluation)

    def finish(self) -> tuple[int, dict[str, float]] | None:
        """Wait for the evaluation that runs beside training; return its step and metrics, or None without one."""
        if self._running is None:
            return None
        evaluation, self._running = self._running, None
        return evaluation.step, self._metrics(evaluation)

    def _metrics(self, evaluation: Evaluation) -> dict[str, float]:
        groups = self._stream.answered(evaluation.draw, Clock())
        answers = write_sample_responses(self._folder, groups, evaluation.step, self._groups.world)
        if evaluation.step == 0:
            self.answers_before = answers
        owners = [name for name, _ in evaluation.prompts]
        local = metrics_by_set(list(self._sets), owners, groups, self._config.eval.samples_per_prompt)
        return prefixed("eval", reduce_over_samples(self._groups, local))


def write_sample_responses(
    folder: Path, groups: Sequence[RolloutGroup], step: int, world: dist.ProcessGroup | None
) -> list[dict[str, Any]]:
    """Write a few answers of an evaluation to ``samples.jsonl`` on rank 0; a collective of all ranks.

    Returns:
        The answers on rank 0, an empty list on the others.

    Raises:
        DiskError: on all ranks, when they cannot be written.
    """
    answers: list[dict[str, Any]] = []
    if dist.get_rank() == 0:
        answers = [
            {
                "prompt": group.prompt.text,
                "label": group.prompt.label,
                "response": group.rollouts[0].completion.text,
                "reward": group.rollouts[0].score,
            }
            for group in groups[:_SHOWN_ANSWERS]
        ]

    def write() -> None:
        if dist.get_rank():
            return
        target = _samples_file(folder)
        # A run that was killed may have left answers of later steps.
        earlier = [record for record in read_records(target) if record["step"] < step]
        records = [*earlier, *({"step": step, **answer} for answer in answers)]
        with disk_errors(target, "the answers"):
            write_synced(target, "".join(json.dumps(record) + "\n" for record in records))

    agreed(write, world)
    return answers


def read_sample_responses(folder: Path) -> list[dict[str, Any]]:
    """Return the answers of the last evaluation."""
    records = read_records(_samples_file(folder))
    return [record for record in records if record["step"] == records[-1]["step"]][-_SHOWN_ANSWERS:]


def _samples_file(folder: Path) -> Path:
    return folder / "samples.jsonl"
