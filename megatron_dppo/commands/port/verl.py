"""Rules for verl's settings (``main_ppo``, FSDP and Megatron workers; verl 0.9.1)."""

from __future__ import annotations

from pathlib import PurePath

from megatron_dppo.commands.port.draft import (
    Draft,
    Rule,
    flag,
    integer,
    items,
    literal,
    map_to,
    number,
    one_or_list,
    text,
    unsupported,
)

_A, _R = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
_ADVANTAGES = {"grpo": "std", "rloo": "leave_one_out", "reinforce_plus_plus": "none"}
_AGGREGATIONS = {
    "token-mean": "token_mean",
    "token-sum": "token_sum",
    "seq-mean-token-mean": "seq_mean_token_mean",
    "seq-mean-token-sum": "seq_mean_token_sum",
    "seq-mean-token-sum-norm": "seq_mean_token_sum_norm",
}
KL_ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_SERVER_FLAGS = {
    "sglang": {"tensor_model_parallel_size": "tp-size", "gpu_memory_utilization": "mem-fraction-static"},
    "vllm": {
        "tensor_model_parallel_size": "tensor-parallel-size",
        "gpu_memory_utilization": "gpu-memory-utilization",
        "max_num_batched_tokens": "max-num-batched-tokens",
        "max_num_seqs": "max-num-seqs",
    },
}
_SPARED = "the weights and the optimizer move to the host while colocated servers sample"
_SCORING = "training and scoring use the same batch"

