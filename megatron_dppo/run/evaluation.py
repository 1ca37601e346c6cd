"""Evaluation on held-out prompts. Each data-parallel rank samples its share, possibly beside training."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import comb
from pathlib import Path
from typing import TypedDict, cast

import torch.distributed as dist

from megatron_dppo.config.schema import Config
from megatron_dppo.data.prompts import PromptDataset
from megatron_dppo.files import disk_errors, write_synced
from megatron_dppo.parallel.groups import ParallelGroups
from megatron_dppo.parallel.objects import run_on_leader
from megatron_dppo.report.clock import Clock
from megatron_dppo.report.metrics import add_prefix, reduce_over_samples
from megatron_dppo.report.records import Record, read_records
from megatron_dppo.rollout.pending import Submission
from megatron_dppo.rollout.request_scheduler import sampling_params
from megatron_dppo.rollout.scheduler import RolloutScheduler
from megatron_dppo.types import Metric, Prompt, Rollout, RolloutGroup
from megatron_dppo_answers.math import extract_answer

SAMPLES = "samples.jsonl"
"""File with some responses of each evaluation."""


class SampleResponse(TypedDict):
    """A response that the user is shown, as ``samples.jsonl`` and the checkpoints store it."""

    prompt: str
    label: str
    response: str
    reward: float


def metrics_by_set(
    set_names: Sequence[str], group_sets: Sequence[str], groups: Sequence[RolloutGroup], n: int
) -> dict[str, Metric]:
    """Return the metrics over all groups, and over each set under ``<name>/``, but for the set ``""``."""
    values = eval_metrics(groups, n)
    for name in filter(None, set_names):
        members = [group for set_name, group in zip(group_sets, groups, strict=True) if set_name == name]
        values |= {f"{name}/{metric}": value for metric, value in eval_metrics(members, n).items()}
    return values


def eval_metrics(groups: Sequence[RolloutGroup], n: int) -> dict[str, Metric]:
    """Return the metrics of scored groups with n responses each; no groups give the same names.

    ``accuracy`` is the mean score of all responses (avg@n). With several responses there are also ``pass_at_k`` for
    k = 1, 2, 4 ... and n, and ``maj_at_n``. pass@k is the probability that the best of k responses, sampled without
    replacement, has a score of 1 or more (the unbiased estimate of arXiv 2107.03374, section 2.1). maj@n is the score
    of the answer that most responses give.

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
    # The powers of two below n, and n.
    for k in sorted({2**i for i in range(n.bit_length())} | {n}):
        values[f"pass_at_{k}"] = Metric(sum(pass_at_k(n, _count_solved(group), k) for group in groups), len(groups))
    values[f"maj_at_{n}"] = Metric(sum(majority_score(group.rollouts) for group in groups), len(groups))
    return values


def pass_at_k(n: int, solved: int, k: int) -> float:
    """Return the probability that k of n responses, sampled without replacement, include one of the solved ones."""
    return 1 - comb(n - solved, k) / comb(n, k)


def majority_score(rollouts: Sequence[Rollout]) -> float:
    r"""Return the mean score of the responses that give the most frequent answer. In a tie the first answer wins.

    An answer is the last box or ``Answer:`` line, else the whole response; ``\frac12`` and ``1/2`` are one answer.
    """
    # sympy takes a second to import, and a run without several responses a prompt does not need it.
    from megatron_dppo_answers.equality import answer_key

    by_answer: dict[str, list[float]] = {}
    for rollout in rollouts:
        text = rollout.completion.text
        answer = extract_answer(text)
        key = answer_key(answer) if answer else text.strip()
        by_answer.setdefault(key, []).append(rollout.score)
    scores = max(by_answer.values(), key=len)
    return sum(scores) / len(scores)


def _count_solved(group: RolloutGroup) -> int:
    return sum(rollout.score >= 1 for rollout in group.rollouts)


_NUM_SHOWN = 4
"""Responses of an evaluation that are written to ``samples.jsonl``."""


@dataclass(frozen=True)
class Evaluation:
    """Held-out prompts that were submitted to the engine."""

    step: int
    """Rollout step whose weights sample."""
    prompts: list[tuple[str, Prompt]]
    """Prompts of this data-parallel rank, each with the name of its set."""
    draw: Submission


