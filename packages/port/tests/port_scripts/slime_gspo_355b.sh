MASTER_ADDR=${MASTER_ADDR:-}
if [ -z "${MASTER_ADDR}" ]; then
  echo "MASTER_ADDR is not set"
  exit 1
fi
for WORKER_IP in $(awk '{print $1}' "${HOSTFILE}"); do
  if [[ "${WORKER_IP}" == "${MASTER_ADDR}" ]]; then continue; fi
  ssh root@"${WORKER_IP}" "pkill -9 sglang" &
done
ROLLOUT_ARGS=(
   --prompt-data $BASE_DIR/dapo.jsonl --num-rollout 3000 --rollout-batch-size 128 --n-samples-per-prompt 8
   --rollout-max-response-len 32768 --over-sampling-batch-size 256
   --dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std
   --num-steps-per-rollout 4 --rollout-stop-token-ids 151329 151336
   --eval-interval 20 --eval-prompt-data aime $BASE_DIR/aime.jsonl
)
PERF_ARGS=(
   --tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 4
   --context-parallel-size 2 --expert-model-parallel-size 16 --max-tokens-per-gpu 16384
   --decoder-last-pipeline-num-layers 23 --moe-token-dispatcher-type flex --moe-enable-deepep
)
GRPO_ARGS=(--advantage-estimator gspo --kl-loss-coef 0.00 --kl-coef 0.00 --eps-clip 1e-4 --eps-clip-high 2e-4
   --use-tis)
ray job submit -- python3 train.py --actor-num-nodes ${ACTOR_NUM_NODES:-8} --actor-num-gpus-per-node 8 \
   --hf-checkpoint $BASE_DIR/GLM-4.7 ${ROLLOUT_ARGS[@]} ${GRPO_ARGS[@]} ${PERF_ARGS[@]} --lr 1e-6