TABLE: dict[str, Rule] = {
    "data.train_files": map_to("data.train", one_or_list),
    "data.max_prompt_length": map_to("data.max_prompt_tokens", integer),
    "data.max_response_length": map_to("rollout.max_new_tokens", integer),
    "data.prompt_key": map_to("data.prompt_key", text),
    "data.shuffle": unsupported("prompts are always shuffled, by run.seed"),
    "data.return_raw_chat": unsupported("the chat template is always applied"),
    "actor_rollout_ref.model.path": map_to("model.path", text),
    "actor_rollout_ref.model.lora_rank": map_to("lora.rank", integer),
    "actor_rollout_ref.model.enable_gradient_checkpointing": unsupported(
        "activations: model.transformer.recompute_granularity = 'full' with recompute_method and recompute_num_layers"
    ),
    "actor_rollout_ref.model.use_remove_padding": unsupported("rows are always packed"),
    "actor_rollout_ref.model.use_fused_kernels": unsupported("the fused head is on (model.fused_head)"),
    _A + "ppo_epochs": map_to("train.epochs", integer),
    _A + "optim.lr": map_to("optimizer.lr", number),
    _A + "optim.weight_decay": map_to("optimizer.weight_decay", number),
    _A + "use_torch_compile": unsupported("no torch.compile"),
    _A + "optim.override_optimizer_config.optimizer_cpu_offload": map_to("optimizer.optimizer_cpu_offload", flag),
    _A + "optim.override_optimizer_config.optimizer_offload_fraction": map_to(
        "optimizer.optimizer_offload_fraction", number
    ),
    _A + "optim.override_optimizer_config.overlap_cpu_optimizer_d2h_h2d": map_to(
        "optimizer.overlap_cpu_optimizer_d2h_h2d", flag
    ),
    _A + "optim.override_optimizer_config.use_precision_aware_optimizer": map_to(
        "optimizer.use_precision_aware_optimizer", flag
    ),
    _A + "optim.lr_warmup_steps": map_to("optimizer.lr_warmup_steps", lambda value: max(0, integer(value))),
    _A + "optim.lr_decay_style": map_to("optimizer.lr_decay_style", text),
    _A + "optim.min_lr": map_to("optimizer.min_lr", number),
    _A + "optim.clip_grad": map_to("optimizer.clip_grad", number),
    _A + "grad_clip": map_to("optimizer.clip_grad", number),
    _A + "entropy_coeff": map_to("loss.entropy_coef", number),
    _A + "ulysses_sequence_parallel_size": map_to(
        "parallel.context_parallel_size", integer, "Megatron's context parallelism instead of Ulysses"
    ),
    _A + "megatron.tensor_model_parallel_size": map_to("parallel.tensor_model_parallel_size", integer),
    _A + "megatron.pipeline_model_parallel_size": map_to("parallel.pipeline_model_parallel_size", integer),
    _A + "megatron.virtual_pipeline_model_parallel_size": map_to(
        "parallel.virtual_pipeline_model_parallel_size", integer
    ),
    _A + "megatron.context_parallel_size": map_to("parallel.context_parallel_size", integer),
    _A + "megatron.expert_model_parallel_size": map_to("parallel.expert_model_parallel_size", integer),
    _A + "megatron.expert_tensor_parallel_size": map_to("parallel.expert_tensor_parallel_size", integer),
    _A + "ppo_max_token_len_per_gpu": map_to("train.micro_batch_tokens", integer),
    _A + "ppo_micro_batch_size_per_gpu": unsupported("rows are packed up to train.micro_batch_tokens"),
    _A + "use_dynamic_bsz": unsupported("rows are always packed up to train.micro_batch_tokens"),
    _R + "n": map_to("rollout.samples_per_prompt", integer),
    _R + "temperature": map_to("rollout.temperature", number),
    _R + "top_p": map_to("rollout.top_p", number),
    _R + "top_k": map_to("rollout.top_k", lambda value: max(0, integer(value))),
    _R + "calculate_log_probs": unsupported("the rollout's log-probabilities are always recorded"),
    _R + "val_kwargs.n": map_to("eval.samples_per_prompt", integer),
    _R + "val_kwargs.temperature": map_to("eval.temperature", number),
    _R + "val_kwargs.top_p": map_to("eval.top_p", number),
    _R + "val_kwargs.top_k": map_to("eval.top_k", lambda value: max(0, integer(value))),
    _R + "val_kwargs.do_sample": unsupported("set by eval.temperature; 0 = greedy"),
    "trainer.logger": unsupported(
        "metrics.jsonl and TensorBoard always; W&B by log.wandb_project, others by log.trackers"
    ),
    "trainer.critic_warmup": unsupported("there is no critic"),
    "trainer.val_before_train": unsupported("the weights before training are always evaluated"),
    "trainer.resume_mode": unsupported("rerunning a command resumes its run (checkpoint.resume)"),
    "trainer.device": unsupported("detected at startup"),
}
PATTERNS: dict[str, Rule] = {
    _A + "megatron.override_transformer_config.": lambda draft, key: map_to(
        "model.transformer." + key.rpartition(".")[2], literal
    )(draft, key),
    _A + "fsdp_config.": unsupported(_SPARED),
    _A + "megatron.": unsupported("Megatron's own default, or set by model.transformer"),
    _A + "strategy": unsupported("Megatron is the only strategy"),
    _A + "checkpoint.": unsupported("checkpoint.* here; docs/checkpoints.md"),
    "actor_rollout_ref.ref.": unsupported("the reference model uses the parallel layout of the policy"),
    _R + "log_prob": unsupported(_SCORING),
    _R: unsupported("a server flag: set it under the server's name in [rollout.sglang] or [rollout.vllm]"),
    "critic.": unsupported("there is no critic: the baseline is the mean reward of the group"),
    "reward_model.": unsupported("reward models run as servers (docs/rewards.md)"),
    "hydra.": unsupported("the launcher's"),
    "ray_": unsupported("no Ray"),
}

DEFAULTS: dict[str, object] = {
    "data.max_prompt_tokens": 512,
    "rollout.max_new_tokens": 512,
    "rollout.prompts_per_step": 1024,
    "optimizer.lr": 1e-6,
    "optimizer.weight_decay": 0.01,
    "optimizer.adam_beta2": 0.999,
}


def combine(draft: Draft) -> None:
    """Translate settings that depend on each other."""
    _sizes(draft)
    _loss(draft)
    _penalties(draft)
    _engine(draft)
    _evaluation(draft)
    _run(draft)


