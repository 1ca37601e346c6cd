"""Session of a run: everything the loop needs, built in the order in which things can fail."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist

from megatron_dppo.config.layout import format_layout
from megatron_dppo.config.run import CheckpointConfig
from megatron_dppo.config.schema import Config
from megatron_dppo.engines.serving.command import count_gpus_per_server, server_options
from megatron_dppo.engines.serving.environment import server_network, transfer_variables
from megatron_dppo.parallel.objects import all_gather_objects, is_leader
from megatron_dppo.parallel.platform import Platform, pin_threads
from megatron_dppo.parallel.rendezvous import join_ranks, open_store
from megatron_dppo.process.lock import FolderLock
from megatron_dppo.process.watchdog import Watchdog
from megatron_dppo.report.console import Console
from megatron_dppo.rewards.scorer import RewardScorer
from megatron_dppo.rollout.batch import RankColumns
from megatron_dppo.rollout.engine import RolloutEngine
from megatron_dppo.rollout.scheduler import RolloutScheduler
from megatron_dppo.rollout.turns import GenerateFunction
from megatron_dppo.run.checkpoints import Checkpoints
from megatron_dppo.run.collector import RolloutCollector
from megatron_dppo.run.evaluation import Evaluator
from megatron_dppo.run.gpus import build_gpus
from megatron_dppo.run.policy_setup import build_groups, build_policy
from megatron_dppo.run.recording import StepRecorder
from megatron_dppo.run.run_records import Records
from megatron_dppo.run.run_state import RunState
from megatron_dppo.run.step import PolicyUpdater
from megatron_dppo.setup.changes import ServedModels
from megatron_dppo.setup.contents import Contents, ReadContents, read_contents
from megatron_dppo.setup.engines import (
    build_engine,
    build_publisher,
    connect_servers,
    greedy_sampling_params,
    open_generate_function,
    open_scorer,
    rollout_sampling_params,
)
from megatron_dppo.setup.inputs import Inputs, resolve_num_steps
from megatron_dppo.setup.preflight import Start, find_problems, require_inputs
from megatron_dppo.setup.resume import ResumePoint, find_resume_point
from megatron_dppo.setup.run_folder import open_folder
from megatron_dppo.setup.served_models import ReadServedModels, read_served_models
from megatron_dppo.weights.sharing import find_sharing
from megatron_dppo_engines.server import InferenceServer

if TYPE_CHECKING:
    from megatron_dppo.parallel.groups import ParallelGroups
    from megatron_dppo.policy.trainer import PolicyTrainer
    from megatron_dppo.weights.ipc import MemorySharing


@dataclass
class Session:
    """Parts of a run on one rank. Only the loop gets all of them; other functions get the parts that they need."""

    config: Config
    inputs: Inputs
    trainer: PolicyTrainer
    updater: PolicyUpdater
    collector: RolloutCollector
    """Engine, stream of rollouts, and turns on the GPUs."""
    evaluator: Evaluator
    records: Records
    checkpoints: Checkpoints
    resume_point: ResumePoint | None
    """Checkpoint that ``begin`` resumes from. None starts at step 0."""
    contents: Contents
    """Files of the configuration. Empty on ranks other than 0."""
    state: RunState = field(default_factory=RunState)

    def begin(self) -> None:
        """Resume from ``resume_point``, if any, and open the run's records; a collective of all ranks.

        Everything that can refuse a start happens before. Until here the run's files are unchanged.
        """
        self.state = self.checkpoints.begin(self.resume_point)
        self.records.begin(self.resume_point, self.state.step, self.contents)


@contextmanager
def open_session(config: Config) -> Iterator[Session]:
    """Run the preflight checks, join the other ranks, and build the parts of the run.

    The order is that in which things can fail: configuration and inputs first, processes and GPU memory last. The parts
    are closed in the reverse order.
    """
    started = time.time()

    # The store is open before any rank reads data, so that ranks which cannot meet end within minutes.
    store = open_store()

    # Preflight. With several ranks the problems are reported after the process group exists, by one rank for all.
    start = Start(config, int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0")))
    errors = find_problems(start)
    if start.world_size == 1:
        require_inputs(start, errors)
    platform = Platform.detect()
    pin_threads(config.run.threads_per_rank, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))

    # Megatron is imported from here on. Its shims must be applied before the first import.
    from megatron_dppo.mcore.shims import apply_shims

    apply_shims(platform)
    from megatron_dppo.mcore import setup

    # NCCL reads them when the first communicator is created.
    os.environ.update(transfer_variables(config.rollout, os.environ))
    store = join_ranks(config.run.wait_minutes, server_network(config.rollout), store)
    console = Console(enabled=start.rank == 0 and config.log.progress, eval_score_name=config.reward.eval_score_name)
    watchdog = Watchdog(config.run)
    # Closed in the reverse order, so that every writer to the run's folder is closed before its lock is released.
    parts = ExitStack()
    try:
        # Before any group is created: a rank may hang while it connects.
        watchdog.start()
        setup.start_process_group(platform, config.run.wait_minutes, store)
        world = setup.new_host_world(config.run.wait_minutes)
        inputs = require_inputs(start, errors, world)
        joined = _JoinedRun(resolve_num_steps(config, inputs), inputs, platform, world, console, parts)
        opened = _open_run(joined, start.notes)
        yield _build_session(joined, opened, started)
    finally:
        watchdog.close()
        console.finish()
        parts.close()
        setup.shutdown_megatron()


class _JoinedRun(NamedTuple):
    """The run on this rank after the ranks have joined: what all parts are built from."""

    config: Config
    """With the number of steps that its epochs take."""
    inputs: Inputs
    platform: Platform
    world: dist.ProcessGroup
    console: Console
    parts: ExitStack
    """Receives what is closed with the session, in the reverse order."""


class _OpenRun(NamedTuple):
    """Folder, servers, functions and resumed checkpoint of a run, before anything is built from them."""

    lock: FolderLock | None
    sharing: MemorySharing | None
    function: GenerateFunction | None
    servers: list[InferenceServer]
    scorer: RewardScorer
    contents: Contents
    served: ServedModels
    """Models of teachers and judges, also those that only an earlier start could reach."""
    point: ResumePoint | None


def _open_run(joined: _JoinedRun, notes: Sequence[str]) -> _OpenRun:
    """Lock the run's folder, open what the configuration names, and find the checkpoint; a collective of all ranks."""
    config, inputs, _, _, console, parts = joined
    # The folder is locked before anything is read from it or written to it.
    sharing = _find_sharing(joined)
    function = parts.enter_context(open_generate_function(config))
    folder = parts.enter_context(open_folder(config))
    for note in folder.notes:
        console.print(note)
    servers = connect_servers(config.rollout)
    scorer = open_scorer(config)
    parts.callback(scorer.close)
    # Read before anything is built from the files.
    contents, served = ReadContents({}, ()), ReadServedModels({}, ())
    if dist.get_rank() == 0:
        contents = read_contents(config.model_dump(mode="json"))
        served = read_served_models(config.distillation, config.reward)
    point = find_resume_point(config, inputs, contents.contents, served.models)
    lines = [format_layout(inputs.layout, config.batch), inputs.data_summary, *notes, *contents.notes, *served.notes]
    console.print("\n".join(lines))
    # A server that is not reachable at this start is compared at a later one.
    models = {**({} if point is None else point.served), **served.models}
    return _OpenRun(folder.lock, sharing, function, servers, scorer, contents.contents, models, point)


