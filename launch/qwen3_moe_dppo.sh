#!/usr/bin/env bash
# A Slurm job: inference servers on some nodes, the trainer on the others (made for Qwen3-MoE; any model works).
#
#   sbatch --nodes=6 --gpus-per-node=8 launch/qwen3_moe_dppo.sh [OPTIONS] CONFIG.toml [--section.key VALUE ...]
#
#   --server-nodes N      the first N nodes run servers and no trainer (default 1); 0 = servers beside the trainer on
#                         the job's only node (the default there), on the GPUs after the trainer's
#   --nproc-per-node N    trainer ranks on each of the other nodes (default: the GPUs of a node, or 1 without any)
#   --shared DIR          folder that all nodes see, for addresses and the servers' output
#                         (default: megatron_dppo-JOBID where sbatch was called)
#   --help                this text
#
# Everything else goes to the trainer: overrides of CONFIG, and Megatron's own flags, such as
# --tensor-model-parallel-size 2 --expert-model-parallel-size 8 --pipeline-model-parallel-size 2.
#
# Each server node starts rollout.servers.count servers. The trainer starts when all are healthy as seen from its first
# node. Weights go from there to the servers over NCCL (rollout.weight_sync.method = "distributed"). With
# rollout.engine = "local" every node trains; so it does with rollout.servers.urls, whose servers are only checked.
#
# Environment:
#   PYTHON                   interpreter with megatron_dppo, the same path on all nodes (default python3)
#   MEGATRON_DPPO_API_KEY    key of the servers (default: a new random one for each start of the job)
#
# Before the time limit (#SBATCH --signal), at `scancel --signal=TERM --batch JOBID` and at preemption the trainer
# finishes its step and saves; then the job queues itself again and goes on from there. At preemption the servers get
# SIGTERM too and go on for 100 seconds: the partition needs a GraceTime that is enough for one step and a checkpoint.
# A server that ends, ends the job with exit code 1.
#SBATCH --job-name=megatron_dppo
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --signal=B:TERM@120
set -euo pipefail

usage() { sed -n '2,/^set /{/^set /d;/^#SBATCH/d;s/^# \{0,1\}//;p}' "$0"; }
say() { echo "launch: $*" >&2; }
fail() {
    say "$1"
    exit "${2:-2}"
}

server_nodes="" nproc="" shared=""
arguments=()
while [ $# -gt 0 ]; do
    case $1 in
    --server-nodes=* | --nproc-per-node=* | --shared=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
    esac
    case $1 in
    --help | -h)
        usage
        exit 0
        ;;
    --server-nodes | --nproc-per-node | --shared)
        [ $# -gt 1 ] || fail "$1 needs a value"
        case $1 in
        --server-nodes) server_nodes=$2 ;;
        --nproc-per-node) nproc=$2 ;;
        --shared) shared=$2 ;;
        esac
        shift
        ;;
    *) arguments+=("$1") ;;
    esac
    shift
done
config=${arguments[0]:-}
if [ -z "$config" ] || [ "${config#-}" != "$config" ]; then
    usage >&2
    exit 2
fi
[ -n "${SLURM_JOB_ID:-}" ] || fail "not inside of a Slurm job; submit this script: sbatch $0 ..."
overrides=("${arguments[@]:1}")
python=${PYTHON:-python3}
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
mode=$("$python" -m megatron_dppo.cli.main serve "$config" "${overrides[@]}" --print-mode)

# Who does what.
if [ "$mode" != start ]; then
    [ "${server_nodes:-0}" = 0 ] || fail "--server-nodes $server_nodes, but this configuration starts no servers; leave it out"
    server_nodes=0
fi
: "${server_nodes:=$((${#nodes[@]} > 1 ? 1 : 0))}" "${nproc:=${SLURM_GPUS_ON_NODE:-1}}"
[[ $server_nodes =~ ^[0-9]+$ ]] || fail "--server-nodes = '$server_nodes': expected a number of nodes"
[[ $nproc =~ ^[1-9][0-9]*$ ]] || fail "--nproc-per-node = '$nproc': expected a number of ranks"
[ "$server_nodes" -lt "${#nodes[@]}" ] ||
    fail "--server-nodes $server_nodes leaves no node to the trainer: the job has ${#nodes[@]} (${nodes[*]})"
trainer_nodes=("${nodes[@]:server_nodes}")
serving_nodes=("${nodes[@]:0:server_nodes}")
serve_options=(--grace 100)
if [ "$mode" = start ] && [ "$server_nodes" = 0 ]; then
    [ "${#nodes[@]}" = 1 ] || fail "--server-nodes 0 is for one node, the job has ${#nodes[@]}; use at least 1"
    serving_nodes=("${nodes[0]}")
    serve_options+=(--skip-gpus "$nproc")
fi
shared=${shared:-$PWD/megatron_dppo-$SLURM_JOB_ID}

address() { scontrol -o show node "$1" | sed -n 's/.* NodeAddr=\([^ ]*\) .*/\1/p'; }
list() { (IFS=, && echo "$*"); }
# Steps share nodes where they have to (--overlap); the programs limit their own threads.
step() {
    srun --job-name="$1" --cpus-per-task="$2" --overlap --overcommit --cpu-bind=none --kill-on-bad-exit=1 --input=none "${@:3}"
}
# Not by kill: after a SIGTERM srun kills its tasks within KillWait, which may be too short for a step and a checkpoint.
signal_steps() {
    squeue --noheader --steps --jobs="$SLURM_JOB_ID" --format="%i %j" | while read -r id name; do
        if [ "$name" = "$2" ]; then scancel --signal="$1" "$id" || true; fi
    done
}

