BACKEND=${BACKEND:-vllm}
QUANTIZATION=${QUANTIZATION:-}
if [ -n "${QUANTIZATION}" ] && [ "${BACKEND}" != trtllm ]; then exit 1; fi
pp=${PP:-2}; vpp=${VPP:-2}
[ "${pp}" -gt 1 ] && vpp_override=${vpp} || vpp_override=null
if [ "${TP:-4}" = 4 ] || [ "${TP:-4}" = 2 ]; then seqs=1024; else seqs=384; fi
ACTOR=(
    actor_rollout_ref.actor.optim.lr=1e-5
    actor_rollout_ref.actor.ppo_mini_batch_size=16
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=30720
    actor_rollout_ref.actor.use_kl_loss=False
    actor_rollout_ref.actor.kl_loss_coef=0.0
    actor_rollout_ref.actor.entropy_coeff=0
    actor_rollout_ref.actor.clip_ratio_low=0.2
    actor_rollout_ref.actor.clip_ratio_high=0.28
    actor_rollout_ref.actor.clip_ratio_c=10.0
    actor_rollout_ref.actor.loss_agg_mode=token-mean
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=${pp}
    actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size=${vpp_override}
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=2
    actor_rollout_ref.actor.megatron.context_parallel_size=1
)
EXTRA=(model_engine=megatron)
if [ "${BACKEND}" = trtllm ]; then
    EXTRA+=(actor_rollout_ref.actor.clip_ratio_high=0.5)
fi
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False algorithm.kl_ctrl.kl_coef=0.0 \
    data.train_files="$PWD/train.parquet" data.train_batch_size=512 data.truncation=left \
    data.filter_overlong_prompts=False data.max_prompt_length=2048 data.max_response_length=8192 \
    actor_rollout_ref.model.path="${MODEL_PATH:-/models/Qwen3-30B-A3B-Base}" "${ACTOR[@]}" \
    actor_rollout_ref.rollout.name=${BACKEND} actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.max_num_seqs=${seqs} actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    reward_model.reward_manager=dapo \
    +reward_model.reward_kwargs.overlong_buffer_cfg.enable=True \
    +reward_model.reward_kwargs.overlong_buffer_cfg.len=4096 \
    +reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0 \
    trainer.n_gpus_per_node=8 trainer.total_epochs=1000 "${EXTRA[@]}" "$@"