def _build_session(joined: _JoinedRun, opened: _OpenRun, started: float) -> Session:
    """Build the policy, the engine that samples with its weights, and what records and saves; a collective."""
    config, inputs, platform, world, console, parts = joined
    groups = build_groups(config.run, inputs, platform, world)
    trainer, teacher = build_policy(config, inputs, groups, platform, console)
    engine = build_engine(config.rollout, config.train, inputs, trainer, platform, opened.servers, opened.function)
    publisher = build_publisher(config, inputs, trainer, engine, platform, opened.sharing)
    stream = _build_stream(joined, groups, trainer, engine, opened.scorer)
    if not is_leader(groups.replica):
        # The batch-invariant engine exists on every rank, for the stream. All else is done by the leader's alone.
        engine = None
    records = Records(config, inputs.layout, groups, console, opened.lock, started)
    collector = RolloutCollector(
        train=config.train,
        reward=config.reward,
        has_teacher=config.distillation.is_enabled,
        has_servers=config.rollout.engine != "local",
        trainer=trainer,
        engine=engine,
        stream=stream,
        gpus=build_gpus(config.rollout, trainer, publisher),
        recorder=StepRecorder(config.run, config.log, config.loss, trainer, records, inputs.tokenizer),
        show=records.show_servers,
    )
    evaluator = Evaluator(
        config, inputs.eval_prompts, stream, groups, dp=inputs.layout.dp, dp_rank=trainer.dp_rank, log=records.log
    )
    checkpoints = Checkpoints(
        config=config,
        inputs=inputs,
        trainer=trainer,
        collector=collector,
        evaluator=evaluator,
        background=_background_group(config.checkpoint, world),
        say=console.print,
        contents=opened.contents,
        served=opened.served,
        check_folder=records.check_folder,
    )
    parts.callback(records.close)
    parts.callback(publisher.close)
    parts.callback(stream.close)  # closed before the scorer, which the stream may still use
    if engine is not None:
        parts.callback(engine.close)
    parts.callback(checkpoints.close)
    return Session(
        config=config,
        inputs=inputs,
        trainer=trainer,
        updater=PolicyUpdater(trainer, config, teacher),
        collector=collector,
        evaluator=evaluator,
        records=records,
        checkpoints=checkpoints,
        resume_point=opened.point,
        contents=opened.contents,
    )


