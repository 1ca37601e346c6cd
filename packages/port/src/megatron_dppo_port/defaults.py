"""Defaults of other frameworks by version, for settings that a file does not have.

verl: ``verl/trainer/config/_generated_ppo_*_trainer.yaml`` of the wheel or commit. slime: ``slime/utils/arguments.py``
of the commit, and Megatron's arguments. prime-rl: ``packages/prime-rl-configs`` of the commit, and for later versions
the pull requests that changed a default.
"""

from collections.abc import Mapping
from typing import Any

_A = "actor_rollout_ref.actor."
_R = "actor_rollout_ref.rollout."
_C = "algorithm.rollout_correction."
_PARALLEL = ("tensor_model", "pipeline_model", "context", "expert_model")

_VERL: dict[str, Any] = {
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.filter_overlong_prompts": False,
    "data.truncation": "error",
    "algorithm.adv_estimator": "gae",
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.filter_groups.enable": False,
    "trainer.total_epochs": 30,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    "actor_rollout_ref.model.lora_rank": 0,
    "actor_rollout_ref.model.lora_alpha": 16,
    "actor_rollout_ref.model.lora.rank": 0,
    "actor_rollout_ref.model.lora.alpha": 32,
    _A + "ppo_mini_batch_size": 256,
    _A + "ppo_epochs": 1,
    _A + "ppo_max_token_len_per_gpu": 16384,
    _A + "clip_ratio": 0.2,
    _A + "clip_ratio_low": 0.2,
    _A + "clip_ratio_high": 0.2,
    _A + "clip_ratio_c": 3.0,
    _A + "tau_pos": 1.0,
    _A + "tau_neg": 1.05,
    _A + "policy_loss.loss_mode": "vanilla",
    _A + "loss_agg_mode": "token-mean",
    _A + "entropy_coeff": 0.0,
    _A + "use_kl_loss": False,
    _A + "kl_loss_coef": 0.001,
    _A + "kl_loss_type": "low_var_kl",
    _A + "optim.lr": 1e-6,
    _A + "optim.weight_decay": 0.01,
    _A + "optim.betas": [0.9, 0.999],
    _A + "optim.clip_grad": 1.0,
    _A + "optim.lr_warmup_steps": -1,
    _A + "optim.lr_warmup_steps_ratio": 0.0,
    _A + "optim.lr_decay_style": "constant",
    **{f"{_A}megatron.{name}_parallel_size": 1 for name in _PARALLEL},
    _A + "megatron.sequence_parallel": True,
    _R + "n": 1,
    _R + "temperature": 1.0,
    _R + "top_p": 1.0,
    _R + "top_k": -1,
    _R + "val_kwargs.n": 1,
    _R + "val_kwargs.temperature": 0,
    _R + "val_kwargs.top_p": 1.0,
    _R + "val_kwargs.top_k": -1,
    _R + "val_kwargs.do_sample": False,
    _R + "tensor_model_parallel_size": 2,
    _C + "rollout_is_threshold": 2.0,
    _C + "bypass_mode": False,
    "sapo.loss_agg_mode": "seq-mean-token-mean",
    "geo_mean.loss_agg_mode": "seq-mean-token-mean",
}
"""Defaults of verl 0.9.1. Versions from 0.6.1 to its main branch of 22 August 2026 (1dda039) agree, but for GSPO."""
_VERL_OLDER = {**_VERL, "gspo.loss_agg_mode": "seq-mean-token-mean"}
"""``compute_policy_loss_gspo`` ignores ``loss_agg_mode`` in these versions."""
_WITHOUT_CORRECTION = {key: value for key, value in _VERL.items() if not key.startswith(_C)}

_SEPARATE: dict[str, Any] = {"rollout.nnodes": 1, "rollout.n_gpus_per_node": 8, _C + "bypass_mode": True}
"""Settings of both programs whose servers have GPUs of their own."""
FULLY_ASYNC: Mapping[str, Any] = {
    **_SEPARATE,
    "async_training.staleness_threshold": 0.1,
    "async_training.trigger_parameter_sync_step": 4,
    "async_training.require_batches": 1,
    "async_training.partial_rollout": True,
    "rollout.total_rollout_steps": 100,
}
"""``fully_async_policy/config/fully_async_ppo_*_trainer.yaml`` of verl 0.9.1."""
ONE_STEP_ASYNC: Mapping[str, Any] = {**_SEPARATE, "async_training.one_step": True}
"""``one_step_off_policy``. It has no key of its own that says so."""

