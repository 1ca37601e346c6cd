"""The run: collect, train, publish, log, evaluate, save. Every rank runs the same loop."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from megatron_dppo.config import Config
from megatron_dppo.data.packing import micro_batches, split_by_tokens
from megatron_dppo.errors import TrainingStopped
from megatron_dppo.losses import group_relative_advantages, policy_loss
from megatron_dppo.metrics import reduce_metrics
from megatron_dppo.parallel.objects import from_leader, is_leader
from megatron_dppo.platform import DTYPES
from megatron_dppo.report.curves import write_curves
from megatron_dppo.report.summary import before_after_table, sample_answers, summarize, written_files
from megatron_dppo.rollout.collect import collect, rollout_metrics, to_samples
from megatron_dppo.session import Session, export_hf, open_session, save_session
from megatron_dppo.types import Metric, Prompt, RolloutGroup, SamplingParams, StepResult, TrainingSample

_SHOWN_ANSWERS = 4


def run(config: Config) -> int:
    """Train by ``config``; returns the exit code (0, also when SIGTERM ended the run after a save)."""
    with open_session(config) as session, StopSignal() as stop:
        publish(session)
        if session.step == 0:
            log(session, evaluate(session))
        session.console.start("training", config.run.num_steps, session.step)
        while session.step < config.run.num_steps:
            clock = Clock()
            groups = collect_rollouts(session)
            clock.lap("rollout")
            samples = make_samples(groups, config)
            results = update_policy(session, samples)
            clock.lap("update")
            publish(session)
            clock.lap("publish")
            session.step += 1
            values = step_metrics(session, groups, samples, results, clock)
            if session.step % config.eval.every == 0 or session.step == config.run.num_steps:
                values |= evaluate(session)
            log(session, values)
            stopping = stop.requested()
            if stopping or save_due(session):
                session.console.say(f"saved    {save_session(session)}")
            check_health(session)
            if stopping:
                session.console.say(
                    f"stopped  by SIGTERM after step {session.step}; the same command continues the run"
                )
                return 0
        finish(session)
    return 0


def collect_rollouts(session: Session) -> list[RolloutGroup]:
    """This data-parallel rank's share of the step's prompts, sampled with the current weights and scored."""
    rollout, layout = session.config.rollout, session.inputs.layout
    share = rollout.prompts_per_step // layout.dp
    first = session.cursor + session.trainer.dp_rank * share
    session.cursor += rollout.prompts_per_step
    params = SamplingParams(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        seed=sampling_seed(session, "rollout"),
    )
    prompts = [session.inputs.train_prompts[i] for i in range(first, first + share)]
    return generate_groups(session, prompts, rollout.samples_per_prompt, params)


def generate_groups(
    session: Session, prompts: Sequence[Prompt], samples: int, params: SamplingParams
) -> list[RolloutGroup]:
    """Scored groups; the leader of each model-parallel group samples, its peers receive."""

    def make() -> list[RolloutGroup]:
        assert session.engine is not None
        return collect(session.engine, session.scorer, prompts, samples, params)

    return from_leader(make, session.groups.model_parallel)


def sampling_seed(session: Session, purpose: str) -> int:
    """A seed for this step and data-parallel rank, a function of the configuration alone (so that resume is exact)."""
    key = f"{session.config.run.seed}/{purpose}/{session.step}/{session.trainer.dp_rank}"
    return random.Random(key).getrandbits(31)


def make_samples(groups: Sequence[RolloutGroup], config: Config) -> list[TrainingSample]:
    """Rewards to group-relative advantages to training samples."""
    rewards = torch.tensor([[r.reward for r in group.rollouts] for group in groups])
    valid = torch.tensor([[not r.reward_failed for r in group.rollouts] for group in groups])
    advantages = group_relative_advantages(rewards, config.train.advantage, valid)
    return to_samples(groups, advantages.tolist())


def update_policy(session: Session, samples: list[TrainingSample]) -> list[StepResult]:
    """One optimizer update for each mini-batch of each epoch; the rollout log-probabilities stay the anchor of all."""
    train, trainer = session.config.train, session.trainer
    trainer.optimizer.set_step(session.step)
    results = []
    for epoch in range(train.epochs):
        order = list(range(len(samples)))
        random.Random(sampling_seed(session, f"epoch {epoch}")).shuffle(order)
        size = len(samples) // train.mini_batches
        for start in range(0, len(order), size):
            mine = [samples[i] for i in order[start : start + size]]
            count = trainer.count_micro_batches(len(split_by_tokens(mine, train.micro_batch_tokens)))
            batches = micro_batches(mine, train.micro_batch_tokens, count, session.inputs.layout.token_multiple)
            result = trainer.update(batches, lambda inputs: policy_loss(inputs, session.config.loss))
            session.skipped_in_a_row = session.skipped_in_a_row + 1 if result.skipped else 0
            results.append(result)
    return results


def publish(session: Session) -> None:
    """Give the current weights to the engine; every rank takes part in gathering them."""
    weights = session.trainer.export_weights()
    if session.engine is not None:
        session.engine.update_weights(weights, session.trainer.policy_version)
    else:
        for _ in weights:
            pass


def evaluate(session: Session) -> dict[str, float]:
    """Greedy accuracy on the held-out prompts, each data-parallel rank its share."""
    prompts = session.inputs.eval_prompts
    if prompts is None:
        return {}
    mine = [prompts[i] for i in range(session.trainer.dp_rank, len(prompts), session.inputs.layout.dp)]
    params = SamplingParams(max_new_tokens=session.config.rollout.max_new_tokens, temperature=0.0)
    groups = generate_groups(session, mine, 1, params) if mine else []
    rollouts = [group.rollouts[0] for group in groups]
    record_answers(session, groups)
    local = {
        "accuracy": Metric(sum(r.reward for r in rollouts), len(rollouts)),
        "response_length": Metric(sum(len(r.completion.token_ids) for r in rollouts), len(rollouts)),
    }
    return prefixed("eval", reduce_over_samples(session, local))


def record_answers(session: Session, groups: Sequence[RolloutGroup]) -> None:
    """Keep some answers of this evaluation in ``samples.jsonl`` (rank 0)."""
    if dist.get_rank() != 0:
        return
    answers = [
        {
            "prompt": group.prompt.text,
            "label": group.prompt.label,
            "response": group.rollouts[0].completion.text,
            "reward": group.rollouts[0].reward,
        }
        for group in groups[:_SHOWN_ANSWERS]
    ]
    if session.step == 0:
        session.answers_before = answers
    mode = "w" if session.step == 0 else "a"
    with (session.folder / "samples.jsonl").open(mode, encoding="utf-8") as file:
        file.writelines(json.dumps({"step": session.step, **answer}) + "\n" for answer in answers)


def reduce_over_samples(session: Session, local: dict[str, Metric]) -> dict[str, float]:
    """Reduce per-sample metrics: one rank of each model-parallel group contributes."""
    leader = is_leader(session.groups.model_parallel)
    return reduce_metrics([local], session.groups.world, contributes=leader)


def step_metrics(
    session: Session,
    groups: Sequence[RolloutGroup],
    samples: Sequence[TrainingSample],
    results: Sequence[StepResult],
    clock: Clock,
) -> dict[str, float]:
    """Everything that is logged for a step, globally reduced."""
    rollout = reduce_over_samples(session, rollout_metrics(groups, samples))
    tokens = reduce_over_samples(
        session, {"tokens": Metric(sum(s.num_tokens for s in samples), 1 / layout_dp(session))}
    )
    train = {
        name: max(r.metrics[name] for r in results)
        if name.endswith("_max")
        else _mean(r.metrics[name] for r in results)
        for name in results[0].metrics
    } | {
        # Before the first update pi and mu have the same weights: what differs is the engine.
        "abs_prob_diff_first": results[0].metrics["abs_prob_diff"],
        "grad_norm": _mean(r.grad_norm for r in results),
        "learning_rate": results[-1].learning_rate,
        "skipped_updates": float(sum(r.skipped for r in results)),
        "policy_version": float(results[-1].policy_version),
    }
    seconds = clock.total()
    perf = {f"{name}_seconds": value for name, value in clock.laps.items()} | {
        "step_seconds": seconds,
        "tokens": tokens["tokens"],
        "tokens_per_second": tokens["tokens"] / seconds,
    }
    return prefixed("train", train) | prefixed("rollout", rollout) | prefixed("perf", perf)


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)


def layout_dp(session: Session) -> int:
    """Number of data-parallel ranks."""
    return session.inputs.layout.dp


def prefixed(prefix: str, values: dict[str, float]) -> dict[str, float]:
    """The same values under ``prefix/name``."""
    return {f"{prefix}/{name}": value for name, value in values.items()}


def log(session: Session, values: dict[str, float]) -> None:
    """One record to every sink, one line to the terminal."""
    if session.writer is not None:
        session.writer.write(session.step, values)
    if session.step > 0:
        session.console.step(session.step, session.config.run.num_steps, values)
    elif values:
        session.console.say(f"held-out accuracy before training: {values['eval/accuracy']:.3f}")


def save_due(session: Session) -> bool:
    """Whether this step ends with a checkpoint."""
    every = session.config.checkpoint.save_every
    last = session.step == session.config.run.num_steps
    return last or (every is not None and session.step % every == 0)


def check_health(session: Session) -> None:
    """Stop when no update could be applied several times in a row.

    Raises:
        TrainingStopped: after ``train.max_skipped_updates`` non-finite gradients; the weights were saved.
    """
    limit = session.config.train.max_skipped_updates
    if session.skipped_in_a_row < limit:
        return
    path = save_session(session)
    raise TrainingStopped(
        f"the gradient was not finite in {session.skipped_in_a_row} updates in a row (train.max_skipped_updates = "
        f"{limit}); none of them was applied and the weights are saved in {path}. Look at train/ratio_max, "
        f"train/prob_rise_max and train/grad_norm in {session.folder / 'metrics.jsonl'}: a rollout engine whose "
        "log-probabilities do not fit the weights, a learning rate that is too high, and bf16 overflow are usual causes"
    )


def finish(session: Session) -> None:
    """Export the model, draw the curves, print what changed."""
    config, folder, console = session.config, session.folder, session.console
    if config.checkpoint.export_hf:
        export_hf(session.trainer, config, folder / "hf", DTYPES[config.model.dtype])
    if session.writer is None:
        return
    summarize(
        folder,
        world_size=session.inputs.layout.world_size,
        layout=str(session.inputs.layout),
        policy_updates=session.trainer.policy_version,
        total_seconds=time.time() - session.started,
    )
    write_curves(session.writer.path, folder / "curves.png", f"{config.loss.name} on {config.data.train}")
    console.finish()
    console.say("\n" + before_after_table(folder))
    after = read_answers(session)
    if session.answers_before and after:
        console.say("\nheld-out problems\n" + sample_answers(session.answers_before, after))
    console.say("\nwritten\n" + written_files(folder))


def read_answers(session: Session) -> list[dict[str, Any]]:
    """The answers of the last evaluation."""
    path = session.folder / "samples.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    records = [json.loads(line) for line in lines]
    return [r for r in records if r["step"] == records[-1]["step"]][-_SHOWN_ANSWERS:]


class Clock:
    """Wall-clock seconds of the parts of a step."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """The time since the last lap belongs to ``name``."""
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self._last = now

    def total(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._start


class StopSignal:
    """Remembers SIGTERM, so that a step can end and be saved before the process exits."""

    def __init__(self) -> None:
        self._received = False

    def __enter__(self) -> StopSignal:
        self._previous = signal.signal(signal.SIGTERM, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        signal.signal(signal.SIGTERM, self._previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._received = True

    def requested(self) -> bool:
        """Whether any rank was asked to stop; equal on all ranks (a collective)."""
        device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
        flag = torch.tensor(int(self._received), device=device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)
