"""``megatron-dppo diagnose RUN``: ledger of a new batch of a run, sampled and scored as in the run.

Nothing is written to the run's folder. A run with ``train.max_staleness`` is continued in memory for as many steps, so
that the diagnosed batch is as stale as those of the run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_dppo.config.checks import check_router_weights
from megatron_dppo.config.reward import RewardConfig
from megatron_dppo.config.schema import Config
from megatron_dppo.config.section import Section
from megatron_dppo.engines.local.engine import LocalEngine
from megatron_dppo.errors import ConfigError
from megatron_dppo.hf.folder import model_shape, read_hf_config, routing_shape
from megatron_dppo.process.stop_signal import StopSignal
from megatron_dppo.report.clock import Clock
from megatron_dppo.rollout.saved import SchedulerState
from megatron_dppo.run.collector import RolloutCollector
from megatron_dppo.run.session import open_session
from megatron_dppo.run.step import StepBatch
from megatron_dppo.setup.inputs import Inputs
from megatron_dppo.setup.named_functions import SAMPLING, TRAINING, named_functions, require_permission
from megatron_dppo.setup.resume import ResumePoint
from megatron_dppo.setup.starts import load_run_config, read_starts
from megatron_dppo_doctor.diagnose.ledger import Cause, Ledger, make_ledger
from megatron_dppo_doctor.diagnose.scoring import RunScorer, Snapshots

if TYPE_CHECKING:
    from megatron_dppo.policy.trainer import PolicyTrainer


def diagnose_run(folder: Path, overrides: Sequence[str] = (), *, with_functions: bool = False) -> Ledger:
    """Return the ledger of a run at its newest checkpoint. It is the same on every rank.

    ``with_functions`` executes the functions that the configuration names.
    """
    before = load_diagnosed_config(folder, overrides, with_functions=with_functions)
    config = diagnosis_config(before)
    if not with_functions:
        config = _without_functions(config)
    with StopSignal(), open_session(config) as session:
        collector = session.collector
        inputs = session.inputs
        step = _restore(session.resume_point, session.trainer, collector, session.records.console.print)
        snapshots = Snapshots(session.trainer)
        replay = before.train.router_replay
        scorer = RunScorer(
            trainer=session.trainer,
            snapshots=snapshots,
            config=session.config,
            replays="none" if replay != "rollout" else "weights" if before.train.router_replay_weights else "ids",
            engine=collector.engine if isinstance(collector.engine, LocalEngine) else None,
            exact=None,
            is_local=_is_local_copy(session.config),
            has_linear_attention=model_shape(inputs.hf_config).linear is not None,
        )
        for _ in range(config.train.max_staleness):
            batch = _collect(collector, step, snapshots)
            samples = batch.samples
            # The diagnosis asks the engine for combine weights, which the run itself does not replay.
            if replay == "rollout" and not before.train.router_replay_weights:
                samples = [scorer.without_weights(sample) for sample in samples]
            session.updater.step(StepBatch(step, batch.collected, samples), Clock())
            collector.stream.wait_before_update(Clock())
            step += 1
            collector.publish(Clock(), samples_next=True)
        return _make_ledger(scorer, before, _collect(collector, step, snapshots), inputs)


def load_diagnosed_config(folder: Path, overrides: Sequence[str], *, with_functions: bool = False) -> Config:
    """Load the configuration of the run in a folder; the arguments are those of ``diagnose_run``."""
    # Last, so that they win: the diagnosis must not overwrite the run or begin it anew.
    safe = ("--run.overwrite", "false", "--checkpoint.resume", "auto", "--checkpoint.accept_changes", "true")
    config = load_run_config(folder, [*overrides, *safe], with_functions=with_functions)
    sections = (*SAMPLING, *TRAINING) if config.train.max_staleness else SAMPLING
    require_permission(config, sections, "diagnose", is_given=with_functions)
    here = int(os.environ.get("WORLD_SIZE", "1"))
    there = read_starts(folder)[-1].get("world_size", here)
    if here != there and not overrides:
        raise ConfigError(
            f"the run in {str(folder)!r} was trained by {there} processes, and this command runs with {here}. Fix: "
            f"torchrun --nproc-per-node {there} -m megatron_dppo.commands.main diagnose {folder}, or override "
            "[parallel]"
        )
    perturbation = config.rollout.perturbation
    if perturbation.unrecorded_temperature != 1:
        raise ConfigError(
            f"rollout.perturbation.unrecorded_temperature = {perturbation.unrecorded_temperature}: a diagnosis "
            "compares log-probabilities, which do not show this temperature. Fix: override it with "
            "--rollout.perturbation.unrecorded_temperature 1"
        )
    if perturbation.unrecorded_top_p < 1 and config.rollout.has_filters:
        raise ConfigError(
            "rollout.perturbation.unrecorded_top_p below 1 together with top_p, top_k or min_p: the effects "
            "of the two filters cannot be separated. Fix: override one of them, as with --rollout.top_p 1"
        )
    return config


def diagnosis_config(config: Config) -> Config:
    """Return the configuration with additional steps for a stale run, and an engine that reports its routes."""
    # The scheduler samples nothing for steps after the last one.
    more = config.train.max_staleness + 1 if config.train.max_staleness else 0
    run = config.run.model_copy(update={"num_steps": config.run.num_steps + more})
    log = config.log.model_copy(update={"tensorboard": False, "wandb_project": None, "trackers": []})
    train = config.train
    if _is_local_copy(config) and routing_shape(read_hf_config(config.model.path)) is not None:
        replay = "rollout" if train.router_replay == "rollout" else "compare"
        try:
            check_router_weights(replay, "local", config.model.transformer)
            weights = True
        except ValueError:
            weights = False
        train = train.model_copy(update={"router_replay": replay, "router_replay_weights": weights})
    return config.model_copy(update={"run": run, "log": log, "train": train})


def _without_functions(config: Config) -> Config:
    """Return the configuration without functions that only training needs: nothing is trained."""
    functions = named_functions(config)
    changes: dict[str, Section] = {}
    if any(key.startswith("reward.") for key in functions):
        changes["reward"] = RewardConfig(function="none", kl_coef=config.reward.kl_coef)
        # Without rewards no group has a signal.
        changes["rollout"] = config.rollout.model_copy(update={"dynamic_sampling": False})
    if "train.advantage" in functions:
        changes["train"] = config.train.model_copy(update={"advantage": "mean", "advantage_options": {}})
    return config.model_copy(update=changes)


def _is_local_copy(config: Config) -> bool:
    """Return True if the engine is a copy of the policy in this process, which can score tokens again."""
    return config.rollout.engine == "local" and not config.rollout.batch_invariant


def _restore(
    point: ResumePoint | None, trainer: PolicyTrainer, collector: RolloutCollector, say: Callable[[str], None]
) -> int:
    """Load the newest checkpoint and return its step. Its rollouts stay: the weights that sampled them are not saved.

    Args:
        point: Checkpoint. None diagnoses the initial weights.
        trainer: Receives the weights.
        collector: Receives the position in the data.
        say: Prints a line.
    """
    if isinstance(collector.engine, LocalEngine):
        collector.engine.reveal_filters()
    if point is None:
        say("diagnose the run has no checkpoint: diagnosing its initial weights")
        return 0
    state = trainer.load(point.checkpoint, same_layout=point.same_layout)
    step: int = state["step"]
    saved = SchedulerState.from_json(state["stream"]).with_data_parallel_size(trainer.layout.dp)
    collector.stream.restore(saved.without_submissions(step), {})
    say(f"diagnose {point.checkpoint} (step {step})")
    return step


def _collect(collector: RolloutCollector, step: int, snapshots: Snapshots) -> StepBatch:
    collector.begin()
    # Before sampling: these are the weights that sample the batch, to score it with later.
    snapshots.take()
    return collector.collect(step, Clock())


def _make_ledger(scorer: RunScorer, before: Config, batch: StepBatch, inputs: Inputs) -> Ledger:
    import torch

    if scorer.engine is not None:
        device = scorer.trainer.device
        exact = LocalEngine(inputs.hf_config, inputs.tokenizer, dtype=torch.float32, device=device)
        scorer = replace(scorer, exact=exact)
    try:
        trained, chain = scorer.chain(batch.collected.groups, batch.samples)
        scorings = scorer.scorings(chain, batch.samples)
        absent = _missing_causes(before, scorer, {cause for cause, _ in chain})
        notes = [f"at step {batch.step}, one new batch; train.max_staleness = {before.train.max_staleness}"]
        if before.train.router_replay == "recorded":
            notes.append("train.router_replay = 'recorded': the first update uses live routes, as here")
        return make_ledger(scorer.gather_trained(trained, batch.samples), scorings, absent, notes)
    finally:
        if scorer.exact is not None:
            scorer.exact.close()


def _missing_causes(before: Config, scorer: RunScorer, present: set[str]) -> dict[str, str]:
    if before.rollout.batch_invariant:
        causes = (Cause.SAMPLER, Cause.ROUTER_IDS, Cause.ROUTER_WEIGHTS, Cause.HEAD, Cause.ENGINE)
        return dict.fromkeys(causes, "none: the trainer's own model samples")
    shape, replay = scorer.trainer.routing_shape, before.train.router_replay
    absent: dict[str, str] = {}
    if Cause.SAMPLER not in present:
        absent[Cause.SAMPLER] = "none: by the configuration, training uses the distributions that were sampled"
        if not scorer.is_local:
            absent[Cause.SAMPLER] = "not separable: the server may filter distributions without reporting it"
    for cause, replayed in (
        (Cause.ROUTER_IDS, replay == "rollout"),
        (Cause.ROUTER_WEIGHTS, scorer.replays == "weights"),
    ):
        if cause in present:
            continue
        if shape is None:
            absent[cause] = "a dense model has none"
        elif replayed:
            absent[cause] = "replayed in training"
        else:
            absent[cause] = "not separable: the engine does not report them"
    if not scorer.is_local:
        absent |= dict.fromkeys(
            (Cause.HEAD, Cause.ENGINE), "not separable: the server cannot score with another output layer or dtype"
        )
        if scorer.has_linear_attention:
            absent[Cause.RECURRENCE] = "not separable: the server cannot score in chunks"
    if Cause.UNEXPLAINED not in present:
        absent[Cause.UNEXPLAINED] = "not separable: part of the numerics of trainer or server"
    return absent