def _sizes(draft: Draft) -> None:
    batch, mini = draft.read("data.train_batch_size", integer), draft.read(_A + "ppo_mini_batch_size", integer)
    if "data.train_batch_size" in draft.unread:
        draft.withheld.add("rollout.prompts_per_step")
    if batch is not None:
        draft.put("rollout.prompts_per_step", batch, "data.train_batch_size")
    if batch and mini and batch % mini == 0:
        draft.put("train.mini_batches", batch // mini, _A + "ppo_mini_batch_size", note=f"{batch} / {mini} prompts")
    more = draft.read("data.gen_batch_size", integer)
    if batch and more and more > batch:
        draft.put("rollout.oversample", more / batch, "data.gen_batch_size", note=f"{more} / {batch} prompts")
    if draft.read("algorithm.filter_groups.enable", flag):
        draft.put("rollout.dynamic_sampling", True, "algorithm.filter_groups.enable")
    if draft.read("data.filter_overlong_prompts", flag):
        draft.put("data.overlong_prompts", "drop", "data.filter_overlong_prompts")
        draft.record("data.truncation", "unsupported", "longer prompts are always dropped")
    elif (truncation := draft.read("data.truncation", text)) in ("left", "error"):
        draft.put("data.overlong_prompts", {"left": "truncate_left"}.get(truncation, "error"), "data.truncation")


def _loss(draft: Draft) -> None:
    mode_key = _A + "policy_loss.loss_mode"
    low_key = _A + "clip_ratio_low"
    high_key = _A + "clip_ratio_high"
    mode = draft.read(mode_key, text, "vanilla")
    both = draft.read(_A + "clip_ratio", number, 0.2)
    low = draft.read(low_key, number, both)
    high = draft.read(high_key, number, both)
    cap = draft.read(_A + "clip_ratio_c", number, 3.0)
    keys: dict[str, tuple[object, str]] = {"name": (f"verl/{mode}", mode_key)}
    if mode in ("dppo_tv", "dppo_kl"):
        keys |= {"divergence_threshold_low": (low, low_key), "divergence_threshold_high": (high, high_key)}
        keys["ratio_cap"] = (cap, _A + "clip_ratio_c")
    elif mode in ("vanilla", "gspo"):
        keys |= {"clip_ratio_low": (low, low_key), "clip_ratio_high": (high, high_key)}
        if mode == "vanilla":
            keys["dual_clip"] = (cap, _A + "clip_ratio_c")
    elif mode == "cispo":
        keys |= {"ratio_floor": (1 - low, low_key), "ratio_cap": (1 + high, high_key)}
    else:
        draft.record(mode_key, "unsupported", f"there is no loss {mode!r}; loss.name keeps its default, DPPO-Binary-TV")
        keys = {}
    for key, (value, theirs) in keys.items():
        if theirs in draft.source or key == "name":
            source = theirs if theirs in draft.source else ""
            note = "" if source else "verl's default"
            draft.put(f"loss.{key}", value, *([source] if source else []), note=note)
        elif _A + "clip_ratio" in draft.source and theirs in (low_key, high_key):
            draft.put(f"loss.{key}", value, _A + "clip_ratio")
    aggregation = draft.read(_A + "loss_agg_mode", text)
    if aggregation in _AGGREGATIONS and mode != "gspo":
        draft.put("loss.aggregation", _AGGREGATIONS[aggregation], _A + "loss_agg_mode")
        if aggregation.endswith("-norm"):
            horizon = draft.read(_A + "loss_scale_factor", integer) or draft.read("data.max_response_length", integer)
            if horizon:
                draft.put("loss.horizon", horizon, note="sums are divided by the longest response")
            draft.record(_A + "loss_scale_factor", "ported", "loss.horizon")
    estimator = draft.read("algorithm.adv_estimator", text, "gae")
    if estimator in _ADVANTAGES:
        scaled = draft.read("algorithm.norm_adv_by_std_in_grpo", flag, True)
        kind = "mean" if estimator == "grpo" and not scaled else _ADVANTAGES[estimator]
        draft.put("train.advantage", kind, "algorithm.adv_estimator", "algorithm.norm_adv_by_std_in_grpo")
        if estimator == "reinforce_plus_plus":
            draft.put("train.advantage_normalization", "batch", note="REINFORCE++")
    else:
        draft.record(
            "algorithm.adv_estimator",
            "unsupported",
            "train.advantage keeps its default, the reward minus the group mean",
        )


def _penalties(draft: Draft) -> None:
    coefficient, kind = _A + "kl_loss_coef", _A + "kl_loss_type"
    value = draft.read(coefficient, number, 0.001)
    if draft.read(_A + "use_kl_loss", flag, False) and value > 0:
        draft.put("loss.kl_coef", value, coefficient)
        estimator = draft.read(kind, lambda v: KL_ESTIMATORS[text(v)])
        if estimator:
            draft.put("loss.kl_estimator", estimator, kind)
    for key in (_A + "use_kl_loss", coefficient, kind):
        draft.record(key, "ported", "see loss.kl_coef")
    reward = draft.read("algorithm.kl_ctrl.kl_coef", number, 0.001)
    if draft.read("algorithm.use_kl_in_reward", flag, False) and reward > 0:
        draft.put("reward.kl_coef", reward, "algorithm.kl_ctrl.kl_coef")
    for key in ("algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef"):
        draft.record(key, "ported", "see reward.kl_coef")
    alpha = "actor_rollout_ref.model.lora_alpha"
    if draft.read("actor_rollout_ref.model.lora_rank", integer, 0):
        value = draft.read(alpha, number)
        if value is not None:
            draft.put("lora.alpha", value, alpha)
    for name in ("actor_rollout_ref.model.lora_rank", alpha):
        draft.record(name, "ported", "no adapters") if not draft.read(name, integer, 1) else None


def _engine(draft: Draft) -> None:
    engine = draft.read(_R + "name", text)
    if engine not in _SERVER_FLAGS:
        return
    draft.put("rollout.engine", engine, _R + "name")
    draft.put("rollout.servers.colocated", True, note="as in verl's hybrid engine; false = servers on separate GPUs")
    draft.put("rollout.weight_sync.method", "ipc", note="servers on the trainer's GPUs")
    for theirs, ours in _SERVER_FLAGS[engine].items():
        value = draft.read(_R + theirs, literal)
        if value is not None:
            draft.put(f"rollout.{engine}.{ours}", value, _R + theirs)


def _evaluation(draft: Draft) -> None:
    every = draft.read("trainer.test_freq", integer, -1)
    if every > 0:
        draft.put("eval.every", every, "trainer.test_freq")
        files = draft.read("data.val_files", items, [])
        sets = files[0] if len(files) == 1 else {PurePath(f).stem or str(i): f for i, f in enumerate(files)}
        if files:
            draft.put("data.eval", sets, "data.val_files")
    else:
        for key in ("trainer.test_freq", "data.val_files"):
            draft.record(key, "unsupported", "trainer.test_freq is not above 0: no evaluation")


def _run(draft: Draft) -> None:
    steps, epochs = draft.read("trainer.total_training_steps", integer), draft.read("trainer.total_epochs", number)
    if steps:
        draft.put("run.num_steps", steps, "trainer.total_training_steps")
        draft.record("trainer.total_epochs", "unsupported", "trainer.total_training_steps sets the length")
    elif epochs:
        draft.put("run.num_epochs", epochs, "trainer.total_epochs")
    elif "trainer.total_epochs" not in draft.source:
        draft.put("run.num_epochs", 30.0, note="verl's default")
    every = draft.read("trainer.save_freq", integer, -1)
    if every > 0:
        draft.put("checkpoint.save_every", every, "trainer.save_freq")
    draft.record(
        "trainer.save_freq", "unsupported", "only the last checkpoint is saved: checkpoint.save_every stays unset"
    )
    project, name = draft.read("trainer.project_name", text), draft.read("trainer.experiment_name", text)
    if project and "wandb" in str(draft.source.get("trainer.logger", "")):
        draft.put("log.wandb_project", project, "trainer.project_name")
    trackers = [
        name for name in ("mlflow", "swanlab", "trackio") if name in str(draft.source.get("trainer.logger", ""))
    ]
    if trackers:
        draft.put("log.trackers", trackers, "trainer.logger")
        if project:
            draft.put("log.project", project, "trainer.project_name")
    draft.record("trainer.project_name", "unsupported", "no enabled tracker has projects")
    folder = draft.read("trainer.default_local_dir", text)
    if folder:
        draft.put("run.output_dir", folder, "trainer.default_local_dir")
        draft.record("trainer.experiment_name", "unsupported", "trainer.default_local_dir names the folder")
    elif name:
        draft.put("run.output_dir", f"runs/{name}", "trainer.experiment_name", note="the folder of the run")
    path, function = draft.read("custom_reward_function.path", text), draft.read("custom_reward_function.name", text)
    if path:
        both = f"{path}:{function or 'compute_score'}"
        draft.put("reward.function", both, "custom_reward_function.path", "custom_reward_function.name")
    nodes, gpus = draft.read("trainer.nnodes", integer, 1), draft.read("trainer.n_gpus_per_node", integer)
    draft.num_processes = nodes * gpus if gpus else None
    for key in ("trainer.nnodes", "trainer.n_gpus_per_node"):
        draft.record(key, "ported", "torchrun's --nnodes and --nproc-per-node")
