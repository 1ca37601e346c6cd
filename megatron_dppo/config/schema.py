"""The configuration: one model per TOML section. Unknown keys are errors.

Keys that exist in Megatron have Megatron's name, so that its command-line flags work unchanged. Loading is in
``config.io``.
"""

from typing import Self

from pydantic import Field, model_validator

from megatron_dppo.config import checks, signal_checks
from megatron_dppo.config.data import DataConfig, EvalConfig
from megatron_dppo.config.distillation import DistillationConfig
from megatron_dppo.config.layout import BatchSizes
from megatron_dppo.config.loss import AnyLoss, LossConfig
from megatron_dppo.config.model import LoraConfig, ModelConfig, ParallelConfig
from megatron_dppo.config.optimizer import OptimizerConfig
from megatron_dppo.config.reward import RewardConfig
from megatron_dppo.config.rollout import AgentConfig, RolloutConfig
from megatron_dppo.config.run import CheckpointConfig, LogConfig, RunConfig
from megatron_dppo.config.section import Section
from megatron_dppo.config.train import TrainConfig


class Config(Section):
    """The configuration of one run."""

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
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()

    @property
    def batch(self) -> BatchSizes:
        """Batch sizes of a step."""
        return BatchSizes(
            prompts_per_step=self.rollout.prompts_per_step,
            samples_per_prompt=self.rollout.samples_per_prompt,
            mini_batches=self.train.mini_batches,
            epochs=self.train.epochs,
            num_steps=self.run.num_steps,
        )

    @property
    def needs_reference(self) -> bool:
        """True if the run computes log-probabilities of the reference policy."""
        return "reference_logprobs" in self.loss.required_inputs or self.reward.kl_coef > 0

    @property
    def topk_logprobs(self) -> int:
        """Number of most probable tokens per position that the rollout engine returns. 0 if the loss needs none."""
        return self.loss.topk if self.loss.is_topk else 0

    @property
    def eval_max_new_tokens(self) -> int:
        """``eval.max_new_tokens`` with its default filled in."""
        return self.eval.max_new_tokens or self.rollout.max_new_tokens

    @property
    def evaluates_beside_training(self) -> bool:
        """``eval.overlap_training`` with its default filled in."""
        if self.eval.overlap_training is not None:
            return self.eval.overlap_training
        has_separate_gpus = self.rollout.engine != "local" and not self.rollout.servers.colocated
        needs_result_at_once = self.checkpoint.keep_best or self.eval.stop_at_accuracy is not None
        return has_separate_gpus and not needs_result_at_once

    @model_validator(mode="after")
    def _sections_fit(self) -> Self:
        checks.check_optimizer(self.optimizer, self.model, self.parallel)
        if self.train.router_replay_weights:
            checks.check_router_weights(self.train.router_replay, self.rollout.engine, self.model.transformer)
        checks.check_lora(self.rollout, self.lora, self.model)
        self._check_signal()
        checks.check_batch_invariant(
            self.rollout, self.parallel, self.train, model=self.model, agent=self.agent, evaluation=self.eval
        )
        if not self.loss.has_text:
            checks.check_recomputed_logprobs(self.loss, self.rollout, self.train)
        checks.check_steps(self.rollout, self.train, self.run)
        checks.check_rewards(self.reward, self.rollout, self.data)
        checks.check_sources(self.data, self.rollout, self.reward, self.agent)
        checks.check_mini_batches(self.rollout, self.train)
        needs_reference = self.needs_reference or self.loss.has_text
        checks.check_model(self.model, self.distillation, needs_reference=needs_reference)
        checks.check_evaluations(self.eval, self.data, self.checkpoint, self.rollout)
        checks.check_accepted_keys(self.checkpoint, type(self))
        checks.check_colocated(self.rollout, self.train, self.eval)
        return self

    def _check_signal(self) -> None:
        """Check the sections that give the training signal."""
        signal_checks.check_any_signal(self.distillation, self.reward)
        signal_checks.check_distillation(self.distillation, self.rollout, self.model)
        signal_checks.check_agent(self.agent, self.rollout, self.data)
        signal_checks.check_credit(self.agent, self.train, self.reward)
        signal_checks.check_agent_parts(self.agent, self.reward)
        signal_checks.check_reward_parts(self.reward, self.train, self.rollout, self.agent)
        signal_checks.check_greedy_baseline(self.reward, self.train)
        signal_checks.check_layer_noise(self.loss, self.train)
