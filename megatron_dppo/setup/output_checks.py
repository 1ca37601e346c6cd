"""Checks of the output folder and its free space. Nothing is created."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

from megatron_dppo.config.loss import LossConfig
from megatron_dppo.config.model import LoraConfig, ModelConfig
from megatron_dppo.config.rollout import RolloutConfig
from megatron_dppo.config.run import CheckpointConfig, RunConfig
from megatron_dppo.config.schema import Config
from megatron_dppo.config.train import TrainConfig
from megatron_dppo.errors import ConfigError, UserError
from megatron_dppo.files import existing_parent, folder_bytes, require_space
from megatron_dppo.hf.folder import adapter_sizes, routing_shape, weight_shapes
from megatron_dppo.mcore.checkpoint.folder import checkpoints_folder
from megatron_dppo.parallel.platform import DTYPES
from megatron_dppo.report.steps.files import estimate_step_bytes
from megatron_dppo.setup.inputs import ModelInputs
from megatron_dppo.setup.run_folder import RUN_FILES

_OPTIMIZER_BYTES = 12
"""Bytes of a parameter's fp32 copy and Adam's two moments in a checkpoint."""
_LOGS = 10_000_000
"""Bytes of metrics, samples and curves."""


def output_problems(run: RunConfig, rollout: RolloutConfig) -> Iterator[UserError]:
    """Yield problems of ``run.output_dir`` and of the folder of ``rollout.weight_sync``."""
    folders = {"run.output_dir": run.output_dir}
    if rollout.weight_sync.folder is not None:
        folders["rollout.weight_sync.folder"] = rollout.weight_sync.folder
    for key, text in folders.items():
        if problem := _find_folder_problem(Path(text)):
            yield ConfigError(f"{key} = {text!r}: {problem}")


def _find_folder_problem(folder: Path) -> str | None:
    """Return the reason why a folder cannot be created or written. None if it can."""
    if not str(folder) or "\0" in str(folder):
        return "not a path"
    try:
        parent = existing_parent(folder)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if not parent.is_dir():
        return f"{parent} is a file; choose a folder" if parent == folder.absolute() else f"{parent} is a file"
    if not os.access(parent, os.W_OK | os.X_OK):
        return f"{parent} cannot be written (no permission, or a read-only file system); choose another folder"
    return None


def checkpoint_bytes(model: ModelConfig, lora: LoraConfig, inputs: ModelInputs) -> int:
    """Estimate the bytes of one checkpoint: trained parameters, their fp32 copy and two moments."""
    return num_trained_parameters(lora, inputs) * (DTYPES[model.dtype].itemsize + _OPTIMIZER_BYTES)


def num_trained_parameters(lora: LoraConfig, inputs: ModelInputs) -> int:
    """Return the number of parameters that training changes."""
    if not lora.rank:
        return inputs.num_parameters
    return sum(adapter_sizes(weight_shapes(inputs.hf_config), lora).values())


def estimate_save_bytes(run: RunConfig, model: ModelConfig, lora: LoraConfig, inputs: ModelInputs) -> int:
    """Return the bytes that the next checkpoint needs: the size of the largest one, or an estimate before the first."""
    folder = checkpoints_folder(Path(run.output_dir))
    sizes = {path: folder_bytes(path) for path in folder.glob("step_*") if (path / "state.json").is_file()}
    return max(sizes.values(), default=checkpoint_bytes(model, lora, inputs))


def max_checkpoints(checkpoint: CheckpointConfig, num_steps: int) -> int:
    """Return the most checkpoints that exist at a time, with those by time."""
    if checkpoint.save_every_minutes is None:
        return _num_required_checkpoints(checkpoint, num_steps)
    # A checkpoint by time may follow each step.
    return min(num_steps, checkpoint.keep + 1) + checkpoint.keep_best


def _num_required_checkpoints(checkpoint: CheckpointConfig, num_steps: int) -> int:
    """Return the most checkpoints at a time without those by time, which are skipped if there is no space."""
    # The oldest checkpoint is deleted only when the next one is complete: one more than ``keep`` exist meanwhile.
    count = 1
    if checkpoint.save_every:
        count = min(math.ceil(num_steps / checkpoint.save_every), checkpoint.keep + 1)
    return count + checkpoint.keep_best


def run_bytes(config: Config, inputs: ModelInputs) -> int:
    """Estimate the peak disk usage of a run in bytes."""
    parameters = inputs.num_parameters
    checkpoint = config.checkpoint
    total = (
        _num_required_checkpoints(config.checkpoint, config.run.num_steps)
        * checkpoint_bytes(config.model, config.lora, inputs)
        + _LOGS
    )
    total += parameters * DTYPES[config.model.dtype].itemsize * checkpoint.export_hf
    total += num_trained_parameters(config.lora, inputs) * DTYPES[config.model.dtype].itemsize * (config.lora.rank > 0)
    if config.rollout.engine != "local" and config.rollout.weight_sync.method == "disk":
        total += 2 * parameters * DTYPES[config.rollout.dtype].itemsize
    if config.rollout.weight_sync.method == "adapter":
        total += 2 * num_trained_parameters(config.lora, inputs) * DTYPES[config.rollout.dtype].itemsize
    if config.log.rollouts_every:
        total += (
            config.run.num_steps
            // config.log.rollouts_every
            * rollout_bytes(config.rollout, config.train, config.loss, inputs)
        )
    return total


def rollout_bytes(rollout: RolloutConfig, train: TrainConfig, loss: LossConfig, inputs: ModelInputs) -> int:
    """Estimate the most bytes of the recorded samples of one step."""
    shape = routing_shape(inputs.hf_config, weights=train.router_replay_weights)
    routes = 0
    if train.needs_engine_routing and shape is not None:
        routes = shape.num_layers * shape.width * shape.dtype.itemsize
    topk = 8 * (loss.topk + 1) if loss.is_topk else 0
    samples = rollout.prompts_per_step * rollout.samples_per_prompt
    return estimate_step_bytes(samples, rollout.max_new_tokens, more=topk + routes)


def space_problems(config: Config, inputs: ModelInputs) -> Iterator[UserError]:
    """Yield an error if the run needs more than the free space. Files of its earlier starts count as written."""
    folder = Path(config.run.output_dir)
    written = 0
    if folder.is_dir() and not config.run.overwrite:
        written = sum(folder_bytes(folder / name) for name in RUN_FILES)
    try:
        require_space(folder, run_bytes(config, inputs) - written, "the run")
    except UserError as error:
        yield error
