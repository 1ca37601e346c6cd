set -xeuo pipefail
MODEL=${MODEL:-/models/Qwen3-30B-A3B-Base}
MODE=${MODE:-dppo_tv}
case $MODE in
    dppo_tv) DEFAULT_LIMIT=0.15 ;;
    dppo_kl) DEFAULT_LIMIT=0.05 ;;
    vanilla) DEFAULT_LIMIT=0.20 ;;
    *) echo "unknown $MODE"; exit 1 ;;
esac
low=${LOW:-$DEFAULT_LIMIT}
high=${HIGH:-$DEFAULT_LIMIT}
tokens=${TOKENS:-30720}
A=actor_rollout_ref.actor
DATA=(
    algorithm.adv_estimator=grpo
    algorithm.use_kl_in_reward=False
    algorithm.norm_adv_by_std_in_grpo=False
    data.train_files="['${FILE:-/data/train.parquet}']"
    data.train_batch_size=${BATCH:-256}
    data.max_prompt_length=2048
    data.max_response_length=8192
    data.filter_overlong_prompts=True
)
ACTOR=(
    actor_rollout_ref.model.path="$MODEL"
    $A.policy_loss.loss_mode=${MODE}
    $A.loss_agg_mode=seq-mean-token-sum-norm
    $A.clip_ratio_low=${low}
    $A.clip_ratio_high=${high}
    $A.clip_ratio_c=10000.0
    $A.optim.lr=${LR:-1e-6}
    $A.ppo_mini_batch_size=32
    $A.ppo_max_token_len_per_gpu=${tokens}
    $A.use_kl_loss=False
    $A.entropy_coeff=0
    $A.megatron.tensor_model_parallel_size=2
    $A.megatron.pipeline_model_parallel_size=1
    $A.megatron.expert_model_parallel_size=8
    $A.megatron.expert_tensor_parallel_size=1
    $A.megatron.param_offload=True
    $A.megatron.optimizer_offload=True
    +$A.megatron.override_transformer_config.moe_router_dtype=fp32
)
ROLLOUT=(
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.tensor_model_parallel_size=4
    actor_rollout_ref.rollout.n=16
)
LAUNCH=(python3)
if [ "${VERL_USE_UV:-1}" != 0 ] && [ "${DEVICE:-gpu}" = gpu ]; then
    LAUNCH=(uv run --frozen python3)
fi
"${LAUNCH[@]}" -m verl.trainer.main_ppo "${DATA[@]}" "${ACTOR[@]}" "${ROLLOUT[@]}" \
    trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.total_epochs=10 model_engine=megatron "$@"
