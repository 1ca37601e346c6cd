"""Everything a run needs, built in the order in which things can fail: inputs first, processes after."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_dppo.carried import Carry
from megatron_dppo.config import Config, OptimizerConfig
from megatron_dppo.config_io import dump_toml
from megatron_dppo.engines import build_engine, build_publisher, connect_servers, generate_function
from megatron_dppo.errors import ConfigError
from megatron_dppo.hf import (
    FolderWeights,
    build_hf_model,
    drain,
    save_hf_folder,
    stream_model,
)
from megatron_dppo.inputs import Inputs, read_inputs
from megatron_dppo.layout import describe
from megatron_dppo.metrics import MetricsWriter
from megatron_dppo.parallel.objects import is_leader
from megatron_dppo.platform import Platform, pin_threads
from megatron_dppo.prefetch import Prefetch, describe_batches, load_batches, save_batches, why_unusable
from megatron_dppo.report.console import Console
from megatron_dppo.resume import ResumePoint, find_resume_point, layout_identity, run_identity
from megatron_dppo.rewards.build import build_scorer
from megatron_dppo.rewards.scorer import RewardScorer
from megatron_dppo.rollout.engine import RolloutEngine
from megatron_dppo.warmup import is_warm, mark_warm, run_warmup

if TYPE_CHECKING:
    from megatron_dppo.parallel.groups import ParallelGroups
    from megatron_dppo.publish import Publisher
    from megatron_dppo.trainer import PolicyTrainer


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
    prefetch: Prefetch
    console: Console
    writer: MetricsWriter | None
    """None on all ranks but 0."""
    started: float
    """``time.time()`` at the start of the program"""
    step: int = 0
    """rollout steps done"""
    cursor: int = 0
    """prompts taken from the stream"""
    skipped_in_a_row: int = 0
    answers_before: list[dict[str, Any]] = field(default_factory=list)
    carry: Carry = field(default_factory=Carry)
    """groups that were stopped and go on in the next step"""
    best: tuple[float, int] | None = None
    """highest evaluation accuracy after training began, and its step"""

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
    def checkpoint_folder(self) -> Path:
        """Where its checkpoints are."""
        return self.folder / "checkpoints"


@contextmanager
def open_session(config: Config) -> Iterator[Session]:
    """Join the other ranks, warm up if asked, build or resume the policy; close everything at the end."""
    started = time.time()
    world_size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    inputs = read_inputs(config, world_size)
    servers, function = connect_servers(config), generate_function(config)
    scorer = build_scorer(config)
    platform = Platform.detect(int(os.environ.get("LOCAL_RANK", "0")))
    pin_threads(config.run.threads_per_rank, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))

    # Megatron is imported from here on: the shims must come first, the checks of its config before any process group.
    from megatron_dppo.mcore.compat import apply_shims

    apply_shims(platform)
    from megatron_dppo.mcore import model, setup

    model.checked_overrides(config.model.transformer, router_replay=config.train.router_replay != "off")
    setup.start_process_group(platform, config.run.timeout_minutes)
    console = Console(enabled=rank == 0 and config.log.progress)
    session = None
    try:
        _prepare_folder(config, rank)
        point = find_resume_point(config, inputs)
        console.say(f"{describe(inputs.layout, config)}\n{inputs.data_summary}")
        groups = setup.initialize_megatron(
            inputs.layout, platform, seed=config.run.seed, timeout_minutes=config.run.timeout_minutes
        )
        trainer = _build_policy(config, inputs, groups, platform, console)
        engine = build_engine(config, inputs, trainer, platform, servers, function)
        publisher = build_publisher(config, inputs, trainer, engine, platform)
        prefetch = Prefetch(config.train.max_staleness, platform.device)
        session = Session(config, inputs, trainer, groups, engine, publisher, scorer, prefetch, console, None, started)
        if point is not None:
            _restore(session, point)
        if rank == 0:
            session.writer = _open_writer(session)
        yield session
    finally:
        console.finish()
        if session is not None:
            session.prefetch.close()  # before the scorer, which it may still use
            if session.engine is not None:
                session.engine.close()
            session.publisher.close()
            if session.writer is not None:
                session.writer.close()
        scorer.close()
        setup.shutdown_megatron()


def _prepare_folder(config: Config, rank: int) -> None:
    """Create the output folder, or refuse one that belongs to something else; every rank gets the same verdict."""
    from megatron_dppo.mcore.checkpoint import checkpoints

    folder = Path(config.run.output_dir)
    verdict: list[str] = [""]
    if rank == 0:
        ours = (folder / "config.toml").is_file()
        if config.run.overwrite and folder.exists() and any(folder.iterdir()) and not ours:
            verdict[0] = f"run.overwrite = true, but {folder} is not the folder of a run (it has no config.toml)"
        elif config.run.overwrite and ours:
            shutil.rmtree(folder)
        elif config.checkpoint.resume == "never" and checkpoints(folder / "checkpoints"):
            verdict[0] = (
                f"{folder} already holds a run and checkpoint.resume = 'never'; choose another run.output_dir, or set "
                "run.overwrite = true to delete that run"
            )
        if not verdict[0]:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.toml").write_text(dump_toml(config), encoding="utf-8")
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(verdict, src=0)
    if verdict[0]:
        raise ConfigError(verdict[0])


def _trainer(config: Config, inputs: Inputs, groups: ParallelGroups, platform: Platform, phase: str) -> PolicyTrainer:
    """A trainer for one phase: ``warmup`` from random weights or the folder's, ``rl`` from the warmed-up ones."""
    from megatron_dppo.trainer import DictWeights, PolicyTrainer

    warm = phase == "rl" and config.warmup.num_steps > 0
    optimizer: OptimizerConfig = config.warmup.optimizer if phase == "warmup" else config.optimizer
    if warm or not config.model.random_init:
        weights: Any = FolderWeights(_base_folder(config) if warm else config.model.path)
    else:
        weights = DictWeights(stream_model(build_hf_model(inputs.hf_config, torch.float32, seed=config.run.seed)))
    reference: Any = None
    if phase == "rl" and "reference_logprobs" in config.loss.required_inputs:
        reference = FolderWeights(config.model.reference_path) if config.model.reference_path else weights
    return PolicyTrainer(
        config=config,
        hf_config=inputs.hf_config,
        weights=weights,
        reference=reference,
        layout=inputs.layout,
        groups=groups,
        platform=platform,
        optimizer=optimizer,
        total_steps=config.warmup.num_steps if phase == "warmup" else config.run.num_steps,
    )


