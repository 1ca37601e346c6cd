N=3
FIRST=1
FREQ=()
for ((i=0; i<N; i++)); do
  if (( i < FIRST )); then FREQ+=(0); else FREQ+=(1); fi
done
MODEL_ARGS=(--num-layers $N --moe-aux-loss-coeff 0 --moe-layer-freq "[$(IFS=,; echo "${FREQ[*]}")]")