@dataclass
class Evaluator:
    """Submits the held-out prompts and scores them; ``responses_before`` are some from before training, on rank 0."""

    config: Config
    sets: Mapping[str, PromptDataset]
    stream: RolloutScheduler
    groups: ParallelGroups
    dp: int
    dp_rank: int
    log: Callable[[int, dict[str, float]], None]
    """Writes the metrics of an evaluation that is no part of a step, by the step whose weights it used."""
    responses_before: list[SampleResponse] = field(default_factory=list)
    _running: Evaluation | None = None

    @property
    def is_running(self) -> bool:
        """True if an evaluation runs beside training."""
        return self._running is not None

    def evaluate(self, step: int) -> dict[str, float]:
        """Evaluate the engine's weights, and return metrics of all held-out prompts and of each named set.

        They are empty if the evaluation runs beside training, if there are no sets, or if ``eval.every`` is 0.
        """
        config = self.config
        if not self.sets or not config.eval.every:
            return {}
        all_prompts = [(name, prompts[i]) for name, prompts in self.sets.items() for i in range(len(prompts))]
        # Every dp-th prompt, so that each rank has a part of every set.
        share = all_prompts[self.dp_rank :: self.dp]
        prompts = [prompt for _, prompt in share]
        draw = self.stream.submit(
            prompts,
            config.eval.samples_per_prompt,
            sampling_params(config.eval, config.eval_max_new_tokens, config.run.seed),
            step,
        )
        evaluation = Evaluation(step, share, draw)
        # The last evaluation has no training left to run beside.
        if config.evaluates_beside_training and step < config.run.num_steps:
            self._running = evaluation
            return {}
        return self._compute_metrics(evaluation)

    def begin(self, step: int) -> None:
        """Evaluate before the first step of this start."""
        self.log(step, self.evaluate(step))

    def finish(self) -> None:
        """Wait for the evaluation beside training, if one is running, and log its metrics."""
        evaluation = self._running
        if evaluation is not None:
            self._running = None
            self.log(evaluation.step, self._compute_metrics(evaluation))

    def _compute_metrics(self, evaluation: Evaluation) -> dict[str, float]:
        groups = self.stream.wait_for(evaluation.draw, Clock())
        responses = write_sample_responses(Path(self.config.run.output_dir), groups, evaluation.step, self.groups.world)
        if evaluation.step == 0:
            self.responses_before = responses
        group_sets = [name for name, _ in evaluation.prompts]
        local = metrics_by_set(list(self.sets), group_sets, groups, self.config.eval.samples_per_prompt)
        return add_prefix("eval", reduce_over_samples(self.groups, local))


def write_sample_responses(
    folder: Path, groups: Sequence[RolloutGroup], step: int, world: dist.ProcessGroup | None
) -> list[SampleResponse]:
    """Write a few responses of an evaluation to ``samples.jsonl``; return them on rank 0. A collective of all ranks."""
    responses: list[SampleResponse] = []
    if dist.get_rank() == 0:
        responses = [
            {
                "prompt": group.prompt.text,
                "label": group.prompt.label,
                "response": group.rollouts[0].completion.text,
                "reward": group.rollouts[0].score,
            }
            for group in groups[:_NUM_SHOWN]
        ]

    def write() -> None:
        if dist.get_rank():
            return
        target = folder / SAMPLES
        # A run that was killed may have left responses of later steps.
        earlier = [
            record for record in read_records(target, sample_problem, skip_damaged=True) if record["step"] < step
        ]
        records = [*earlier, *({"step": step, **response} for response in responses)]
        with disk_errors(target, "the answers"):
            write_synced(target, "".join(json.dumps(record) + "\n" for record in records))

    run_on_leader(write, world)
    return responses


def read_sample_responses(folder: Path) -> list[SampleResponse]:
    """Return the responses of the last evaluation in ``samples.jsonl``."""
    records = read_records(folder / SAMPLES, sample_problem, skip_damaged=True)
    last = [record for record in records if record["step"] == records[-1]["step"]]
    return cast(list[SampleResponse], last[-_NUM_SHOWN:])


def sample_problem(record: Record) -> str:
    """Return what is wrong with a record of ``samples.jsonl``, or an empty text."""
    texts = (record.get("prompt"), record.get("label"), record.get("response"))
    numbers = (type(record.get("step")) is int, type(record.get("reward")) in (int, float))
    is_right = all(numbers) and all(isinstance(text, str) for text in texts)
    return "" if is_right else "expected step, prompt, label, response and reward"
