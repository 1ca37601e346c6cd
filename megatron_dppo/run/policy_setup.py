"""The policy of a run on this rank: in its parallel groups, with its optimizer and teacher."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron_dppo.config.run import RunConfig
from megatron_dppo.config.schema import Config
from megatron_dppo.config.train import LayerNoiseConfig
from megatron_dppo.engines.teacher import TeacherServers
from megatron_dppo.hf.folder import DictWeights, build_hf_model, stream_model
from megatron_dppo.hf.weight_files import FolderWeights
from megatron_dppo.parallel.platform import Platform
from megatron_dppo.report.console import Console
from megatron_dppo.run.gpus import free_gpus
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


def build_trainer(config: Config, inputs: ModelInputs, groups: ParallelGroups, platform: Platform) -> PolicyTrainer:
    """Return the trainer of a run; a collective of all ranks.

    Args:
        config: Configuration of the run.
        inputs: Model and layout.
        groups: Parallel groups of this rank.
        platform: Device of this rank.
    """
    from megatron_dppo.mcore.model_parts import Placement

    weights: WeightSource
    if config.model.random_init:
        weights = DictWeights(stream_model(build_hf_model(inputs.hf_config, torch.float32, seed=config.run.seed)))
    else:
        weights = FolderWeights(config.model.path)
    reference: WeightSource | None = None
    if config.needs_reference:
        if config.model.reference_path:
            reference = FolderWeights(config.model.reference_path)
        elif not config.lora.rank:  # with LoRA the reference is the base model without its adapters
            reference = weights
    return trainer_from_config(
        config,
        Placement(inputs.hf_config, inputs.layout, groups, platform),
        weights,
        reference,
        total_steps=config.run.num_steps,
        noise=config.train.layer_noise,
    )


def trainer_from_config(
    config: Config,
    placement: Placement,
    weights: WeightSource,
    reference: WeightSource | None = None,
    *,
    total_steps: int = 1,
    noise: LayerNoiseConfig | None = None,
) -> PolicyTrainer:
    """Return a trainer with the sections of a configuration; a collective of all ranks.

    Args:
        config: Configuration.
        placement: Model, ranks and device.
        weights: Initial weights.
        reference: See ``build_model_parts``.
        total_steps: Length of the learning-rate schedule.
        noise: See ``PolicyTrainer``.
    """
    from megatron_dppo.mcore.model_parts import build_model_parts
    from megatron_dppo.policy.trainer import PolicyTrainer

    parts = build_model_parts(
        config.model, config.lora, config.train, config.rollout, placement, weights, reference, seed=config.run.seed
    )
    return PolicyTrainer(parts, config.parallel, config.train, config.optimizer, total_steps=total_steps, noise=noise)


def build_policy(
    config: Config, inputs: Inputs, groups: ParallelGroups, platform: Platform, console: Console
) -> tuple[PolicyTrainer, MegatronTeacher | TeacherServers | None]:
    """Build the policy and the teacher; a collective of all ranks."""
    from megatron_dppo.mcore.setup import seed_random_states

    # Colocated servers give up their GPU memory before a model is built.
    for note in free_gpus(config.rollout, groups.world):
        console.print(f"servers  {note}")
    # The teacher is loaded first, while there is no policy beside it on the device.
    teacher = build_teacher(config.distillation, config.model, config.rollout.temperature, inputs, groups, platform)
    # With and without a teacher the policy begins with the same random states.
    seed_random_states(config.run.seed)
    return build_trainer(config, inputs, groups, platform), teacher
