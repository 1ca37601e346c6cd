pkill -9 sglang
NVLINK_COUNT=$(nvidia-smi topo -m 2>/dev/null | grep -o 'NV[0-9]' | wc -l)
if [ "$NVLINK_COUNT" -gt 0 ]; then HAS_NVLINK=1; else HAS_NVLINK=0; fi
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/models/shape.sh"
CKPT_ARGS=(
   --hf-checkpoint /root/Qwen3-30B-A3B
   #--hf-checkpoint /root/Qwen3-30B-A3B-FP8
   --ref-load /root/Qwen3-30B-A3B_torch_dist
   --save /root/Qwen3-30B-A3B_slime/
)
ROLLOUT_ARGS=(
   --prompt-data /root/dapo.jsonl --input-key prompt --label-key label --rm-type deepscaler
   --num-rollout 3000 --rollout-batch-size 32 --n-samples-per-prompt 8
   --rollout-max-response-len 8192 --rollout-temperature 1

   --global-batch-size 256
)
PERF_ARGS=(
   --tensor-model-parallel-size 4 --sequence-parallel --pipeline-model-parallel-size 1
   --context-parallel-size 1 --expert-model-parallel-size 8 --expert-tensor-parallel-size 1
   # --micro-batch-size 1
   --use-dynamic-batch-size --max-tokens-per-gpu 20480
)
GRPO_ARGS=(
   --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl
   --entropy-coef 0.00 --eps-clip 0.2 --eps-clip-high 0.28
)
OPTIMIZER_ARGS=(--lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98)
WANDB_ARGS=(
   #--use-wandb
)
SGLANG_ARGS=(--rollout-num-gpus-per-engine 8 --sglang-cuda-graph-bs 1 2 4 $(seq 16 8 256))
RUNTIME_ENV_JSON="{\"env_vars\": {\"NCCL_NVLS_ENABLE\": \"${HAS_NVLINK}\"}}"
ray job submit --address="http://127.0.0.1:8265" --runtime-env-json="${RUNTIME_ENV_JSON}" \
   -- python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate \
   ${MODEL_ARGS[@]} ${CKPT_ARGS[@]} ${ROLLOUT_ARGS[@]} ${OPTIMIZER_ARGS[@]} ${GRPO_ARGS[@]} \
   ${WANDB_ARGS[@]} ${PERF_ARGS[@]} ${SGLANG_ARGS[@]} ${EVAL_ARGS[@]}
