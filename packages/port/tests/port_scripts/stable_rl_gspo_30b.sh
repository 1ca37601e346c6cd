DATA_ROOT=${DATA_ROOT:-$PWD}
backend=megatron # fsdp, megatron
adv_estimator=grpo
loss_mode=gspo
ACTOR_FSDP_CONFIG="
    actor_rollout_ref.actor.fsdp_config.strategy=$backend \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=4"
ACTOR_MEGATRON_CONFIG="
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \
    actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size=null \
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=8 \
    actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1"
ACTOR_CONFIG="
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.model.path=/models/Qwen3-30B-A3B-Base \
    actor_rollout_ref.actor.use_kl_loss=False \
    actor_rollout_ref.actor.clip_ratio_low=3e-4 \
    actor_rollout_ref.actor.clip_ratio_high=4e-4 \
    actor_rollout_ref.actor.clip_ratio_c=10.0 \
    actor_rollout_ref.actor.policy_loss.loss_mode=${loss_mode}
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$(((2048 + 8192) * 3))"
CRITIC_CONFIG="critic.optim.lr=2e-6"
if [[ $backend == "megatron" ]]; then
    CONFIG_NAME=ppo_megatron_trainer
    ACTOR_CONFIG="$ACTOR_CONFIG $ACTOR_MEGATRON_CONFIG"
    if [[ $adv_estimator == "gae" ]]; then
        CRITIC_CONFIG="$CRITIC_CONFIG ${ACTOR_MEGATRON_CONFIG//actor_rollout_ref.actor/critic}"
    else
        CRITIC_CONFIG=""
    fi
else
    CONFIG_NAME=ppo_trainer
    ACTOR_CONFIG="$ACTOR_CONFIG $ACTOR_FSDP_CONFIG"
fi
python3 -m verl.trainer.main_ppo --config-path=./config --config-name=$CONFIG_NAME \
    algorithm.adv_estimator=$adv_estimator algorithm.gamma=1.0 \
    data.train_files="$DATA_ROOT/train.parquet" data.train_batch_size=256 \
    data.max_prompt_length=2048 data.max_response_length=8192 \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=16 \
    trainer.n_gpus_per_node=$WORKER_GPU trainer.nnodes=$WORKER_NUM trainer.total_training_steps=500 \
    $ACTOR_CONFIG \
    $CRITIC_CONFIG
