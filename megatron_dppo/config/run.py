"""The sections ``[run]``, ``[log]`` and ``[checkpoint]``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from megatron_dppo.config.section import Section

MAX_SEED = 2**63 - 1
"""torch takes seeds below 2**64, and Megatron adds some thousands to a run's for its other random states; integers of
TOML, in which a run keeps its configuration, end here. Python's ``random`` has no limit, numpy's is not used, and
servers get 31 bits that are drawn by the seed."""


class RunConfig(Section):
    """Where the run writes and how long it is."""

    output_dir: str
    """Everything the run writes goes here."""
    seed: int = Field(0, ge=0, le=MAX_SEED)
    """Seeds weight initialisation, prompt order and sampling."""
    num_steps: int = Field(0, ge=0)
    """Rollout steps. One step = one batch of rollouts and ``train.mini_batches * train.epochs`` optimizer updates; 0 =
    by ``num_epochs``."""
    num_epochs: float | None = Field(None, gt=0)
    """Instead of ``num_steps``: times through the prompts, ``rollout.prompts_per_step`` a step, rounded up to steps.
    Oversampling and dynamic sampling take more prompts a step, and go through them sooner."""
    overwrite: bool = False
    """Start again in an ``output_dir`` that already holds a run; the old run is moved to ``old/`` in it. Once a job: a
    job that was requeued or restarted continues what it began."""
    threads_per_rank: int | None = Field(None, gt=0)
    """CPU threads of each process; None = cores divided by local ranks."""
    timeout_minutes: float = Field(10.0, gt=0)
    """Limit of one collective of the model, on the GPUs; a rank that waits longer fails with an error."""
    wait_minutes: float = Field(120.0, gt=0)
    """Limit of waiting, on the CPU, for what another rank does alone: rollouts, rewards, servers, files."""
    hang_minutes: float | None = Field(None, gt=0)
    """End when no rank has begun anything new for so long; say who is waited for. None = 0.9 ``timeout_minutes``, and
    0.9 ``wait_minutes`` while a rank samples, scores, publishes, saves or exports."""

    @model_validator(mode="after")
    def _has_one_length(self) -> RunConfig:
        if self.num_epochs is None and not self.num_steps:
            raise ValueError("num_steps = 0 without num_epochs; set one of them above 0")
        if self.num_epochs is not None and self.num_steps:
            raise ValueError(
                f"num_steps = {self.num_steps} beside num_epochs = {self.num_epochs}; set one of them, and take the "
                "other out (on the command line by the value null)"
            )
        return self

    @model_validator(mode="after")
    def _limits_rise(self) -> RunConfig:
        hang, timeout, wait = self.hang_minutes or 0, self.timeout_minutes, self.wait_minutes
        if hang >= timeout:
            raise ValueError(f"hang_minutes = {hang} must be below timeout_minutes = {timeout}")
        if wait < timeout:
            raise ValueError(f"wait_minutes = {wait} must not be below timeout_minutes = {timeout}")
        return self


class LogConfig(Section):
    """Sinks besides ``metrics.jsonl``."""

    tensorboard: bool = True
    wandb_project: str | None = None
    """Weights & Biases project; needs the extra ``[wandb]``."""
    trackers: list[Literal["mlflow", "swanlab", "trackio", "comet_ml"]] = Field(default_factory=list)
    """Further trackers that get every step's metrics; each needs its package, and the extra ``[trackers]``."""
    project: str | None = None
    """Project, or MLflow's experiment, in ``trackers``; None = ``wandb_project``, or ``megatron_dppo``."""
    name: str | None = None
    """Name of the run in trackers; None = that of the folder ``run.output_dir``."""
    group: str | None = None
    """Runs that belong together in trackers, as the seeds of an experiment."""
    tags: list[str] = Field(default_factory=list)
    """Tags of the run in trackers."""
    offline: bool = False
    """Weights & Biases, SwanLab and Comet write to the run's folder and send nothing; ``wandb sync`` sends it later."""
    progress: bool = True
    """Progress bar and one line a step on rank 0."""
    rollouts_every: int = Field(0, ge=0)
    """Write every n-th step's samples to ``rollouts/step_N.parquet``: ids, log-probabilities, masks, rewards
    (docs/report.md). 0 = none, 1 = every step; needs the extra ``[data]``."""
    curves: bool = True
    """``curves.png`` at the end, which takes about two seconds."""


class CheckpointConfig(Section):
    """Megatron torch_dist checkpoints under ``output_dir/checkpoints``."""

    save_every: int | None = Field(None, ge=0)
    """Steps between checkpoints; None or 0 = only the last. SIGTERM always saves."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints that stay on disk."""
    keep_best: bool = False
    """Also save at every new best ``eval/accuracy``, and keep that checkpoint (``checkpoints/best.json`` names it)."""
    async_save: bool = False
    """Write checkpoints while training goes on: what a rank writes is copied to host memory first (14 bytes a parameter
    of the model over the number of ranks, with bf16 weights). Each save waits for the one before; the run's end for the
    last."""
    resume: Literal["auto", "never"] = "auto"
    """``auto``: continue from the newest whole checkpoint of finite weights in output_dir, if there is one."""
    fork_from: str | None = None
    """Begin this run as another one was at a step: the folder of a checkpoint (``RUN/checkpoints/step_000020``).
    Settings may differ; each change is printed. With checkpoints of its own the run continues from those."""
    accept_changes: bool = False
    """Continue although keys that change the results differ from those of the run so far; each one is printed."""
    accept_unverified: bool = False
    """Continue also from a checkpoint without manifest, as older versions wrote them: nothing shows that its files are
    whole (``docs/checkpoints.md``)."""
    export_hf: bool = True
    """Write the final weights as a Hugging Face folder."""

    @model_validator(mode="after")
    def _a_fork_goes_on(self) -> CheckpointConfig:
        if self.fork_from is not None and self.resume == "never":
            raise ValueError(
                f"fork_from = {self.fork_from!r} with resume = 'never': a fork continues from its own checkpoints when "
                "it is started again; leave resume at 'auto'"
            )
        return self
