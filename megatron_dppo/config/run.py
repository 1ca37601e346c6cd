"""The sections ``[run]``, ``[log]`` and ``[checkpoint]``."""

import re
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from megatron_dppo.config.section import Section

MAX_SEED = 2**63 - 1
"""Largest seed. TOML integers, in which a run stores its configuration, end here. torch accepts seeds below 2**64, of
which Megatron uses some thousands above the run's seed for its other random states."""


class RunConfig(Section):
    """Output folder, length, seed and time limits of the run."""

    output_dir: str
    """Folder for everything that the run writes."""
    seed: int = Field(0, ge=0, le=MAX_SEED)
    """Seed of weight initialization, prompt order and sampling."""
    num_steps: int = Field(0, ge=0)
    """Rollout steps of the run. One step is one batch of rollouts and ``train.mini_batches * train.epochs`` optimizer
    updates. 0 uses ``num_epochs``."""
    num_epochs: float | None = Field(None, gt=0)
    """Length in passes over the prompts, instead of ``num_steps``: ``rollout.prompts_per_step`` prompts per step,
    rounded up to whole steps. Oversampling and dynamic sampling use more prompts per step, so they finish the passes
    earlier. null uses ``num_steps``."""
    overwrite: bool = False
    """Start a new run in an ``output_dir`` that already contains one; the old run moves to its subfolder ``old/``. This
    happens once per job: a requeued or restarted job resumes its own run."""
    threads_per_rank: int | None = Field(None, gt=0)
    """CPU threads of each process. null divides the cores by the number of local ranks."""
    timeout_minutes: float = Field(10.0, gt=0)
    """Time limit in minutes for one collective of the model on the GPUs. A rank that waits longer fails with an
    error."""
    wait_minutes: float = Field(120.0, gt=0)
    """Time limit in minutes for waiting on the CPU for work of another rank: rollouts, rewards, servers, files."""
    hang_minutes: float | None = Field(None, gt=0)
    """Minutes without progress on any rank after which the run ends and names the ranks that it waits for. null uses
    0.9 ``timeout_minutes``, and 0.9 ``wait_minutes`` while a rank samples, scores, publishes, saves or exports."""

    @model_validator(mode="after")
    def _has_one_length(self) -> Self:
        if self.num_epochs is None and not self.num_steps:
            raise ValueError("num_steps = 0 without num_epochs; set one of them above 0")
        if self.num_epochs is not None and self.num_steps:
            raise ValueError(
                f"num_steps = {self.num_steps} and num_epochs = {self.num_epochs} are both set; set one of them, and "
                "remove the other (on the command line with the value null)"
            )
        return self

    @model_validator(mode="after")
    def _time_limits_are_ordered(self) -> Self:
        hang = self.hang_minutes or 0
        timeout = self.timeout_minutes
        wait = self.wait_minutes
        if hang >= timeout:
            raise ValueError(
                f"hang_minutes = {hang} must be below timeout_minutes = {timeout}; lower it, or raise timeout_minutes"
            )
        if wait < timeout:
            raise ValueError(f"wait_minutes = {wait} must not be below timeout_minutes = {timeout}; raise it")
        return self


class LogConfig(Section):
    """Metric trackers and output besides ``metrics.jsonl``."""

    tensorboard: bool = True
    """Write TensorBoard events."""
    wandb_project: str | None = None
    """Weights & Biases project. Needs the extra ``[wandb]``. null disables it."""
    trackers: list[Literal["mlflow", "swanlab", "trackio", "comet_ml"]] = Field(default_factory=list)
    """Further trackers that receive every step's metrics. Each needs its package (extra ``[trackers]``)."""
    project: str | None = None
    """Project (MLflow: experiment) in ``trackers``. null uses ``wandb_project``, or ``megatron_dppo``."""
    name: str | None = None
    """Name of the run in trackers. null uses the name of the folder ``run.output_dir``."""
    group: str | None = None
    """Group of related runs in trackers, such as the seeds of one experiment. null sets no group."""
    tags: list[str] = Field(default_factory=list)
    """Tags of the run in trackers."""
    offline: bool = False
    """Weights & Biases, SwanLab and Comet write to the run's folder and send nothing. ``wandb sync``, ``swanlab sync``
    or ``comet upload`` sends the data later. If the run is killed, the last steps are missing in these files, for Comet
    all steps since its start. ``metrics.jsonl`` has them."""
    progress: bool = True
    """Show a progress bar and print one line per step on rank 0."""
    rollouts_every: int = Field(0, ge=0)
    """Write the samples of every n-th step to ``rollouts/step_N.parquet``: ids, log-probabilities, masks, rewards
    (packages/report/README.md). 0 writes none, 1 every step. Needs the extra ``[data]``."""
    curves: bool = True
    """Draw ``curves.png`` at the end of the run, which takes about two seconds."""


class CheckpointConfig(Section):
    """Megatron torch_dist checkpoints in ``output_dir/checkpoints``."""

    save_every: int | None = Field(None, ge=0)
    """Steps between checkpoints. null or 0 saves none by steps. A run also saves at its last step, at a stop by a
    signal, before it ends with exit code 3 because of gradients or rewards, and by time (``save_every_minutes``)."""
    save_every_minutes: float | None = Field(30.0, gt=0, le=100_000)
    """Minutes between checkpoints by time, at the end of a step. They are written in the background if the copies take
    at most half of the free host memory, and training waits for them at most 5 % of the time. A kill costs the steps
    since the newest checkpoint. null saves none by time."""
    keep: int = Field(2, ge=1)
    """Number of newest checkpoints to keep."""
    keep_best: bool = False
    """Also save at every new best ``eval/accuracy``, and keep that checkpoint (``checkpoints/best.json`` names it)."""
    async_save: bool = False
    """Write all checkpoints while training continues, not only those by time. Each rank first copies its part to host
    memory: 14 bytes per parameter, divided by the number of ranks, with bf16 weights. A save waits for the previous
    one, and the end of the run waits for the last."""
    resume: Literal["auto", "never"] = "auto"
    """``auto`` resumes from the newest complete checkpoint with finite weights in ``output_dir``, if there is one.
    ``never`` ignores checkpoints."""
    fork_from: str | None = None
    """Checkpoint of another run to start from (``RUN/checkpoints/step_000020``). Settings may differ; each difference
    is printed. If this run has checkpoints of its own, it resumes from those. null starts from the model."""
    accept_changes: bool | list[str] = False
    """Keys that change the results and may differ from the run so far, or the content of the files that they name:
    ``["reward.function"]``. true accepts every difference. Each is printed and recorded. ``--allow-changed
    reward.function`` is the same on the command line."""
    accept_unverified: bool = False
    """Also resume from a checkpoint without a manifest, as older versions wrote them. Nothing proves that its files are
    complete (``docs/checkpoints.md``)."""
    export_hf: bool = True
    """Write the final weights as a Hugging Face folder."""

    @field_validator("accept_changes", mode="before")
    @classmethod
    def _names_of_keys(cls, value: object) -> object:
        # The command line gives the names as one text.
        names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
        for name in names if isinstance(names, list) else []:
            if not re.fullmatch(r"\w+(\.[^.\s]+)+", str(name)):
                raise ValueError(f"expected true, false or names such as ['reward.function'], got {name!r} among them")
        return names

    @model_validator(mode="after")
    def _fork_can_resume(self) -> Self:
        if self.fork_from is not None and self.resume == "never":
            raise ValueError(
                f"fork_from = {self.fork_from!r} with resume = 'never': a restarted fork resumes from its own "
                "checkpoints; set resume = 'auto'"
            )
        return self
