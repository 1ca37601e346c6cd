"""Session of a run: everything the loop needs, built in the order in which things can fail."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist

from megatron_dppo.config.layout import format_layout
from megatron_dppo.config.optimizer import OptimizerConfig
from megatron_dppo.config.run import RunConfig
from megatron_dppo.config.schema import Config
from megatron_dppo.engines.serving.command import count_gpus_per_server, server_options
from megatron_dppo.engines.serving.environment import server_network, transfer_variables
from megatron_dppo.engines.teacher import TeacherServers
from megatron_dppo.files import disk_errors, require_space
from megatron_dppo.hf.folder import DictWeights, build_hf_model, stream_model
from megatron_dppo.hf.weight_files import FolderWeights
from megatron_dppo.mcore.checkpoint.folder import checkpoints_folder
from megatron_dppo.parallel.objects import all_gather_objects, is_leader, run_on_leader
from megatron_dppo.parallel.platform import Platform, pin_threads
from megatron_dppo.parallel.rendezvous import join_ranks, open_store
from megatron_dppo.process.lock import FolderLock
from megatron_dppo.process.stop_signal import Stopped, StopSignal
from megatron_dppo.process.watchdog import Watchdog
from megatron_dppo.report.console import Console
from megatron_dppo.report.records import metric_problem, read_metrics, set_damaged_lines_aside
from megatron_dppo.report.steps.files import delete_steps_after
from megatron_dppo.rewards.scorer import RewardScorer
from megatron_dppo.rollout.batch import RankColumns
from megatron_dppo.rollout.engine import RolloutEngine
from megatron_dppo.rollout.scheduler import RolloutScheduler
from megatron_dppo.run.checkpoints import Checkpoints, RunState
from megatron_dppo.run.evaluation import SAMPLES, Evaluator, sample_problem
from megatron_dppo.run.export import export_hf
from megatron_dppo.run.gpus import Gpus, build_gpus, free_gpus
from megatron_dppo.run.guard_state import GuardState
from megatron_dppo.run.recording import StepRecorder
from megatron_dppo.run.run_records import Records
from megatron_dppo.run.warmup import Warmup, is_warm, mark_warm, run_warmup
from megatron_dppo.setup.changes import Change
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
from megatron_dppo.setup.inputs import Inputs, ModelInputs, resolve_num_steps
from megatron_dppo.setup.preflight import Start, find_problems, require_inputs
from megatron_dppo.setup.resume import ResumePoint, find_resume_point
from megatron_dppo.setup.run_folder import UNSAVED, open_folder, set_metrics_aside
from megatron_dppo.setup.served_models import ReadServedModels, read_served_models
from megatron_dppo.setup.starts import changes_since_last_start, record_start
from megatron_dppo.setup.teacher_setup import build_teacher
from megatron_dppo.weights.sharing import find_sharing

if TYPE_CHECKING:
    from megatron_dppo.hf.weight_files import WeightSource
    from megatron_dppo.mcore.teacher_model import MegatronTeacher
    from megatron_dppo.parallel.groups import ParallelGroups
    from megatron_dppo.policy.trainer import PolicyTrainer
    from megatron_dppo.weights.ipc import MemorySharing


@dataclass
class Session:
    """Parts of a run on one rank. Only the loop gets all of them; other functions get the parts that they need."""

    config: Config
    inputs: Inputs
    """Model, tokenizer and data sets."""
    trainer: PolicyTrainer
    """Policy and optimizer."""
    groups: ParallelGroups
    engine: RolloutEngine | None
    """None on ranks that get their rollouts from the leader of their model-parallel group."""
    teacher: MegatronTeacher | TeacherServers | None
    """Teacher of a distillation, in the trainer or behind servers. None without distillation."""
    stream: RolloutScheduler
    """Source of the rollouts."""
    gpus: Gpus
    """Turns of the engine and the trainer on the GPUs, and the publishing of weights."""
    evaluator: Evaluator
    records: Records
    """Metrics and console lines."""
    recorder: StepRecorder
    """Recording of whole steps (``log.rollouts_every``)."""
    checkpoints: Checkpoints
    resume_point: ResumePoint | None
    """Checkpoint that ``begin`` resumes from. None starts at step 0."""
    contents: Contents
    """Files of the configuration. Empty on ranks other than 0."""
    lock: FolderLock | None
    """Lock of the run's folder. None on all ranks but 0."""
    state: RunState = field(default_factory=RunState)
    """Counters of the run."""

    def check_folder(self) -> None:
        """End this process if the run's folder is no longer its own. Call it before each write to the folder."""
        if self.lock is not None:
            self.lock.exit_if_lost()

    def begin(self) -> None:
        """Resume from ``resume_point``, if any, and open the run's records; a collective of all ranks.

        Everything that can refuse a start happens before. Until here the run's files are unchanged.
        """
        point = self.resume_point
        folder = Path(self.config.run.output_dir)
        say = self.records.console.print
        self.trainer.check_can_save()
        for note in run_on_leader(lambda: _set_damaged_logs_aside(folder), dist.group.WORLD):
            say(note)
        if point is not None:
            self.state, self.evaluator.responses_before = self.checkpoints.restore(point)
            if note := _missing_records(folder, self.state.step):
                say(note)
        changes: Sequence[Change] = () if point is None else point.changes
        if point is None and (before := read_metrics(folder / "metrics.jsonl")):
            changes = changes_since_last_start(folder, self.config, self.contents)
            say(
                f"note     an earlier start in this folder reached step {before[-1]['step']} and left no checkpoint: "
                f"this one begins at step 0\n         the earlier metrics are in {UNSAVED}/"
            )
            for change in changes:
                say(f"         changed: {change}")

        def write() -> str:
            if point is None:
                set_metrics_aside(folder)
            if point is not None:
                self.checkpoints.tidy(point, self.state)
            # Recorded steps after the checkpoint are those of an attempt whose updates are lost.
            delete_steps_after(folder, self.state.step)
            return record_start(
                folder,
                self.config,
                world_size=self.inputs.layout.world_size,
                layout=str(self.inputs.layout),
                resumed_step=self.state.step if point is not None else None,
                changes=[str(change) for change in changes],
                contents=self.contents,
            )

        if note := run_on_leader(write, dist.group.WORLD):
            say(note)
        self.records.open(self.state.step or None)


