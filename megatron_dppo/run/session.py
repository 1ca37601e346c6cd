"""Everything a run needs, built in the order in which things can fail: inputs first, processes after."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_dppo.config.layout import describe
from megatron_dppo.config.optimizer import OptimizerConfig
from megatron_dppo.config.schema import Config
from megatron_dppo.files.disk import disk_errors, require_space
from megatron_dppo.hf import DictWeights, FolderWeights, build_hf_model, stream_model
from megatron_dppo.parallel.objects import agreed, from_each, is_leader
from megatron_dppo.platform import Platform, pin_threads
from megatron_dppo.policy.warmup import Warmup, is_warm, mark_warm, run_warmup
from megatron_dppo.report.alarms import Alarms
from megatron_dppo.report.console import Console
from megatron_dppo.report.metrics import MetricsWriter
from megatron_dppo.rewards.scorer import RewardScorer
from megatron_dppo.rollout.engine import RolloutEngine
from megatron_dppo.rollout.teacher import TeacherServers
from megatron_dppo.run.engines import (
    build_engine,
    build_publisher,
    connect_servers,
    open_function,
    open_scorer,
    rollout_params,
)
from megatron_dppo.run.export import export_hf
from megatron_dppo.run.folder import open_folder
from megatron_dppo.run.gpus import Gpus, free_gpus, gpus_of
from megatron_dppo.run.inputs import Inputs, ModelInputs, with_num_steps
from megatron_dppo.run.preflight import Start, find_problems, require_inputs
from megatron_dppo.run.resume import ResumePoint, find_resume_point
from megatron_dppo.run.sharing import find_sharing
from megatron_dppo.run.stream.needed import Needed
from megatron_dppo.run.stream.stream import Stream
from megatron_dppo.run.teacher import build_teacher
from megatron_dppo.serving.command import gpus_per_server, server_options
from megatron_dppo.supervision.stop_signal import Stopped, StopSignal
from megatron_dppo.supervision.watchdog import Watchdog

if TYPE_CHECKING:
    from megatron_dppo.mcore.checkpoint import Save
    from megatron_dppo.mcore.teacher import Teacher
    from megatron_dppo.parallel.groups import ParallelGroups
    from megatron_dppo.policy.trainer import PolicyTrainer
    from megatron_dppo.run.evaluation import Evaluation
    from megatron_dppo.weights.handles import Sharing
    from megatron_dppo.weights.publish import Publisher


@dataclass
class Session:
    """One rank's view of a run."""

    config: Config
    inputs: Inputs
    trainer: PolicyTrainer
    groups: ParallelGroups
    engine: RolloutEngine | None
    """None on ranks that get their rollouts from the leader of their model-parallel group."""
    publisher: Publisher
    scorer: RewardScorer
    stream: Stream
    """where the rollouts come from"""
    console: Console
    writer: MetricsWriter | None
    """None on all ranks but 0."""
    started: float
    """``time.time()`` at the start of the program"""
    step: int = 0
    """rollout steps done"""
    alarms: Alarms = field(init=False)
    """signs that nothing is learned"""
    skipped_in_a_row: int = 0
    answers_before: list[dict[str, Any]] = field(default_factory=list)
    best: tuple[float, int] | None = None
    """highest evaluation accuracy after training began, and its step"""
    evaluation: Evaluation | None = None
    """the one that runs beside training"""
    evaluation_due: bool = False
    """one ran beside training when the checkpoint was written, and is to be repeated"""
    saving: Save | None = None
    """the newest checkpoint, which may still be written"""
    save_group: dist.ProcessGroup | None = None
    """all ranks over the CPU, for saves in the background; None = they are not"""
    teacher: Teacher | TeacherServers | None = None
    """in the trainer, or behind servers"""
    resume_point: ResumePoint | None = None
    """where ``session_state.begin`` takes the run up again"""
    gpus: Gpus = field(init=False)
    """the publisher's and the trainer's turns on them"""

    def __post_init__(self) -> None:
        self.gpus = gpus_of(self.config, self.trainer, self.publisher)
        self.alarms = Alarms(rewarded=not self.config.distillation.is_on)

    def take_gpus(self) -> None:
        """The trainer's turn on the GPUs."""
        for note in self.gpus.for_training():
            self.console.say(f"servers  {note}")

    @property
    def folder(self) -> Path:
        """Where the run writes."""
        return Path(self.config.run.output_dir)

    def is_new_best(self, accuracy: float | None) -> bool:
        """Remember an evaluation; True when it is the best so far and such checkpoints are kept."""
        if accuracy is None or (self.best is not None and accuracy <= self.best[0]):
            return False
        self.best = (accuracy, self.step)
        return self.config.checkpoint.keep_best

    @property
    def is_solved(self) -> bool:
        """Whether an evaluation has reached ``eval.stop_at_accuracy``."""
        goal = self.config.eval.stop_at_accuracy
        return goal is not None and self.best is not None and self.best[0] >= goal

    @property
    def checkpoint_folder(self) -> Path:
        """Where its checkpoints are."""
        return self.folder / "checkpoints"