def _base_folder(config: Config) -> Path:
    return Path(config.run.output_dir) / "base"


def _build_policy(
    config: Config, inputs: Inputs, groups: ParallelGroups, platform: Platform, console: Console
) -> PolicyTrainer:
    base = _base_folder(config)
    if inputs.warmup_data is not None and not is_warm(base, config):
        steps = config.warmup.num_steps
        console.say(f"warm-up  {steps} supervised steps of {config.warmup.batch_size} samples -> {base}")
        console.start("warm-up", steps)

        def report(step: int, loss: float) -> None:
            console.advance()
            if step % max(1, steps // 8) == 0 or step == steps - 1:
                console.say(f"warm-up step {step + 1}/{steps}  loss {loss:.3f}")

        trainer = _trainer(config, inputs, groups, platform, "warmup")
        run_warmup(trainer, inputs.warmup_data, config, report)
        console.finish()
        export_hf(trainer, config, base, torch.float32)
        if dist.get_rank() == 0:
            mark_warm(base, config)
        dist.barrier()
    return _trainer(config, inputs, groups, platform, "rl")


def export_hf(trainer: PolicyTrainer, config: Config, target: Path, dtype: torch.dtype) -> None:
    """Write the current weights as a Hugging Face folder; a collective, rank 0 writes."""
    weights = trainer.export_weights()
    if dist.get_rank() == 0:
        save_hf_folder(target, config.model.path, weights, dtype)
    else:
        drain(weights)
    dist.barrier()


def _open_writer(session: Session) -> MetricsWriter:
    config = session.config
    return MetricsWriter(
        session.folder,
        config.model_dump(),
        tensorboard=config.log.tensorboard,
        wandb_project=config.log.wandb_project,
        resumed_step=session.step or None,
    )


def _restore(session: Session, point: ResumePoint) -> None:
    """Put the run back to where the checkpoint was written."""
    state = session.trainer.load(point.checkpoint, same_layout=point.same_layout)
    session.step, session.cursor = state["step"], state["cursor"]
    session.skipped_in_a_row, session.answers_before = state["skipped_in_a_row"], state["answers_before"]
    session.best = tuple(state["best"]) if state["best"] else None
    version = session.trainer.policy_version
    session.console.say(f"resumed  {point.checkpoint} (step {session.step}, policy version {version})")
    if not point.same_layout:
        session.console.say("         on another layout: the same curve up to rounding, not bit for bit")
    _restore_prefetch(session, state, point.checkpoint)
    carried = session.carry.restore(state.get("carried", []), session.inputs.layout.dp)
    if carried and not session.config.rollout.abort_slowest:
        session.console.say(f"         {carried} carried prompts are given up: rollout.abort_slowest is off now")


def _restore_prefetch(session: Session, state: dict[str, Any], checkpoint: Path) -> None:
    """Take the rollouts that were sampled ahead from the checkpoint, or their prompts back into the stream."""
    described, dp = state.get("prefetch", {"batches": []}), session.inputs.layout.dp
    if not described["batches"]:
        return
    if problem := why_unusable(described, state["config"], session.config, dp):
        session.cursor = described["batches"][0]["cursor"]
        session.console.say(f"         the rollouts that were sampled ahead are sampled again: {problem}")
        return
    prompt = session.inputs.train_prompts.__getitem__
    session.prefetch.restore(load_batches(described, session.trainer.dp_rank, checkpoint, prompt))


def save_session(session: Session) -> Path:
    """Write a checkpoint of this step; nothing may run in the background."""
    batches, groups = session.prefetch.ready(), session.groups
    # One rank writes for each data-parallel rank: the one whose engine sampled.
    writes = is_leader(groups.replica)
    state = {
        "step": session.step,
        "cursor": session.cursor,
        "skipped_in_a_row": session.skipped_in_a_row,
        "answers_before": session.answers_before,
        "best": session.best,
        "carried": session.carry.groups,
        "prefetch": describe_batches(batches, session.inputs.layout.dp),
        "identity": run_identity(session.config, session.inputs),
        "layout": layout_identity(session.config, session.inputs),
        "config": session.config.model_dump(mode="json"),
    }
    config = session.config.checkpoint
    best = session.best[1] if config.keep_best and session.best is not None else None
    also = partial(save_batches, batches if writes else [], session.trainer.dp_rank)
    return session.trainer.save(session.checkpoint_folder, session.step, state, config.keep, best, also)
