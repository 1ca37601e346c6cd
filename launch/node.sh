#!/usr/bin/env bash
# The trainer's ranks of one node, started without torchrun or Slurm: what a pod runs.
#
#   launch/node.sh CONFIG.toml --nproc-per-node N [--section.key VALUE ...]
#
# Environment: NUM_NODES, NODE_RANK (in Kubernetes JOB_COMPLETION_INDEX is taken), MASTER_ADDR (an address of node 0),
# MASTER_PORT (default 29500), PYTHON (default python3).
#
# SIGTERM: every rank finishes its step and saves, in all the time that it gets; torchrun would give 30 seconds.
# When a rank fails, the others end within a minute. The exit code is that of the rank that failed first, which torchrun
# would turn into 1: with 2 and 3 a restart would end the same way (docs/failures.md).
set -euo pipefail

usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; }
fail() {
    echo "node: $1" >&2
    exit 2
}

nproc="" arguments=()
while [ $# -gt 0 ]; do
    case $1 in
    --help | -h)
        usage
        exit 0
        ;;
    --nproc-per-node)
        nproc=${2:-}
        shift
        ;;
    *) arguments+=("$1") ;;
    esac
    shift || break
done
node=${NODE_RANK:-${JOB_COMPLETION_INDEX:-}}
[ ${#arguments[@]} -gt 0 ] || fail "no configuration; see --help"
[[ $nproc =~ ^[1-9][0-9]*$ ]] || fail "--nproc-per-node = '$nproc': expected a number of ranks"
[[ ${NUM_NODES:-} =~ ^[1-9][0-9]*$ ]] || fail "NUM_NODES = '${NUM_NODES:-}' in the environment: expected a number of nodes"
[[ $node =~ ^[0-9]+$ ]] && [ "$node" -lt "$NUM_NODES" ] ||
    fail "NODE_RANK = '$node' in the environment: expected a number below NUM_NODES = $NUM_NODES"
[ -n "${MASTER_ADDR:-}" ] || fail "no MASTER_ADDR in the environment: expected an address of node 0"
export MASTER_ADDR MASTER_PORT=${MASTER_PORT:-29500} WORLD_SIZE=$((NUM_NODES * nproc)) LOCAL_WORLD_SIZE=$nproc
# Megatron overlaps the collectives of tensor and sequence parallelism with GEMMs by the order in one queue, on GPUs
# before Blackwell.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
python=${PYTHON:-python3}
# What the ranks need and you have not set: NCCL's settings as in the servers, and the allocator's.
variables=$("$python" -m megatron_dppo.commands.main serve "${arguments[@]}" --print-rank-variables)
mapfile -t variables <<<"$variables"

declare -A ranks=() # the rank of each process
for ((i = 0; i < nproc; i++)); do
    rank=$((node * nproc + i))
    env ${variables[0]:+"${variables[@]}"} RANK=$rank LOCAL_RANK=$i "$python" -m megatron_dppo.train "${arguments[@]}" &
    ranks[$!]=$rank
done
trap 'echo "node: SIGTERM: the ranks finish their step and save" >&2; kill -TERM "${!ranks[@]}" 2>/dev/null || true' TERM

first=0 last_call=""
while [ ${#ranks[@]} -gt 0 ]; do
    # A signal interrupts wait; then it is asked again.
    ended="" code=0
    wait -n -p ended "${!ranks[@]}" ${last_call:+"$last_call"} || code=$?
    case ${ended:-} in
    "") ;;
    "$last_call")
        last_call=""
        kill -KILL "${!ranks[@]}" 2>/dev/null || true
        ;;
    *)
        rank=${ranks[$ended]}
        unset "ranks[$ended]"
        if [ "$code" != 0 ] && [ "$first" = 0 ]; then
            first=$code
            echo "node: rank $rank ended with exit code $code; the others of this node get a minute" >&2
            kill -TERM "${!ranks[@]}" 2>/dev/null || true
            sleep 60 &
            last_call=$!
        fi
        ;;
    esac
done
[ -z "$last_call" ] || kill "$last_call" 2>/dev/null || true
exit "$first"