def _background_group(checkpoint: CheckpointConfig, world: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """Return a group for the thread that saves, as its collectives must not meet the main thread's; or None."""
    from megatron_dppo.mcore.setup import new_background_group

    saves_in_background = checkpoint.async_save or checkpoint.save_every_minutes is not None
    return new_background_group(world) if saves_in_background else None


def _find_sharing(joined: _JoinedRun) -> MemorySharing | None:
    """Return the GPU memory that trainer and servers share. None for other methods than ``ipc``."""
    config, rollout = joined.config, joined.config.rollout
    if rollout.engine == "local" or rollout.weight_sync.method != "ipc":
        return None
    options = server_options(
        rollout,
        config.model,
        config.lora,
        routed_experts=config.train.needs_engine_routing,
        topk_logprobs=config.topk_logprobs,
    )
    return find_sharing(
        rollout,
        gpus_per_server=count_gpus_per_server(rollout.engine, options),
        platform=joined.platform,
        world=joined.world,
        tied=joined.inputs.hf_config.tie_word_embeddings,
    )


def _build_stream(
    joined: _JoinedRun,
    groups: ParallelGroups,
    trainer: PolicyTrainer,
    engine: RolloutEngine | None,
    scorer: RewardScorer,
) -> RolloutScheduler:
    config, inputs = joined.config, joined.inputs
    # Ranks of a replica receive only the columns that they read: those for the loss go to the last stage, routes by
    # layer.
    rank_columns = all_gather_objects(RankColumns(trainer.is_last_stage, trainer.replayed_layers), groups.replica)
    return RolloutScheduler(
        rollout=config.rollout,
        params=rollout_sampling_params(config),
        prompts=inputs.train_prompts,
        groups=groups,
        dp_rank=trainer.dp_rank,
        dp=inputs.layout.dp,
        engine=engine,
        scorer=scorer,
        num_steps=config.run.num_steps,
        max_staleness=config.train.max_staleness,
        rank_columns=rank_columns,
        leads=is_leader(groups.replica),
        reward_parts=list(config.reward.part_weights) if config.train.advantage == "gdpo" else (),
        greedy=greedy_sampling_params(config.rollout, config.run.seed) if config.train.advantage == "remax" else None,
    )
