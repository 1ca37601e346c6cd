"""Names of configuration keys in other frameworks, for hints at unknown keys."""

from collections.abc import Mapping

_NAMES_BY_KEY = {
    "optimizer.lr": "learning_rate",
    "optimizer.lr_warmup_steps": "warmup_steps lr_warmup_iters warmup_ratio",
    "optimizer.clip_grad": "max_grad_norm grad_clip",
    "rollout.samples_per_prompt": "num_generations n_samples_per_prompt group_size rollouts_per_example",
    "rollout.prompts_per_step": (
        "rollout_batch_size train_batch_size gen_batch_size per_device_train_batch_size generation_batch_size"
    ),
    "rollout.max_new_tokens": "max_response_length max_completion_length rollout_max_response_len max_tokens",
    "data.max_prompt_tokens": "max_prompt_length",
    "data.train": "train_files prompt_data dataset_name",
    "data.eval": "val_files eval_prompt_data",
    "data.prompt_key": "input_key",
    "train.epochs": "ppo_epochs num_iterations",
    "train.max_staleness": "max_async_level max_off_policy_steps",
    "train.micro_batch_tokens": "ppo_max_token_len_per_gpu max_tokens_per_gpu",
    "train.advantage": "adv_estimator advantage_estimator scale_rewards",
    "train.layer_noise.std": "use_perturbation perturb_std",
    "train.layer_noise.lr": "perturb_lr",
    "loss.name": "loss_mode loss_type importance_sampling_level",
    "loss.clip_ratio_low": "eps_clip epsilon clip_ratio",
    "loss.clip_ratio_high": "eps_clip_high epsilon_high",
    "loss.dual_clip": "clip_ratio_c delta",
    "loss.kl_coef": "beta kl_loss_coef",
    "loss.entropy_coef": "entropy_coeff",
    "loss.aggregation": "loss_agg_mode",
    "reward.function": "rm_type custom_rm_path reward_funcs reward_weights",
    "model.path": "hf_checkpoint model_name_or_path",
    "model.reference_path": "ref_load",
    "checkpoint.save_every": "save_interval save_freq save_steps",
    "eval.every": "eval_interval test_freq eval_steps eval_strategy",
    "run.num_steps": "total_training_steps max_steps num_rollout",
    "run.num_epochs": "total_epochs num_train_epochs",
    "log.wandb_project": "project_name",
    "train.router_replay": "use_routing_replay use_rollout_routing_replay",
    "train.mini_batches": "gradient_accumulation_steps steps_per_generation",
    "optimizer.lr_decay_style": "lr_scheduler_type",
    "optimizer.adam_eps": "adam_epsilon",
    "checkpoint.keep": "save_total_limit",
    "checkpoint.resume": "resume_from_checkpoint",
    "log.trackers": "report_to",
    "log.rollouts_every": "log_completions",
    "model.dtype": "bf16 fp16 torch_dtype",
    "model.transformer": "gradient_checkpointing",
    "loss.mismatch": "vllm_importance_sampling_correction",
    "loss.mismatch_high": "vllm_importance_sampling_cap vllm_importance_sampling_clip_max",
    "rollout.engine": "use_vllm",
    "rollout.servers.colocated": "vllm_mode",
    "rollout.servers.urls": "vllm_server_base_url vllm_server_host",
    "rollout.vllm": "vllm_gpu_memory_utilization vllm_tensor_parallel_size",
    "lora.rank": "use_peft lora_r",
    "lora.alpha": "lora_alpha",
    "lora.target_modules": "lora_target_modules",
}
FOREIGN_KEY_NAMES: Mapping[str, str] = {name: key for key, names in _NAMES_BY_KEY.items() for name in names.split()}
"""Name in TRL, verl, slime, prime-rl or Megatron, mapped to the key here."""
FOREIGN_KEY_NOTES: Mapping[str, str] = {
    "per_device_train_batch_size": "TRL counts responses of a device, here are prompts of a step: "
    "per_device_train_batch_size * steps_per_generation * processes / num_generations",
    "generation_batch_size": "TRL counts responses, here are prompts: generation_batch_size / num_generations",
    "gradient_accumulation_steps": "updates of a step: steps_per_generation / gradient_accumulation_steps, by TRL's "
    "default 1. Rows are packed up to train.micro_batch_tokens",
    "steps_per_generation": "updates of a step: steps_per_generation / gradient_accumulation_steps",
    "warmup_ratio": "in steps here, there a part of all steps",
    "bf16": '"bf16" is the default',
    "gradient_checkpointing": "recompute_granularity, with recompute_method and recompute_num_layers",
    "vllm_gpu_memory_utilization": "gpu-memory-utilization there, under vLLM's own name",
    "vllm_tensor_parallel_size": "tensor-parallel-size there, under vLLM's own name",
}
REMOVED_KEYS: Mapping[str, str] = {
    "warmup": "a run starts from a model with weights. Fix: make one by `megatron-dppo base SOURCE FOLDER --steps N`, "
    "with SOURCE = warmup.data and N = warmup.num_steps (an older version has left it in RUN/base). Set model.path to "
    "that folder, and remove [warmup] and model.random_init",
}
"""Replacements of keys and sections that the trainer no longer has."""
