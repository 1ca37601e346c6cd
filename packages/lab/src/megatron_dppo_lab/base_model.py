"""Base models: supervised steps on the corpus of a task turn random weights into a Hugging Face folder.

``python -m megatron_dppo_lab.base_model CONFIG FOLDER`` is one training process of ``megatron-dppo base``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import tomli_w
import torch

from megatron_dppo.config.io import dump_toml, load_config
from megatron_dppo.config.layout import Layout, resolve_layout
from megatron_dppo.config.schema import Config
from megatron_dppo.data.chat import load_tokenizer
from megatron_dppo.errors import ConfigError
from megatron_dppo.hf.folder import DictWeights, build_hf_model, model_shape, read_hf_config, stream_model
from megatron_dppo.losses import SUPERVISED
from megatron_dppo.parallel.platform import Platform, pin_threads
from megatron_dppo.source_names import TASK
from megatron_dppo.types.model_folder import HfConfig
from megatron_dppo_lab.catalogue import base_settings
from megatron_dppo_lab.embedded_tasks import MODEL_TASKS, write_model_folder
from megatron_dppo_lab.grid import merged
from megatron_dppo_lab.supervised import SupervisedDataset

if TYPE_CHECKING:
    from megatron_dppo.policy.trainer import PolicyTrainer

Report = Callable[[int, int, float], None]
"""Called with the number of finished steps, that of all steps, and the loss."""


class BaseInputs(NamedTuple):
    """Model and data of the supervised training."""

    hf_config: HfConfig
    tokenizer: Any
    layout: Layout
    data: SupervisedDataset


def create_base(source: str, folder: Path, overrides: Sequence[str] = (), processes: int = 1) -> int:
    """Train a base model into ``folder``, and return 0 or the exit code of the training processes.

    Args:
        source: Embedded task (``task:NAME``), or a file whose rows have ``prompt`` and ``response``.
        folder: Folder to create.
        overrides: ``--section.key=value`` on top of the settings of the task. Without a model of the task,
            ``model.path`` must be among them.
        processes: Training processes to start on this machine, unless this is one of several of a launcher.

    Raises:
        UserError: See ``read_base_inputs``, or the folder cannot be written.
    """
    with tempfile.TemporaryDirectory() as work:
        config = _read_base_config(source, Path(work), overrides)
        # Problems are reported here, by one process for all.
        world_size = int(os.environ.get("WORLD_SIZE", processes))
        inputs = read_base_inputs(config, world_size)
        steps, batch_size = config.run.num_steps, config.rollout.prompts_per_step
        if os.environ.get("RANK", "0") == "0":
            print(f"base     {steps} supervised steps of {batch_size} samples -> {folder}", flush=True)
        if world_size == 1 or "WORLD_SIZE" in os.environ:
            train_base(config, inputs, folder, print_loss)
            return 0
        file = Path(work) / "base.toml"
        file.write_text(dump_toml(config), encoding="utf-8")
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
        return subprocess.run([*launcher, "-m", __name__, str(file), str(folder)]).returncode


def _read_base_config(source: str, work: Path, overrides: Sequence[str]) -> Config:
    """Return the configuration of ``train_base``. The model of an embedded task is written to ``work``."""
    values = base_settings(source)
    task = source.removeprefix(TASK)
    if source.startswith(TASK) and task in MODEL_TASKS:
        write_model_folder(task, work / "model")
        values = merged(values, {"model": {"path": str(work / "model")}})
    file = work / "defaults.toml"
    file.write_text(tomli_w.dumps(values), encoding="utf-8")
    return load_config(file, overrides)


def read_base_inputs(config: Config, world_size: int) -> BaseInputs:
    """Read the model's configuration, its tokenizer and the data.

    Raises:
        UserError: A file is missing or unusable, a sample is too long, or the layout does not fit.
    """
    source = config.data.train
    if not isinstance(source, str):
        raise ConfigError(f"data.train = {source!r}: expected one task or file with 'prompt' and 'response'")
    hf_config = read_hf_config(config.model.path)
    layout = resolve_layout(config.parallel, config.batch, world_size, model_shape(hf_config), config.model.transformer)
    tokenizer = load_tokenizer(config.model.path)
    data = SupervisedDataset(source, tokenizer, config.run.seed)
    data.check_lengths(hf_config.max_position_embeddings)
    return BaseInputs(hf_config, tokenizer, layout, data)


def train_base(config: Config, inputs: BaseInputs, target: Path, report: Report) -> None:
    """Train random weights and create the folder ``target``; a collective of all ranks.

    Args:
        config: ``run.num_steps`` updates of ``rollout.prompts_per_step`` pairs each, with ``[optimizer]``, from the
            weights of ``run.seed`` for ``model.path``, whose own weights are not read.
        inputs: See ``read_base_inputs``.
        target: Folder. It appears complete, and an older one of this name is replaced.
        report: Called after each step.

    Raises:
        UserError: The folder cannot be written.
    """
    platform = Platform.detect()
    pin_threads(config.run.threads_per_rank, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))

    # The shims must be applied before the first import of Megatron.
    from megatron_dppo.mcore.shims import apply_shims

    apply_shims(platform)
    from megatron_dppo.export.hf_folder import save_hf_folder
    from megatron_dppo.mcore import setup
    from megatron_dppo.mcore.model_parts import Placement
    from megatron_dppo.run.policy_setup import trainer_from_config

    setup.start_process_group(platform, config.run.wait_minutes)
    try:
        groups = setup.initialize_megatron(
            inputs.layout, platform, seed=config.run.seed, timeout_minutes=config.run.timeout_minutes
        )
        placement = Placement(inputs.hf_config, inputs.layout, groups, platform)
        random_weights = stream_model(build_hf_model(inputs.hf_config, torch.float32, seed=config.run.seed))
        trainer = trainer_from_config(config, placement, DictWeights(random_weights), total_steps=config.run.num_steps)
        train_supervised(trainer, inputs.data, config, report)
        save_hf_folder(target, config.model.path, trainer.export_weights(), torch.float32, group=groups.world)
    finally:
        setup.shutdown_megatron()


def train_supervised(trainer: PolicyTrainer, data: SupervisedDataset, config: Config, report: Report) -> None:
    """Run the supervised updates. Every data-parallel rank trains on its part of each batch.

    Args:
        trainer: Trainer whose optimizer has a schedule of ``run.num_steps``.
        data: Stream of samples.
        config: See ``train_base``.
        report: Called after each step.
    """
    batch_size = config.rollout.prompts_per_step
    share = batch_size // trainer.layout.dp
    for step in range(config.run.num_steps):
        first = step * batch_size + trainer.dp_rank * share
        samples = [data[i] for i in range(first, first + share)]
        trainer.optimizer.set_step(step)
        result = trainer.update(trainer.pack(samples, config.train.micro_batch_tokens).batches, SUPERVISED)
        report(step + 1, config.run.num_steps, result.metrics["loss"])


def print_loss(step: int, num_steps: int, loss: float) -> None:
    """Print about ten losses of a training, on one rank."""
    if os.environ.get("RANK", "0") == "0" and (step == 1 or step == num_steps or step % max(1, num_steps // 8) == 0):
        print(f"base     step {step}/{num_steps}  loss {loss:.3f}", flush=True)


if __name__ == "__main__":
    settings = load_config(sys.argv[1])
    train_base(settings, read_base_inputs(settings, int(os.environ["WORLD_SIZE"])), Path(sys.argv[2]), print_loss)