@contextmanager
def open_session(config: Config, stop: StopSignal) -> Iterator[Session]:
    """Join the other ranks, warm up if asked, build the policy; close everything at the end."""
    started = time.time()
    start = Start(config, int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0")))
    errors = find_problems(start)
    if start.world_size == 1:
        require_inputs(start, errors)
    platform = Platform.detect(int(os.environ.get("LOCAL_RANK", "0")))
    pin_threads(config.run.threads_per_rank, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))

    # Megatron is imported from here on: the shims must come first.
    from megatron_dppo.mcore.compat import apply_shims

    apply_shims(platform)
    from megatron_dppo.mcore import setup

    setup.start_process_group(platform, config.run.wait_minutes)
    console = Console(enabled=start.rank == 0 and config.log.progress, evaluated=config.reward.evaluated)
    watchdog = Watchdog(config.run)
    session, scorer, open_parts = None, None, ExitStack()
    try:
        world = setup.host_world(config.run.wait_minutes)
        inputs = require_inputs(start, errors, world)
        config = with_num_steps(config, inputs)
        sharing = _find_sharing(config, platform, world, tied=inputs.hf_config.tie_word_embeddings)
        servers, scorer = connect_servers(config), open_scorer(config)
        function = open_parts.enter_context(open_function(config))
        for note in open_parts.enter_context(open_folder(config)):
            console.say(note)
        watchdog.start()
        point = find_resume_point(config, inputs)
        console.say("\n".join([describe(inputs.layout, config.batch), inputs.data_summary, *start.notes]))
        groups = build_groups(config, inputs, platform, world)
        trainer, teacher = _build_policy(config, inputs, groups, platform, console, stop)
        engine = build_engine(config, inputs, trainer, platform, servers, function)
        publisher = build_publisher(config, inputs, trainer, engine, platform, sharing)
        stream = _stream(config, inputs, groups, trainer, engine, scorer)
        if not is_leader(groups.replica):
            engine = None  # one that all ranks of a replica have is known to the stream; the rest is the leader's
        session = Session(config, inputs, trainer, groups, engine, publisher, scorer, stream, console, None, started)
        session.resume_point, session.teacher = point, teacher
        if config.checkpoint.async_save:
            session.save_group = setup.host_world(config.run.wait_minutes)
        yield session
    finally:
        watchdog.close()
        console.finish()
        if session is not None:
            _close(session)
        if scorer is not None:
            scorer.close()
        open_parts.close()  # the lock of the folder: after all that writes there
        setup.shutdown_megatron()


def _close(session: Session) -> None:
    if session.saving is not None:
        session.saving.join()  # also when the run ends by an error of something else
    if session.engine is not None:
        session.engine.close()
    session.stream.close()  # before the scorer, which it may still use
    session.publisher.close()
    if session.writer is not None:
        session.writer.close()


def _find_sharing(config: Config, platform: Platform, world: dist.ProcessGroup, *, tied: bool) -> Sharing | None:
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
        gpus_per_server=gpus_per_server(rollout.engine, options),
        platform=platform,
        world=world,
        tied=tied,
    )


def build_groups(config: Config, inputs: ModelInputs, platform: Platform, world: dist.ProcessGroup) -> ParallelGroups:
    """Megatron's groups of the layout, with the seed and the limits of the run; a collective."""
    from megatron_dppo.mcore.setup import initialize_megatron

    return initialize_megatron(
        inputs.layout,
        platform,
        seed=config.run.seed,
        timeout_minutes=config.run.timeout_minutes,
        wait_minutes=config.run.wait_minutes,
        world=world,
    )


