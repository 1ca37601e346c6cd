MODE=${MODE:-R3}
ENABLE=${ENABLE:-}
prompt=${PROMPT:-}
response=${RESPONSE:-}
tokens=${TOKENS:-}
prompt=${prompt:-512}
response=${response:-512}
if [ -z "$ENABLE" ]; then
    if [ "$MODE" = "R3" ]; then ENABLE=True; else ENABLE=False; fi
fi
tokens=${tokens:-$(((prompt + response) * 2))}
ACTOR=(
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=3
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=${tokens}
    actor_rollout_ref.actor.use_kl_loss=False
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=${PP:-6}
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=8
    actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1
    actor_rollout_ref.actor.megatron.router_replay.mode=${MODE}
    +actor_rollout_ref.actor.megatron.override_transformer_config.moe_token_dispatcher_type=flex
)
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo data.train_files=/data/train.parquet data.train_batch_size=3 \
    data.max_prompt_length=${prompt} data.max_response_length=${response} \
    actor_rollout_ref.model.path=/models/Qwen3-30B-A3B "${ACTOR[@]}" \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.enable_rollout_routing_replay=${ENABLE} \
    trainer.n_gpus_per_node=8 trainer.nnodes=${NNODES:-6} trainer.total_training_steps=50000
