MODEL_DIR=${MODEL_DIR:-/root/Qwen3.5-9B}
ROLLOUT_ARGS=(
   --rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async

   --prompt-data "${DATA_PATH:-/root/dapo.jsonl}" --rm-type deepscaler
   --num-rollout 3 --rollout-batch-size 8 --n-samples-per-prompt 4
   --rollout-max-response-len 2048 --global-batch-size 32
)
PERF_ARGS=(--tensor-model-parallel-size 2 --sequence-parallel --use-dynamic-batch-size --max-tokens-per-gpu 4096)
GRPO_ARGS=(
   --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl
   --eps-clip 0.2 --eps-clip-high 0.28
)
NUM_GPUS=${NUM_GPUS:-8}
ACTOR_GPUS=${ACTOR_GPUS:-4}
ROLLOUT_GPUS=${ROLLOUT_GPUS:-$((NUM_GPUS - ACTOR_GPUS))}
ray job submit -- python3 train_async.py --actor-num-nodes 1 --actor-num-gpus-per-node "${ACTOR_GPUS}" \
   --rollout-num-gpus "${ROLLOUT_GPUS}" --hf-checkpoint "${MODEL_DIR}" \
   ${ROLLOUT_ARGS[@]} ${GRPO_ARGS[@]} ${PERF_ARGS[@]} --lr 1e-6 --lr-decay-style constant --weight-decay 0.1
