rollout_mode="async"
if [ "$rollout_mode" = "async" ]; then return_raw_chat="True"; fi
train_bsz=512
mini=32
required=1
trigger=$((train_bsz / ( mini * required)))
total=$(((train_bsz * 400)))
ray job submit --no-wait --address "${RAY_ADDRESS:-http://localhost:8265}" \
    -- python3 -m verl.experimental.fully_async_policy.fully_async_main \
    --config-path=config --config-name='fully_async_ppo_trainer.yaml' \
    data.train_files=/data/train.parquet data.truncation='left' data.return_raw_chat=${return_raw_chat} \
    data.max_prompt_length=$((1024 * 2)) data.max_response_length=$((1024 * 20)) \
    data.train_batch_size=0 data.gen_batch_size=1 algorithm.adv_estimator=grpo \
    actor_rollout_ref.model.path=/models/Qwen3-30B-A3B-Base \
    actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.actor.kl_loss_coef=0.0 \
    actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.clip_ratio_c=10.0 actor_rollout_ref.actor.loss_agg_mode="token-mean" \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=22528 actor_rollout_ref.actor.ulysses_sequence_parallel_size=4 \
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.optim.lr_warmup_steps=10 \
    actor_rollout_ref.actor.optim.weight_decay=0.1 actor_rollout_ref.actor.ppo_mini_batch_size=${mini} \
    actor_rollout_ref.actor.fsdp_config.param_offload=False \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=16 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    +reward.reward_kwargs.overlong_buffer_cfg.enable=True +reward.reward_kwargs.overlong_buffer_cfg.len=4096 \
    +reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0 \
    trainer.nnodes=2 trainer.n_gpus_per_node=8 trainer.total_epochs=10 \
    rollout.nnodes=2 rollout.n_gpus_per_node=8 rollout.total_rollout_steps="${total}" \
    async_training.require_batches=${required} async_training.staleness_threshold="0.6" \
    async_training.trigger_parameter_sync_step="${trigger}" async_training.partial_rollout="True"