declare -A servers=()
trainer="" stopping=""

# shellcheck disable=SC2329  # called by the traps
end_servers() {
    [ ${#servers[@]} -gt 0 ] || return 0
    signal_steps INT servers
    local pid
    for pid in "${!servers[@]}"; do wait "$pid" 2>/dev/null || true; done
    servers=()
}
# shellcheck disable=SC2329
end_trainer() {
    [ -n "$trainer" ] || return 0
    signal_steps TERM trainer
    for _ in {1..60}; do
        kill -0 "$trainer" 2>/dev/null || return 0
        sleep 1
    done
    say "the trainer did not end in a minute; Slurm ends it"
}
# shellcheck disable=SC2329
finish() {
    local code=$?
    trap '' TERM
    end_trainer
    end_servers
    exit "$code"
}
# shellcheck disable=SC2329
stop() {
    stopping=1
    say "SIGTERM: the trainer finishes its step and saves"
    signal_steps TERM trainer
}
preempted() { scontrol -o show job "$SLURM_JOB_ID" | grep -q ' PreemptTime=[0-9]'; }
requeue() {
    end_servers
    say "queueing the job again"
    scontrol requeue "$SLURM_JOB_ID" || fail "the job cannot be queued again; submit it once more, it goes on" 0
    exit 0
}
trap finish EXIT
trap stop TERM

# The servers.
rank_cpus=$((SLURM_CPUS_ON_NODE / nproc > 0 ? SLURM_CPUS_ON_NODE / nproc : 1))
first=${trainer_nodes[0]}
MASTER_ADDR=$(address "$first")
export MASTER_ADDR
if [ "$mode" = start ]; then
    MEGATRON_DPPO_API_KEY=${MEGATRON_DPPO_API_KEY:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}
    export MEGATRON_DPPO_API_KEY
    overrides=(--rollout.servers.api_key_env MEGATRON_DPPO_API_KEY "${overrides[@]}")
    mkdir -p "$shared"
    rm -f "$shared"/urls-*
    for node in "${serving_nodes[@]}"; do
        step servers "$SLURM_CPUS_ON_NODE" --nodes=1 --ntasks=1 --nodelist="$node" \
            "$python" -m megatron_dppo.cli.main serve "$config" "${overrides[@]}" \
            --rollout.servers.host "$(address "$node")" "${serve_options[@]}" \
            --urls-file "$shared/urls-$node" --log-dir "$shared/servers-$node" &
        servers[$!]=$node
    done
    for node in "${serving_nodes[@]}"; do
        until [ -e "$shared/urls-$node" ]; do
            [ -z "$stopping" ] || requeue
            for pid in "${!servers[@]}"; do
                kill -0 "$pid" 2>/dev/null || fail "the servers on ${servers[$pid]} did not start; the message above says why" 1
            done
            sleep 1
        done
    done
    urls=$(for node in "${serving_nodes[@]}"; do cat "$shared/urls-$node"; done | sed 's/.*/"&"/' | paste -sd,)
    overrides+=(--rollout.servers.urls "[$urls]")
fi
if [ "$mode" != none ]; then
    overrides=(--rollout.weight_sync.host "$MASTER_ADDR" "${overrides[@]}")
    # The servers may be well and their addresses unreachable from here.
    step check 1 --nodes=1 --ntasks=1 --nodelist="$first" \
        "$python" -m megatron_dppo.cli.main serve "$config" "${overrides[@]}" || fail "the trainer's first node $first cannot use the servers" 1
fi
[ -z "$stopping" ] || requeue

# The trainer: one task a rank, not torchrun, which would give the ranks 30 seconds after a SIGTERM.
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000)) LOCAL_WORLD_SIZE=$nproc WORLD_SIZE=$((${#trainer_nodes[@]} * nproc))
say "training on ${#trainer_nodes[@]} nodes (${trainer_nodes[*]}) with $nproc ranks each"
# shellcheck disable=SC2016  # the step's own variables
step trainer "$rank_cpus" --nodes="${#trainer_nodes[@]}" --ntasks="$WORLD_SIZE" --ntasks-per-node="$nproc" \
    --nodelist="$(list "${trainer_nodes[@]}")" --distribution=block \
    bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec "$0" -m megatron_dppo.train "$@"' \
    "$python" "$config" "${overrides[@]}" &
trainer=$!

# A signal interrupts wait; then it is asked again.
while true; do
    ended="" code=0
    wait -n -p ended "${!servers[@]}" "$trainer" || code=$?
    if [ "${ended:-}" = "$trainer" ]; then
        trainer=""
        # At preemption Slurm signals the steps and not this script.
        if [ "$code" = 0 ] && { [ -n "$stopping" ] || preempted; }; then requeue; fi
        exit "$code"
    fi
    if [ -n "${ended:-}" ]; then
        node=${servers[$ended]}
        unset "servers[$ended]"
        if [ -n "$stopping" ]; then continue; fi
        fail "the servers on $node have ended (exit code $code), so the job ends; the message above says why" 1
    fi
done
