"""The configuration: one model per TOML section. Unknown keys are errors. Loading lives in ``config.io``.

Keys that exist in Megatron carry Megatron's own name, so that its command-line flags work as they stand.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from megatron_dppo.config.agent import AgentConfig
from megatron_dppo.config.batch import BatchSizes
from megatron_dppo.config.checkpoint import CheckpointConfig
from megatron_dppo.config.checks import check
from megatron_dppo.config.data import DataConfig, RolloutConfig
from megatron_dppo.config.distillation import DistillationConfig
from megatron_dppo.config.evaluation import EvalConfig
from megatron_dppo.config.layer_noise import LayerNoiseConfig
from megatron_dppo.config.lora import LoraConfig
from megatron_dppo.config.loss import LossConfig
from megatron_dppo.config.optimizer import OptimizerConfig, WarmupOptimizerConfig
from megatron_dppo.config.reward import RewardConfig
from megatron_dppo.config.router_replay import FROM_ENGINE, RouterReplay
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

    @property
    def needs_engine_routing(self) -> bool:
        """Whether the rollout engine has to report which experts it chose."""
        return self.router_replay in FROM_ENGINE

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

    @property
    def batch(self) -> BatchSizes:
        """Sizes of the batches of RL and of the warm-up."""
        return BatchSizes(
            prompts_per_step=self.rollout.prompts_per_step,
            samples_per_prompt=self.rollout.samples_per_prompt,
            mini_batches=self.train.mini_batches,
            epochs=self.train.epochs,
            num_steps=self.run.num_steps,
            warmup_batch_size=self.warmup.batch_size if self.warmup.num_steps else None,
        )

    @property
    def needs_reference(self) -> bool:
        """Whether log-probabilities of the reference policy are computed."""
        return "reference_logprobs" in self.loss.required_inputs or self.reward.kl_coef > 0

    @property
    def topk_logprobs(self) -> int:
        """Number of most probable tokens of each position that the rollout engine reports; 0 = none."""
        return self.loss.topk if self.loss.is_topk else 0

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
    def _sections_fit(self) -> Config:
        check(self)
        return self
