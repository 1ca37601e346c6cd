"""The configuration: one model per TOML section. Unknown keys are errors. Loading lives in ``config.io``.

Keys that exist in Megatron carry Megatron's own name, so that its command-line flags work as they stand.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from megatron_dppo.config.agent import AgentConfig, check_agent
from megatron_dppo.config.batch_invariant import check_batch_invariant
from megatron_dppo.config.checkpoint import CheckpointConfig
from megatron_dppo.config.data import DataConfig, RolloutConfig
from megatron_dppo.config.distillation import DistillationConfig, check_distillation
from megatron_dppo.config.evaluation import EvalConfig, check_eval_filters
from megatron_dppo.config.layer_noise import LayerNoiseConfig
from megatron_dppo.config.lora import LoraConfig, check_lora
from megatron_dppo.config.loss import LossConfig
from megatron_dppo.config.optimizer import OptimizerConfig, WarmupOptimizerConfig
from megatron_dppo.config.removed import without_removed_defaults
from megatron_dppo.config.reward import RewardConfig
from megatron_dppo.config.router_replay import FROM_ENGINE, RouterReplay, check_router_weights
from megatron_dppo.config.run import LogConfig, RunConfig
from megatron_dppo.config.section import DType
from megatron_dppo.config.section import Section as _Section
from megatron_dppo.config.user_functions import BuiltInAdvantage, check_advantage


class ModelConfig(_Section):
    """The policy."""

    path: str
    """Hugging Face folder: config.json, tokenizer files and, unless ``random_init``, safetensors weights."""
    random_init: bool = False
    """Start from random weights drawn by the folder's config (only with a warm-up, or for tests)."""
    reference_path: str | None = None
    """Hugging Face folder of the reference policy of ``loss.kl_coef`` and ``reward.kl_coef``; None = the policy as it
    is before RL."""
    dtype: DType = "bf16"
    """Parameter dtype of training."""
    fused_head: bool = True
    """Output layer, statistics and loss gradient in one chunked pass; False = the whole logits, for comparison."""
    transformer: dict[str, Any] = Field(default_factory=dict)
    """Further fields of Megatron's TransformerConfig, by Megatron's name."""


class ParallelConfig(_Section):
    """Parallel layout, in Megatron's words."""

    tensor_model_parallel_size: int = Field(1, ge=1)
    """Ranks that split each weight and the vocabulary."""
    pipeline_model_parallel_size: int = Field(1, ge=1)
    """Stages that split the layers."""
    virtual_pipeline_model_parallel_size: int | None = Field(None, ge=1)
    """Chunks of layers per stage (interleaved pipeline)."""
    context_parallel_size: int = Field(1, ge=1)
    """Ranks that split each sequence."""
    expert_model_parallel_size: int = Field(1, ge=1)
    """Ranks that split the experts among them."""
    expert_tensor_parallel_size: int | None = Field(None, ge=1)
    """None = tensor_model_parallel_size when the expert parallel size is 1, else 1."""
    sequence_parallel: bool | None = None
    """None = on exactly when the tensor parallel size is above 1."""
    use_distributed_optimizer: bool = True
    """Split the optimizer state over data parallelism."""
    overlap_grad_reduce: bool = False
    """Reduce gradients behind the backward pass."""
    overlap_param_gather: bool = False
    """Gather updated weights behind the next forward pass; needs the two above."""
    overlap_p2p_comm: bool | None = None
    """None = on exactly with an interleaved pipeline (required there)."""


class TrainConfig(_Section):
    """How rollouts become optimizer updates."""

    mini_batches: int = Field(1, ge=1)
    """Optimizer updates per epoch over one batch of rollouts."""
    epochs: int = Field(1, ge=1)
    micro_batch_tokens: int = Field(8192, gt=0)
    """Token budget of one packed micro-batch."""
    balance_ranks: bool = True
    """Move samples between data parallel ranks, so that the i-th micro-batches of all take the same time."""
    advantage: BuiltInAdvantage | str = "mean"
    """Reward minus the group's mean, the same divided by its deviation, reward minus the mean of the others, the reward
    itself (``none``), or a function of your own, ``path/to/file.py:function`` (docs/loss.md)."""
    advantage_normalization: Literal["none", "batch"] = "none"
    """``batch``: advantages minus their mean over all tokens of the step, over their deviation; with ``advantage`` =
    ``none`` this is REINFORCE++, with ``mean`` its variant with a baseline."""
    advantage_options: dict[str, Any] = Field(default_factory=dict)
    """Only a function of your own in ``advantage``: what it gets by name, beside rewards and their validity."""
    mask_truncated: bool = False
    """Leave responses that were cut off at max_new_tokens out of the loss (overlong filtering)."""
    max_staleness: int = Field(0, ge=0)
    """Rollout steps that the weights which sampled a token may be old; above 0 the next rollouts are sampled while the
    policy trains, and those of servers go on with the new weights after each publish. 0 = on-policy."""
    router_replay: RouterReplay = "off"
    """Which experts each token visits in training: ``off`` = the trainer's own choice; ``rollout`` = the rollout
    engine's (R3); ``recorded`` = the trainer's choice at the start of the step, in all its updates (R2); ``compare`` =
    as ``off``, and the engine's are only compared with it (``docs/router_replay.md``)."""
    router_replay_weights: bool = False
    """Also replay (or compare) the fp32 weights with which the experts' outputs are added up; the router's gradient
    passes straight through to its own. Of the engines ``local`` returns them."""
    max_skipped_updates: int = Field(5, ge=1)
    """Stop after this many updates in a row with a non-finite gradient."""
    max_first_prob_diff: Annotated[float, Field(gt=0)] | Literal["auto", "off"] = "auto"
    """Stop before the first update of a step when the mean |pi - mu| is above this; ``auto`` = 0.001 in fp32, 0.06 with
    bf16 in the engine or in training, no limit with ``rollout.perturbation``; ``off`` = never. Only where the current
    weights sampled every token."""
    max_dropped_fraction: Annotated[float, Field(ge=0, lt=1)] | Literal["off"] = 0.01
    """Stop there too when more of the sampled tokens have no finite rollout log-probability; ``off`` = never."""
    layer_noise: LayerNoiseConfig = LayerNoiseConfig()

    @model_validator(mode="after")
    def _advantage_is_known(self) -> TrainConfig:
        check_advantage(self.advantage, self.advantage_options)
        return self


class WarmupConfig(_Section):
    """A short supervised phase before RL; 0 steps = none."""

    num_steps: int = Field(0, ge=0)
    data: str = "task:chain_sum"
    """An embedded task (``task:chain_sum``, ``task:rare_words``, ``task:rare_chain``), or a JSONL file with ``prompt``
    and ``response``."""
    batch_size: int = Field(96, gt=0)
    """Sequences per update, over all ranks."""
    optimizer: WarmupOptimizerConfig = WarmupOptimizerConfig()


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
    loss: LossConfig = LossConfig()
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