_SLIME: dict[str, Any] = {
    "advantage-estimator": ["grpo"],
    "loss-type": ["policy_loss"],
    "eps-clip": ["0.2"],
    "kl-coef": ["0.0"],
    "kl-loss-coef": ["0.0"],
    "kl-loss-type": ["k1"],
    "entropy-coef": ["0.0"],
    "tis-clip": ["2.0"],
    "tis-clip-low": ["0"],
    "n-samples-per-prompt": ["1"],
    "rollout-temperature": ["1.0"],
    "rollout-top-p": ["1.0"],
    "rollout-top-k": ["-1"],
    "rollout-num-gpus-per-engine": ["1"],
    "num-gpus-per-node": ["8"],
    "n-samples-per-eval-prompt": ["1"],
    "lr": ["1e-6"],
    "min-lr": ["0.0"],
    "lr-decay-style": ["linear"],
    "lr-warmup-iters": ["0"],
    "weight-decay": ["0.01"],
    "adam-beta1": ["0.9"],
    "adam-beta2": ["0.999"],
    "adam-eps": ["1e-8"],
    "clip-grad": ["1.0"],
    **{f"{name.replace('_', '-')}-parallel-size": ["1"] for name in _PARALLEL},
    "actor-num-nodes": ["1"],
    "actor-num-gpus-per-node": ["8"],
    "seed": ["1234"],
}
"""Defaults of slime at 624b824 (21 August 2026), 0.3.1 and 0.3.0."""

SLIME_ASYNC: Mapping[str, Any] = {"train_async": True}
"""Marks ``train_async.py``, which has no argument of its own for it."""

_PRIME_RL: dict[str, Any] = {
    "orchestrator.batch_size": 128,
    "orchestrator.group_size": 1,
    "orchestrator.max_off_policy_steps": 8,
    "orchestrator.train.sampling.temperature": 1.0,
    "orchestrator.algo.type": "grpo",
    "trainer.loss.type": "default",
    "trainer.loss.dppo_mask_low": 0.2,
    "trainer.loss.dppo_mask_high": 0.2,
    "trainer.loss.ipo_threshold": 0.1,
    "trainer.loss.adv_tau": 1.0,
    "trainer.loss.kl_tau": 1e-3,
    "trainer.optim.type": "adamw",
    "trainer.optim.lr": 1e-6,
    "trainer.optim.weight_decay": 0.01,
    "trainer.optim.betas1": 0.9,
    "trainer.optim.betas2": 0.999,
    "trainer.optim.max_norm": 1.0,
    "trainer.scheduler.type": "constant",
    "trainer.model.seq_len": 2048,
    "trainer.model.lora.rank": 16,
    "trainer.model.lora.alpha": 32.0,
    "deployment.gpus_per_node": 8,
    "deployment.num_infer_gpus": 1,
    "deployment.num_infer_replicas": 1,
    "monitors.wandb.project": "prime-rl",
}
"""Defaults of prime-rl at 559b447 (21 August 2026)."""
_PRIME_RL_09 = {key: value for key, value in _PRIME_RL.items() if "dppo_mask" not in key and "ipo_threshold" not in key}
_PRIME_RL_09 |= {"trainer.loss.type": "ipo", "trainer.loss.eps": 0.3, "trainer.loss.kl_tau": 0.0}

DEFAULTS: dict[str, dict[str, Mapping[str, Any]]] = {
    "verl": {
        "0.9.1": _VERL,
        **dict.fromkeys(("1dda039", "0.9.0", "0.8.0", "0.7.1", "0.6.1"), _VERL_OLDER),
        "0.5.0": {**_WITHOUT_CORRECTION, _R + "name": "vllm"},
    },
    "slime": dict.fromkeys(("624b824", "0.3.1", "0.3.0"), _SLIME),
    "prime-rl": {"0.9.0": _PRIME_RL_09, "559b447": _PRIME_RL},
}
"""Defaults by framework and version, the newest release first."""