@contextmanager
def open_session(config: Config, stop: StopSignal) -> Iterator[Session]:
    """Run the preflight checks, join the other ranks, warm up if configured, and build the parts of the run.

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
    platform = Platform.detect(int(os.environ.get("LOCAL_RANK", "0")))
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
        config = resolve_num_steps(config, inputs)

        # The folder is locked before anything is read from it or written to it.
        sharing = _find_sharing(config, platform, world, tied=inputs.hf_config.tie_word_embeddings)
        function = parts.enter_context(open_generate_function(config))
        open_run = parts.enter_context(open_folder(config))
        for note in open_run.notes:
            console.print(note)
        servers = connect_servers(config.rollout)
        scorer = open_scorer(config)
        parts.callback(scorer.close)
        # Read before anything is built from the files.
        contents = read_contents(config.model_dump(mode="json")) if start.rank == 0 else ReadContents({}, ())
        served = read_served_models(config.distillation, config.reward) if start.rank == 0 else ReadServedModels({}, ())
        point = find_resume_point(config, inputs, contents.contents, served.models)
        notes = [*start.notes, *contents.notes, *served.notes]
        lines = [format_layout(inputs.layout, config.batch), inputs.data_summary, *notes]
        console.print("\n".join(lines))

        # Model-parallel groups, the policy, and the engine that samples with its weights.
        groups = build_groups(config.run, inputs, platform, world)
        trainer, teacher = _build_policy(config, inputs, groups, platform, console, stop)
        engine = build_engine(config.rollout, config.train, inputs, trainer, platform, servers, function)
        publisher = build_publisher(config, inputs, trainer, engine, platform, sharing)
        stream = _build_stream(config, inputs, groups, trainer, engine, scorer)
        if not is_leader(groups.replica):
            # The batch-invariant engine exists on every rank, for the stream. All else is done by the leader's alone.
            engine = None
        # A group of its own: collectives of the saving thread must not meet those of the main thread.
        saves_in_background = config.checkpoint.async_save or config.checkpoint.save_every_minutes is not None
        background = setup.new_background_group(world) if saves_in_background else None
        session = Session(
            config=config,
            inputs=inputs,
            trainer=trainer,
            groups=groups,
            engine=engine,
            teacher=teacher,
            stream=stream,
            gpus=build_gpus(config.rollout, trainer, publisher),
            evaluator=Evaluator(
                config, inputs.eval_prompts, stream, groups, dp=inputs.layout.dp, dp_rank=trainer.dp_rank
            ),
            records=Records(config, inputs.layout, groups, console, started),
            recorder=StepRecorder(config.run, config.log, config.loss, trainer, groups, inputs.tokenizer),
            checkpoints=Checkpoints(
                config,
                inputs,
                trainer,
                stream,
                has_engine=engine is not None,
                background=background,
                say=console.print,
                contents=contents.contents,
                # A server that is not reachable at this start is compared at a later one.
                served={**({} if point is None else point.served), **served.models},
            ),
            resume_point=point,
            contents=contents.contents,
            state=RunState(guard=GuardState.from_config(config.rollout, config.train)),
            lock=open_run.lock,
        )
        parts.callback(session.records.close)
        parts.callback(publisher.close)
        parts.callback(stream.close)  # closed before the scorer, which the stream may still use
        if engine is not None:
            parts.callback(engine.close)
        parts.callback(session.checkpoints.close)
        yield session
    finally:
        watchdog.close()
        console.finish()
        parts.close()
        setup.shutdown_megatron()


def _set_damaged_logs_aside(folder: Path) -> list[str]:
    """Take damaged lines out of the run's logs, and return warnings."""
    checks = {"metrics.jsonl": metric_problem, SAMPLES: sample_problem}
    return [note for name, check in checks.items() if (note := set_damaged_lines_aside(folder / name, check))]


