"""Checks across sections of the configuration. Checks within one section are in that section.

``Config`` calls them in the order in which problems are reported; the functions below follow that order. Each raises
a ValueError whose text names the change that fixes it.
"""

from collections.abc import Mapping
from typing import Any

from megatron_dppo.config.data import DataConfig, EvalConfig
from megatron_dppo.config.distillation import DistillationConfig
from megatron_dppo.config.loss import LossConfig
from megatron_dppo.config.model import LoraConfig, ModelConfig, ParallelConfig
from megatron_dppo.config.optimizer import OptimizerConfig
from megatron_dppo.config.reward import RewardConfig
from megatron_dppo.config.rollout import AgentConfig, RolloutConfig
from megatron_dppo.config.run import CheckpointConfig, RunConfig
from megatron_dppo.config.section import Section
from megatron_dppo.config.train import ENGINE_REPLAY_MODES, TrainConfig

# Optimizer memory and router weights.


def check_optimizer(optimizer: OptimizerConfig, model: ModelConfig, parallel: ParallelConfig) -> None:
    """Reject memory settings that Megatron rejects or ignores."""
    dtype = model.dtype
    distributed = parallel.use_distributed_optimizer
    dtypes = {key: getattr(optimizer, key) for key in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")}
    # Loss scaling belongs to fp16; with other dtypes these keys would silently do nothing.
    keys = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
    given = [key for key in keys if key in optimizer.changed_keys()]
    if given and dtype != "fp16":
        raise ValueError(f"optimizer.{given[0]} has no effect with model.dtype = {dtype!r}; remove it")
    # Moments and master weights below fp32 exist only in Transformer Engine's optimizer.
    low = [f"optimizer.{key} = {value!r}" for key, value in dtypes.items() if value != "fp32"]
    if optimizer.optimizer_cpu_offload and not optimizer.use_precision_aware_optimizer:
        raise ValueError(
            "optimizer.optimizer_cpu_offload = true with use_precision_aware_optimizer = false: Megatron then also "
            "keeps the fp32 copies on the GPU, and cannot load a checkpoint. Set use_precision_aware_optimizer = "
            "true; on the host it needs no Transformer Engine"
        )
    if optimizer.use_precision_aware_optimizer and not (distributed and dtype == "bf16"):
        raise ValueError(
            f"optimizer.use_precision_aware_optimizer = true with model.dtype = {dtype!r} and "
            f"parallel.use_distributed_optimizer = {str(distributed).lower()}: Megatron supports it only for bf16 "
            "weights with the distributed optimizer. Set both, or remove it"
        )
    if low and (optimizer.optimizer_cpu_offload or not optimizer.use_precision_aware_optimizer):
        raise ValueError(
            f"{low[0]}: only Transformer Engine's Adam on the GPU supports dtypes other than fp32. Set "
            f"optimizer.use_precision_aware_optimizer = true and optimizer_cpu_offload = false, or remove it"
        )
    if not optimizer.optimizer_cpu_offload and (
        optimizer.optimizer_offload_fraction < 1 or optimizer.overlap_cpu_optimizer_d2h_h2d
    ):
        raise ValueError(
            f"optimizer.optimizer_offload_fraction = {optimizer.optimizer_offload_fraction:g} and "
            f"overlap_cpu_optimizer_d2h_h2d = {str(optimizer.overlap_cpu_optimizer_d2h_h2d).lower()} have no effect "
            "without optimizer_cpu_offload = true; set it, or remove them"
        )


def check_router_weights(replay: str, engine: str, transformer: Mapping[str, object]) -> None:
    """Check that there are combine weights to replay, with the same meaning in engine and trainer."""
    key = "train.router_replay_weights = true"
    if replay == "off":
        raise ValueError(
            f"{key} has no effect with train.router_replay = 'off'; set router_replay to 'rollout', 'recorded' or "
            "'compare', or remove router_replay_weights"
        )
    if replay not in ENGINE_REPLAY_MODES:
        return
    if engine != "local":
        raise ValueError(
            f"{key} with rollout.engine = {engine!r}: SGLang (0.5.23) and vLLM (0.32.0) return the chosen experts, "
            "but not the routers' weights. Set it to false, or use rollout.engine = 'local' or train.router_replay "
            "= 'recorded'"
        )
    for name in ("moe_router_topk_scaling_factor", "moe_router_score_function"):
        if transformer.get(name) is not None:
            raise ValueError(
                f"model.transformer.{name} = {transformer[name]!r} with {key}: it changes the trainer's expert "
                "weights, but not the engine's, which would replace them; remove one of them"
            )


# Adapters.

_INCOMPATIBLE_WITH_LORA = {
    "moe_shared_expert_overlap": "the shared expert's layers then do not communicate themselves",
    "use_transformer_engine_op_fuser": "the fused operations do not call the layers that have adapters",
    "moe_router_bias_update_rate": "checkpoints contain only adapters, so the biases would be lost",
    "delay_wgrad_compute": "frozen weights have no gradient to delay",
}
"""Megatron options under which a layer is not computed as its adapter assumes, each with the reason."""


def check_lora(rollout: RolloutConfig, lora: LoraConfig, model: ModelConfig) -> None:
    """Check that adapters can be sent, and that Megatron computes each layer as its adapter assumes."""
    sends_adapter = rollout.weight_sync.method == "adapter"
    if sends_adapter and not lora.rank:
        raise ValueError(
            "rollout.weight_sync.method = 'adapter' with lora.rank = 0: there is no adapter to send. Set lora.rank, "
            "or set method to 'distributed' or 'disk'"
        )
    if sends_adapter and model.random_init:
        raise ValueError(
            "rollout.weight_sync.method = 'adapter' with model.random_init = true: the servers load the base model "
            "from model.path, so it must contain weights. Set random_init = false"
        )
    for key, reason in _INCOMPATIBLE_WITH_LORA.items():
        if lora.rank and model.transformer.get(key):
            raise ValueError(
                f"lora.rank = {lora.rank} with model.transformer.{key} = {model.transformer[key]!r}: {reason}. "
                "Remove it"
            )


# Batch-invariant sampling with the trainer's model.

_MAX_TENSOR_RANKS = 2
"""The sum of two numbers is the same in any order. Larger groups add in an order that depends on the position."""


def check_batch_invariant(
    rollout: RolloutConfig,
    parallel: ParallelConfig,
    train: TrainConfig,
    *,
    model: ModelConfig,
    agent: AgentConfig,
    evaluation: EvalConfig,
) -> None:
    """Check that all ranks can sample in lockstep with the trainer's own model."""
    if not rollout.batch_invariant:
        return
    model_dtype = f"model.dtype = {model.dtype!r}, because it samples with these weights"
    # Each row: True if incompatible, setting, its value, expected value with the reason.
    requirements: list[tuple[bool, str, object, str]] = [
        (rollout.engine != "local", "rollout.engine", rollout.engine, "'local'"),
        (rollout.dtype != model.dtype, "rollout.dtype", rollout.dtype, model_dtype),
        (rollout.generate is not None, "rollout.generate", rollout.generate, "null: all ranks sample in lockstep"),
        (agent.is_set, "[agent]", "set", "no agent: all ranks sample in lockstep"),
        (rollout.abort_slowest, "rollout.abort_slowest", True, "false: all ranks sample in lockstep"),
        (
            rollout.perturbation.is_active,
            "[rollout.perturbation]",
            "set",
            "no perturbation: there is no copy of the weights to perturb",
        ),
        (not model.fused_head, "model.fused_head", False, "true"),
        (
            train.needs_engine_routing,
            "train.router_replay",
            train.router_replay,
            "'off': the routers already agree bit for bit",
        ),
        (
            train.layer_noise.std > 0 and train.max_first_prob_diff == "auto",
            "train.layer_noise.std",
            train.layer_noise.std,
            "0, or set train.max_first_prob_diff: by default no difference is allowed, and the noise causes one",
        ),
        (
            bool(evaluation.overlap_training),
            "eval.overlap_training",
            True,
            "null or false: one model cannot do both at once",
        ),
    ]
    for key, limit in (
        ("tensor_model_parallel_size", _MAX_TENSOR_RANKS),
        ("expert_tensor_parallel_size", _MAX_TENSOR_RANKS),
        ("pipeline_model_parallel_size", 1),
        ("context_parallel_size", 1),
    ):
        size = getattr(parallel, key) or 1
        requirements.append((size > limit, f"parallel.{key}", size, f"at most {limit}"))
    problems = [f"{name} = {value!r} (expected {expected})" for bad, name, value, expected in requirements if bad]
    if problems:
        raise ValueError(f"rollout.batch_invariant = true is incompatible with {'; '.join(problems)}")


# Training steps: recomputed log-probabilities, order, routes, time limits, lengths, number of samples, initial weights.


def check_recomputed_logprobs(loss: LossConfig, rollout: RolloutConfig, train: TrainConfig) -> None:
    """Check that the log-probabilities that the loss compares exist."""
    if not rollout.return_logprobs:
        raise ValueError(
            f"loss.name = {loss.name!r} uses the rollout policy's own log-probabilities, but "
            "rollout.return_logprobs = false; set it to true (recomputed log-probabilities are a different algorithm)"
        )
    if loss.uses_recomputed_logprobs and train.max_staleness:
        raise ValueError(
            f"train.max_staleness = {train.max_staleness} with loss.name = {loss.name!r}: the loss needs "
            "log-probabilities recomputed at the rollout's weights, which no longer exist when an older batch is "
            "trained on. Set max_staleness = 0, or use a loss without recomputed log-probabilities"
        )


def check_steps(rollout: RolloutConfig, train: TrainConfig, run: RunConfig) -> None:
    """Check order, routes and time limits of training steps."""
    if rollout.order == "completed" and train.max_staleness < 2:
        raise ValueError(
            f"rollout.order = 'completed' with train.max_staleness = {train.max_staleness}: a group that waits one "
            "step while others are trained on becomes two steps old. Set max_staleness to at least 2, or "
            "rollout.order = 'stream'"
        )
    if train.router_replay == "recorded" and train.mini_batches * train.epochs == 1:
        raise ValueError(
            "train.router_replay = 'recorded' has no effect with one update per step: it replays the routing at the "
            "start of the step in its later updates. Set train.mini_batches or train.epochs above 1, or use 'rollout'"
        )
    # Other ranks wait for rank 0's sync inside a collective, so its limit must be the longer one.
    limit = 60 * run.timeout_minutes
    sync = rollout.weight_sync.timeout_seconds
    if rollout.engine != "local" and sync >= limit:
        raise ValueError(
            f"rollout.weight_sync.timeout_seconds = {sync:g} reaches run.timeout_minutes = {limit / 60:g}: while "
            "rank 0 waits for a server, the other ranks wait in a collective of the model. Set run.timeout_minutes "
            f"above {sync / 60:g}"
        )


def check_rewards(reward: RewardConfig, rollout: RolloutConfig, data: DataConfig) -> None:
    """Check the length penalty, and that each source has a reward function."""
    if reward.overlong_buffer_tokens >= rollout.max_new_tokens:
        raise ValueError(
            f"reward.overlong_buffer_tokens = {reward.overlong_buffer_tokens} must be below rollout.max_new_tokens = "
            f"{rollout.max_new_tokens}, otherwise every response gets a penalty. DAPO uses a fifth of it"
        )
    functions = reward.functions
    known = list(data.names.values())
    for name, function in functions.items():
        for source in function.sources:
            if source not in known:
                raise ValueError(
                    f"reward.functions.{name}.sources has {source!r}, which is no source of data.train or data.eval; "
                    f"they are {', '.join(map(repr, dict.fromkeys(known)))}"
                )
    if not any(function.sources for function in functions.values()):
        return
    weighted = [function for function in functions.values() if function.weight]
    for source in known:
        if not any(not function.sources or source in function.sources for function in weighted):
            raise ValueError(
                f"the source {source!r} has no function in reward.functions; add it to the sources of one with a "
                "weight, or add a function"
            )


def check_sources(data: DataConfig, rollout: RolloutConfig, reward: RewardConfig, agent: AgentConfig) -> None:
    """Check the limits of single sources."""
    buffer = reward.overlong_buffer_tokens
    for name, source in data.sources.items():
        section = f'data.sources."{name}"'
        # Context, memory and servers are planned for rollout.max_new_tokens.
        if source.max_new_tokens is not None and source.max_new_tokens > rollout.max_new_tokens:
            raise ValueError(
                f"{section}.max_new_tokens = {source.max_new_tokens} is above rollout.max_new_tokens = "
                f"{rollout.max_new_tokens}, the limit of all sources. Raise that, and give the other sources their own"
            )
        if source.max_new_tokens is not None and buffer >= source.max_new_tokens:
            raise ValueError(
                f"reward.overlong_buffer_tokens = {buffer} must be below {section}.max_new_tokens = "
                f"{source.max_new_tokens}, otherwise every response of this source gets a penalty"
            )
        agent_keys = [key for key in source.changed_keys() if key not in ("weight", "max_new_tokens")]
        if agent_keys and not agent.is_set:
            raise ValueError(f"{section}.{agent_keys[0]} has no effect without [agent]; remove it")


def check_mini_batches(rollout: RolloutConfig, train: TrainConfig) -> None:
    """Check that a step's samples divide."""
    samples = rollout.prompts_per_step * rollout.samples_per_prompt
    if samples % train.mini_batches:
        raise ValueError(
            f"rollout.prompts_per_step * rollout.samples_per_prompt = {rollout.prompts_per_step} * "
            f"{rollout.samples_per_prompt} = {samples} samples cannot be split into train.mini_batches = "
            f"{train.mini_batches} equal parts; choose a divisor of {samples}"
        )


def check_model(model: ModelConfig, distillation: DistillationConfig, *, needs_reference: bool) -> None:
    """Check that the reference policy is used, and that the initial weights can be trained."""
    if model.reference_path is not None and not needs_reference:
        raise ValueError(
            f"model.reference_path = {model.reference_path!r} has no effect without reward.kl_coef above 0, "
            "or loss.kl_coef above 0 and loss.kl_target = 'reference'; set them, or remove it"
        )
    if model.random_init and not distillation.is_enabled:
        raise ValueError(
            "model.random_init = true starts RL from random weights, which never reach a reward. Set model.path to a "
            "folder with weights (`megatron-dppo base` makes a small one) and random_init = false, or set "
            "distillation.teacher_path"
        )


# Evaluation, forks, and servers that share the trainer's GPUs.


def check_evaluations(
    evaluation: EvalConfig, data: DataConfig, checkpoint: CheckpointConfig, rollout: RolloutConfig
) -> None:
    """Check that an evaluation has prompts, and that its result comes in time.

    A vLLM server that returns the allowed ids rejects every request without top-k.
    """
    has_prompts = data.eval is not None
    setting = "checkpoint.keep_best = true" if checkpoint.keep_best else ""
    if evaluation.stop_at_accuracy is not None:
        setting = f"eval.stop_at_accuracy = {evaluation.stop_at_accuracy}"
    if setting and not (has_prompts and evaluation.every):
        missing = "eval.every = 0" if has_prompts else "no data.eval"
        raise ValueError(
            f"{setting} with {missing}: nothing is evaluated. Set data.eval and eval.every, or remove "
            f"{setting.partition(' ')[0]}"
        )
    if checkpoint.keep_best and evaluation.overlap_training:
        raise ValueError(
            "checkpoint.keep_best = true with eval.overlap_training = true: when the result of an evaluation "
            "arrives, the weights have changed. Remove one of them"
        )
    returns_ids = rollout.engine == "vllm" and rollout.has_filters
    if has_prompts and returns_ids and evaluation.temperature and not evaluation.top_k:
        raise ValueError(
            f"eval.top_k = 0 with eval.temperature = {evaluation.temperature}, rollout.engine = 'vllm' and rollout "
            "filters: a vLLM server that returns the allowed token ids rejects requests without top_k. Set "
            "eval.top_k (4096 excludes almost nothing), or eval.temperature = 0"
        )


def check_accepted_keys(checkpoint: CheckpointConfig, config: type[Section]) -> None:
    """Check that the changes that are accepted are of keys."""
    accepted = checkpoint.accept_changes
    for key in [] if isinstance(accepted, bool) else accepted:
        table: Any = config
        for part in key.split("."):
            if part not in table.known_fields():
                raise ValueError(f"checkpoint.accept_changes names {key!r}, which is no key; expected section.key")
            table = table.known_fields()[part].annotation
            # A user's loss has keys of its own, and tables such as reward.functions have the user's names.
            if not hasattr(table, "known_fields") or part == "loss":
                break


def check_colocated(rollout: RolloutConfig, train: TrainConfig, evaluation: EvalConfig) -> None:
    """Check that nothing samples while the policy trains on the same GPUs."""
    if rollout.servers.colocated and (train.max_staleness or evaluation.overlap_training):
        raise ValueError(
            "rollout.servers.colocated = true: the servers have no GPU memory while the policy trains. Set "
            "train.max_staleness = 0 and remove eval.overlap_training, or give the servers separate GPUs"
        )
