"""The configuration: one model per TOML section. Unknown keys are errors. Loading lives in ``config.io``.

Keys that exist in Megatron carry Megatron's own name, so that its command-line flags work as they stand.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from megatron_dppo.config.checks import (
    check_agent,
    check_batch_invariant,
    check_distillation,
    check_eval_filters,
    check_lora,
    check_router_weights,
)
from megatron_dppo.config.data import DataConfig, EvalConfig
from megatron_dppo.config.distillation import DistillationConfig
from megatron_dppo.config.loss import AnyLoss, LossConfig
from megatron_dppo.config.model import LoraConfig, ModelConfig, ParallelConfig
from megatron_dppo.config.optimizer import OptimizerConfig
from megatron_dppo.config.removed import without_removed_defaults
from megatron_dppo.config.reward import RewardConfig
from megatron_dppo.config.rollout import AgentConfig, RolloutConfig
from megatron_dppo.config.run import CheckpointConfig, LogConfig, RunConfig
from megatron_dppo.config.section import Section as _Section
from megatron_dppo.config.train import FROM_ENGINE, TrainConfig, WarmupConfig


class Config(_Section):
    """A whole run."""

    run: RunConfig
    model: ModelConfig
    lora: LoraConfig = LoraConfig()
    parallel: ParallelConfig = ParallelConfig()
    data: DataConfig
    rollout: RolloutConfig
    agent: AgentConfig = AgentConfig()
    reward: RewardConfig = RewardConfig()
    loss: AnyLoss = Field(default_factory=LossConfig)
    distillation: DistillationConfig = DistillationConfig()
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig
    warmup: WarmupConfig = WarmupConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()

    @model_validator(mode="before")
    @classmethod
    def _drop_removed_defaults(cls, values: Any) -> Any:
        return without_removed_defaults(values) if isinstance(values, dict) else values

    @property
    def needs_engine_routing(self) -> bool:
        """Whether the rollout engine has to report which experts it chose."""
        return self.train.router_replay in FROM_ENGINE

    @property
    def needs_reference(self) -> bool:
        """Whether log-probabilities of the reference policy are computed."""
        return "reference_logprobs" in self.loss.required_inputs or self.reward.kl_coef > 0

    @property
    def eval_max_new_tokens(self) -> int:
        """``eval.max_new_tokens`` with its default."""
        return self.eval.max_new_tokens or self.rollout.max_new_tokens

    @property
    def evaluates_beside_training(self) -> bool:
        """``eval.beside_training`` with its default."""
        beside = self.eval.beside_training
        apart = self.rollout.engine != "local" and not self.rollout.servers.colocated
        at_once = self.checkpoint.keep_best or self.eval.stop_at_accuracy is not None
        return apart and not at_once if beside is None else beside

    @model_validator(mode="after")
    def _optimizers_fit(self) -> Config:
        for name, optimizer in (("optimizer", self.optimizer), ("warmup.optimizer", self.warmup.optimizer)):
            optimizer.check_memory(name, self.model.dtype, distributed=self.parallel.use_distributed_optimizer)
        return self

    @model_validator(mode="after")
    def _router_weights_fit(self) -> Config:
        if self.train.router_replay_weights:
            check_router_weights(self.train.router_replay, self.rollout.engine, self.model.transformer)
        return self

    @model_validator(mode="after")
    def _lora_fits(self) -> Config:
        check_lora(self)
        return self

    @model_validator(mode="after")
    def _distillation_fits(self) -> Config:
        if self.distillation.is_on:
            check_distillation(self)
        elif self.reward.function == "none":
            raise ValueError(
                "reward.function = 'none' without distillation.teacher_path: nothing says what is better. Name a "
                "reward function or a teacher"
            )
        return self

    @model_validator(mode="after")
    def _agent_fits(self) -> Config:
        check_agent(self)
        return self

    @model_validator(mode="after")
    def _batch_invariant_fits(self) -> Config:
        if self.rollout.batch_invariant:
            check_batch_invariant(self)
        return self

    @model_validator(mode="after")
    def _sections_fit(self) -> Config:
        if not self.rollout.return_logprobs:
            raise ValueError(
                f"loss.name = {self.loss.name!r} is anchored on the rollout policy's own log-probabilities, but "
                "rollout.return_logprobs = false; set it to true (a recomputed anchor is not the same algorithm)"
            )
        if self.loss.uses_anchor and self.train.max_staleness:
            raise ValueError(
                f"train.max_staleness = {self.train.max_staleness} with loss.name = {self.loss.name!r}, which needs "
                "log-probabilities recomputed at the rollout's weights: those are gone when an older batch is trained "
                "on. Set max_staleness = 0, or use a loss that is anchored on the rollout alone"
            )
        if self.rollout.order == "completed" and self.train.max_staleness < 2:
            raise ValueError(
                f"rollout.order = 'completed' with train.max_staleness = {self.train.max_staleness}: a group that "
                "waits for a step while others are trained on becomes two steps old. Set max_staleness = 2 or more, or "
                "rollout.order = 'stream'"
            )
        if self.train.router_replay == "recorded" and self.train.mini_batches * self.train.epochs == 1:
            raise ValueError(
                "train.router_replay = 'recorded' has no effect with one update a step: it replays the routing of the "
                "step's start in its later updates. Set train.mini_batches or train.epochs above 1, or use 'rollout'"
            )
        limit, sync = 60 * self.run.timeout_minutes, self.rollout.weight_sync.timeout_seconds
        if self.rollout.engine != "local" and sync >= limit:
            raise ValueError(
                f"rollout.weight_sync.timeout_seconds = {sync:g} reaches run.timeout_minutes = {limit / 60:g}: while "
                "rank 0 waits for a server, the others wait for the next weight in a collective of the model. Set "
                f"run.timeout_minutes above {sync / 60:g}"
            )
        self.reward.check_length(self.rollout.max_new_tokens)
        samples = self.rollout.prompts_per_step * self.rollout.samples_per_prompt
        if samples % self.train.mini_batches:
            raise ValueError(
                f"rollout.prompts_per_step * rollout.samples_per_prompt = {self.rollout.prompts_per_step} * "
                f"{self.rollout.samples_per_prompt} = {samples} samples cannot be split into train.mini_batches = "
                f"{self.train.mini_batches} equal parts"
            )
        if self.model.reference_path is not None and not self.needs_reference:
            raise ValueError(
                f"model.reference_path = {self.model.reference_path!r} has no effect without reward.kl_coef above 0, "
                "or loss.kl_coef above 0 and loss.kl_anchor = 'reference'"
            )
        if self.model.random_init and self.warmup.num_steps == 0 and not self.distillation.is_on:
            raise ValueError(
                "model.random_init = true starts RL from noise, where no reward is ever found; set warmup.num_steps "
                "above 0, point model.path to a folder with weights, or name a distillation.teacher_path"
            )
        return self

    @model_validator(mode="after")
    def _evaluation_fits(self) -> Config:
        self.eval.check_uses(has_prompts=self.data.eval is not None, keep_best=self.checkpoint.keep_best)
        if self.data.eval is not None:
            check_eval_filters(self.eval, self.rollout.engine, recorded=self.rollout.filters)
        return self

    @model_validator(mode="after")
    def _forks_have_weights(self) -> Config:
        source = self.checkpoint.fork_from
        if source is not None and self.warmup.num_steps:
            raise ValueError(
                f"checkpoint.fork_from = {source!r} with warmup.num_steps = {self.warmup.num_steps}: a fork has the "
                "checkpoint's weights. Set warmup.num_steps = 0 and model.random_init = false, and model.path to the "
                "folder that the other run warmed up (RUN/base)"
            )
        return self

    @model_validator(mode="after")
    def _servers_sample_before_training(self) -> Config:
        if self.rollout.servers.colocated and (self.train.max_staleness or self.eval.beside_training):
            raise ValueError(
                "rollout.servers.colocated = true: servers have no memory while the policy trains. Set "
                "train.max_staleness = 0 and leave eval.beside_training out, or give the servers GPUs of their own"
            )
        return self