def _missing_records(folder: Path, step: int) -> str:
    """Return a note if ``metrics.jsonl`` lacks steps that the resumed checkpoint has. Empty if it lacks none."""
    recorded = {record["step"] for record in read_metrics(folder / "metrics.jsonl")}
    missing = sorted(set(range(1, step + 1)) - recorded)
    if not missing:
        return ""
    return (
        f"warning  {folder / 'metrics.jsonl'} has no record of {len(missing)} steps up to step {step}, from "
        f"step {missing[0]} on: it was deleted or cut. The run continues, and these records stay missing"
    )


def _find_sharing(config: Config, platform: Platform, world: dist.ProcessGroup, *, tied: bool) -> MemorySharing | None:
    """Return the GPU memory that trainer and servers share. None for other methods than ``ipc``."""
    rollout = config.rollout
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
        platform=platform,
        world=world,
        tied=tied,
    )


def build_groups(run: RunConfig, inputs: ModelInputs, platform: Platform, world: dist.ProcessGroup) -> ParallelGroups:
    """Initialize Megatron with the layout, seed and timeouts of the run; a collective of all ranks."""
    from megatron_dppo.mcore.setup import initialize_megatron

    return initialize_megatron(
        inputs.layout,
        platform,
        seed=run.seed,
        timeout_minutes=run.timeout_minutes,
        wait_minutes=run.wait_minutes,
        world=world,
    )


def build_trainer(
    config: Config, inputs: ModelInputs, groups: ParallelGroups, platform: Platform, phase: Literal["warmup", "rl"]
) -> PolicyTrainer:
    """Return a trainer for one phase.

    Args:
        config: Configuration of the run.
        inputs: Model and layout.
        groups: Parallel groups of this rank.
        platform: Device of this rank.
        phase: ``warmup`` starts from ``model.path`` or random weights; ``rl`` from the warmed-up weights, if any.
    """
    from megatron_dppo.policy.trainer import PolicyTrainer

    is_warmed_up = phase == "rl" and config.warmup.num_steps > 0
    optimizer: OptimizerConfig = config.warmup.optimizer if phase == "warmup" else config.optimizer
    weights: WeightSource
    if is_warmed_up or not config.model.random_init:
        weights = FolderWeights(_base_folder(config) if is_warmed_up else config.model.path)
    else:
        weights = DictWeights(stream_model(build_hf_model(inputs.hf_config, torch.float32, seed=config.run.seed)))
    reference: WeightSource | None = None
    if phase == "rl" and config.needs_reference:
        if config.model.reference_path:
            reference = FolderWeights(config.model.reference_path)
        elif not config.lora.rank:  # with LoRA the reference is the base model without its adapters
            reference = weights
    return PolicyTrainer(
        model=config.model,
        lora=config.lora,
        parallel=config.parallel,
        train=config.train,
        rollout=config.rollout,
        seed=config.run.seed,
        hf_config=inputs.hf_config,
        weights=weights,
        reference=reference,
        layout=inputs.layout,
        groups=groups,
        platform=platform,
        optimizer=optimizer,
        total_steps=config.warmup.num_steps if phase == "warmup" else config.run.num_steps,
        noise=config.train.layer_noise if phase == "rl" else None,
    )


