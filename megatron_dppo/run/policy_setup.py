"""The policy of a run on this rank: warmed up, in its parallel groups, with its optimizer and teacher."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist

from megatron_dppo.config.optimizer import OptimizerConfig
from megatron_dppo.config.run import RunConfig
from megatron_dppo.config.schema import Config
from megatron_dppo.config.train import LayerNoiseConfig
from megatron_dppo.engines.teacher import TeacherServers
from megatron_dppo.files import disk_errors, require_space
from megatron_dppo.hf.folder import DictWeights, build_hf_model, stream_model
from megatron_dppo.hf.weight_files import FolderWeights
from megatron_dppo.mcore.checkpoint.folder import checkpoints_folder
from megatron_dppo.parallel.objects import run_on_leader
from megatron_dppo.parallel.platform import Platform
from megatron_dppo.process.stop_signal import Stopped, StopSignal
from megatron_dppo.report.console import Console
from megatron_dppo.run.export import export_hf
from megatron_dppo.run.gpus import free_gpus
from megatron_dppo.run.warmup import Warmup, is_warm, mark_warm, run_warmup
from megatron_dppo.setup.inputs import Inputs, ModelInputs
from megatron_dppo.setup.teacher_setup import build_teacher

if TYPE_CHECKING:
    from megatron_dppo.hf.weight_files import WeightSource
    from megatron_dppo.mcore.model_parts import Placement
    from megatron_dppo.mcore.teacher_model import MegatronTeacher
    from megatron_dppo.parallel.groups import ParallelGroups
    from megatron_dppo.policy.trainer import PolicyTrainer


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
    from megatron_dppo.mcore.model_parts import Placement

    is_warmed_up = phase == "rl" and config.warmup.num_steps > 0
    optimizer: OptimizerConfig = config.warmup.optimizer if phase == "warmup" else config.optimizer
    weights: WeightSource
    if is_warmed_up or not config.model.random_init:
        weights = FolderWeights(base_folder(config.run) if is_warmed_up else config.model.path)
    else:
        weights = DictWeights(stream_model(build_hf_model(inputs.hf_config, torch.float32, seed=config.run.seed)))
    reference: WeightSource | None = None
    if phase == "rl" and config.needs_reference:
        if config.model.reference_path:
            reference = FolderWeights(config.model.reference_path)
        elif not config.lora.rank:  # with LoRA the reference is the base model without its adapters
            reference = weights
    return trainer_from_config(
        config,
        Placement(inputs.hf_config, inputs.layout, groups, platform),
        weights,
        reference,
        optimizer=optimizer,
        total_steps=config.warmup.num_steps if phase == "warmup" else config.run.num_steps,
        noise=config.train.layer_noise if phase == "rl" else None,
    )


def trainer_from_config(
    config: Config,
    placement: Placement,
    weights: WeightSource,
    reference: WeightSource | None = None,
    *,
    optimizer: OptimizerConfig | None = None,
    total_steps: int = 1,
    noise: LayerNoiseConfig | None = None,
) -> PolicyTrainer:
    """Return a trainer with the sections of a configuration; a collective of all ranks.

    Args:
        config: Configuration.
        placement: Model, ranks and device.
        weights: Initial weights.
        reference: See ``build_model_parts``.
        optimizer: Learning rate and schedule. None is that of the configuration.
        total_steps: Length of the learning-rate schedule.
        noise: See ``PolicyTrainer``.
    """
    from megatron_dppo.mcore.model_parts import build_model_parts
    from megatron_dppo.policy.trainer import PolicyTrainer

    parts = build_model_parts(
        config.model, config.lora, config.train, config.rollout, placement, weights, reference, seed=config.run.seed
    )
    optimizer = optimizer or config.optimizer
    return PolicyTrainer(parts, config.parallel, config.train, optimizer, total_steps=total_steps, noise=noise)


def base_folder(run: RunConfig) -> Path:
    """Return the folder of the warmed-up model."""
    return Path(run.output_dir) / "base"


def warmup_from_config(config: Config) -> Warmup:
    """Return the warm-up that the configuration describes."""
    return Warmup(
        model=config.model,
        settings=config.warmup,
        seed=config.run.seed,
        micro_batch_tokens=config.train.micro_batch_tokens,
    )


def build_policy(
    config: Config, inputs: Inputs, groups: ParallelGroups, platform: Platform, console: Console, stop: StopSignal
) -> tuple[PolicyTrainer, MegatronTeacher | TeacherServers | None]:
    """Warm up unless that is done, then build the policy and the teacher; a collective of all ranks."""
    from megatron_dppo.mcore.setup import seed_random_states

    # Colocated servers give up their GPU memory before a model is built.
    for note in free_gpus(config.rollout, groups.world):
        console.print(f"servers  {note}")
    base = base_folder(config.run)
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