def build_trainer(
    config: Config, inputs: ModelInputs, groups: ParallelGroups, platform: Platform, phase: str
) -> PolicyTrainer:
    """A trainer for one phase: ``warmup`` from random weights or the folder's, ``rl`` from the warmed-up ones."""
    from megatron_dppo.policy.trainer import PolicyTrainer

    warm = phase == "rl" and config.warmup.num_steps > 0
    optimizer: OptimizerConfig = config.warmup.optimizer if phase == "warmup" else config.optimizer
    if warm or not config.model.random_init:
        weights: Any = FolderWeights(_base_folder(config) if warm else config.model.path)
    else:
        weights = DictWeights(stream_model(build_hf_model(inputs.hf_config, torch.float32, seed=config.run.seed)))
    reference: Any = None
    if phase == "rl" and config.needs_reference:
        own = None if config.lora.rank else weights  # with adapters the base model is there
        reference = FolderWeights(config.model.reference_path) if config.model.reference_path else own
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


def _stream(
    config: Config,
    inputs: Inputs,
    groups: ParallelGroups,
    trainer: PolicyTrainer,
    engine: RolloutEngine | None,
    scorer: RewardScorer,
) -> Stream:
    needed = from_each(Needed(trainer.is_last_stage, trainer.replayed_layers), groups.replica)
    return Stream(
        rollout=config.rollout,
        params=rollout_params(config),
        prompts=inputs.train_prompts,
        groups=groups,
        dp_rank=trainer.dp_rank,
        dp=inputs.layout.dp,
        engine=engine,
        scorer=scorer,
        num_steps=config.run.num_steps,
        max_staleness=config.train.max_staleness,
        needed=needed,
        leads=is_leader(groups.replica),
    )


def _base_folder(config: Config) -> Path:
    return Path(config.run.output_dir) / "base"


def _checkpoints(config: Config) -> Path:
    return Path(config.run.output_dir) / "checkpoints"


def warmup_for(config: Config) -> Warmup:
    """Return the warm-up of a run."""
    return Warmup(
        model=config.model,
        settings=config.warmup,
        seed=config.run.seed,
        micro_batch_tokens=config.train.micro_batch_tokens,
    )


def _build_policy(
    config: Config, inputs: Inputs, groups: ParallelGroups, platform: Platform, console: Console, stop: StopSignal
) -> tuple[PolicyTrainer, Teacher | TeacherServers | None]:
    from megatron_dppo.mcore.setup import seed_random_states

    for note in free_gpus(config, groups.world):
        console.say(f"servers  {note}")
    base = _base_folder(config)
    warmup = warmup_for(config)
    if inputs.warmup_data is not None and not is_warm(base, warmup):
        steps = config.warmup.num_steps
        agreed(lambda: require_space(base, 4 * inputs.num_parameters, "the warmed-up model"), groups.world)
        console.say(f"warm-up  {steps} supervised steps of {config.warmup.batch_size} samples -> {base}")
        console.start("warm-up", steps)

        def report(step: int, loss: float) -> None:
            console.advance()
            if step % max(1, steps // 8) == 0 or step == steps - 1:
                console.say(f"warm-up step {step + 1}/{steps}  loss {loss:.3f}")

        trainer = build_trainer(config, inputs, groups, platform, "warmup")
        run_warmup(
            trainer,
            inputs.warmup_data,
            warmup,
            checkpoints=_checkpoints(config),
            resume=config.checkpoint,
            report=report,
            stop=stop,
        )
        console.finish()
        export_hf(trainer, inputs, config, base, torch.float32)
        agreed(lambda: _mark_warm(base, warmup, _checkpoints(config)) if dist.get_rank() == 0 else None, groups.world)
        if stop.requested():
            raise Stopped(f"by {stop.name} after the warm-up; the same command goes on with the warmed-up model")
        stop.deferring = False
    teacher = build_teacher(config, inputs, groups, platform)  # before there is a policy beside it on the device
    # A start that finds warmed-up weights drew no random numbers for them: both go on from the same states.
    seed_random_states(config.run.seed)
    return build_trainer(config, inputs, groups, platform, "rl"), teacher


def _mark_warm(base: Path, warmup: Warmup, checkpoints: Path) -> None:
    with disk_errors(base, "the warm-up's marker"):
        mark_warm(base, warmup, checkpoints)
