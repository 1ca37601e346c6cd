export WORLD_SIZE=${WORLD_SIZE:-1}
GROUP=16
SP=1
TOKENS=$(((8192 + 2048 + 1000) / SP))
MODEL_PATH=${MODEL_PATH:-}
CODE_PATH=${CODE_PATH:-}
if [ -z "$MODEL_PATH" ]; then
    echo "MODEL_PATH is not set"
    exit 1
fi
train_files="[\"$CODE_PATH/train/code.pkl\",\"$CODE_PATH/train/math.pkl\"]"
NAME=7B_L$((8192 / 1024))k-$(basename $MODEL_PATH)-gs${GROUP}
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo data.train_files=$train_files data.train_batch_size=256 \
    data.max_prompt_length=2048 data.max_response_length=8192 actor_rollout_ref.model.path=$MODEL_PATH \
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.entropy_coeff=0.0 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$TOKENS \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=$SP \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=$GROUP \
    trainer.experiment_name=$NAME trainer.n_gpus_per_node=8 trainer.nnodes=$WORLD_SIZE \
    trainer.total_epochs=30 "${@:1}"