def _build_stream(
    config: Config,
    inputs: Inputs,
    groups: ParallelGroups,
    trainer: PolicyTrainer,
    engine: RolloutEngine | None,
    scorer: RewardScorer,
) -> RolloutScheduler:
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


def _base_folder(config: Config) -> Path:
    """Return the folder of the warmed-up model."""
    return Path(config.run.output_dir) / "base"


def warmup_from_config(config: Config) -> Warmup:
    """Return the warm-up that the configuration describes."""
    return Warmup(
        model=config.model,
        settings=config.warmup,
        seed=config.run.seed,
        micro_batch_tokens=config.train.micro_batch_tokens,
    )


def _build_policy(
    config: Config, inputs: Inputs, groups: ParallelGroups, platform: Platform, console: Console, stop: StopSignal
) -> tuple[PolicyTrainer, MegatronTeacher | TeacherServers | None]:
    """Warm up unless that is done, then build the policy and the teacher; a collective of all ranks."""
    from megatron_dppo.mcore.setup import seed_random_states

    # Colocated servers give up their GPU memory before a model is built.
    for note in free_gpus(config.rollout, groups.world):
        console.print(f"servers  {note}")
    base = _base_folder(config)
    warmup = warmup_from_config(config)
    checkpoints = checkpoints_folder(Path(config.run.output_dir))
    if inputs.warmup_data is not None and not is_warm(base, warmup):
        steps = config.warmup.num_steps
        run_on_leader(lambda: require_space(base, 4 * inputs.num_parameters, "the warmed-up model"), groups.world)
        console.print(f"warm-up  {steps} supervised steps of {config.warmup.batch_size} samples -> {base}")
        console.start("warm-up", steps)

        def report(step: int, loss: float) -> None:
            console.advance()
            if step % max(1, steps // 8) == 0 or step == steps - 1:
                console.print(f"warm-up step {step + 1}/{steps}  loss {loss:.3f}")

        trainer = build_trainer(config, inputs, groups, platform, "warmup")
        run_warmup(
            trainer,
            inputs.warmup_data,
            warmup,
            checkpoints=checkpoints,
            resume=config.checkpoint,
            report=report,
            stop=stop,
        )
        console.finish()
        # The marker is written after the weights: an interrupted export is repeated.
        export_hf(trainer, inputs, config.model, base, torch.float32)
        run_on_leader(lambda: _mark_warm(base, warmup, checkpoints) if dist.get_rank() == 0 else None, groups.world)
        if stop.requested():
            raise Stopped(f"by {stop.name} after the warm-up. Rerun the same command to train the warmed-up model")
        # The warmed-up model is on disk: until the training begins a signal may end the process at once again.
        stop.deferring = False
    # The teacher is loaded first, while there is no policy beside it on the device.
    teacher = build_teacher(config.distillation, config.model, config.rollout.temperature, inputs, groups, platform)
    # A warm-up uses random numbers, a start that finds its result does not. Both continue from the same states.
    seed_random_states(config.run.seed)
    return build_trainer(config, inputs, groups, platform, "rl"), teacher


def _mark_warm(base: Path, warmup: Warmup, checkpoints: Path) -> None:
    with disk_errors(base, "the warm-up's marker"):
        mark_warm(base, warmup, checkpoints)
