#!/usr/bin/env bash
# A Slurm job: inference servers on some nodes, the trainer on the others (made for Qwen3-MoE; any model works).
#
#   sbatch --nodes=6 --gpus-per-node=8 launch/qwen3_moe_dppo.sh [OPTIONS] CONFIG.toml [--section.key VALUE ...]
#
#   --server-nodes N      the first N nodes run servers and no trainer (default 1); 0 = servers beside the trainer on
#                         the job's only node (the default there), on the GPUs after the trainer's. Not with
#                         rollout.servers.colocated = true: then every node trains, and has servers on the same GPUs
#   --nproc-per-node N    trainer ranks on each of the other nodes (default: the GPUs of a node, or 1 without any)
#   --max-restarts N      times in a row that the job is queued again after a crash without a newer checkpoint
#                         (default 3; 0 = never)
#   --shared DIR          folder that all nodes see, for addresses, output of servers and ranks, and the count of
#                         restarts (default: megatron_dppo-JOBID where sbatch was called)
#   --srun-args "ARGS"    added to every srun, such as "--container-image=IMAGE --container-mounts=/shared:/shared"
#   --help                this text
#
# Everything else goes to the trainer: overrides of CONFIG, and Megatron's own flags, such as
# --tensor-model-parallel-size 2 --expert-model-parallel-size 8 --pipeline-model-parallel-size 2.
#
# Each server node starts rollout.servers.count servers, or its part of one that spans nnodes nodes. The trainer starts when all are healthy as seen from its first
# node. Weights go from there to the servers over NCCL (rollout.weight_sync.method = "distributed"). With
# rollout.engine = "local" every node trains; so it does with rollout.servers.urls, whose servers are only checked.
#
# Environment:
#   PYTHON                   interpreter with megatron_dppo, the same path on all nodes (default python3)
#   MEGATRON_DPPO_API_KEY    key of the servers (default: a new random one for each start of the job)
#
# The trainer saves after the last step that fits before the time limit, as long as its steps take; then the job queues
# itself again and resumes from there. At the signal before the limit (#SBATCH --signal), at `scancel --signal=TERM
# --batch JOBID` and at preemption the trainer finishes its step and saves, too. When it does not get so far in time, the
# job is queued again all the same and resumes from the last checkpoint. At preemption the servers get SIGTERM
# too, and serve until the trainer has ended: the partition needs a GraceTime for a step, an evaluation and a checkpoint.
# At `scancel --signal=USR1 --batch JOBID` the trainer finishes its step and saves, too, and the job ends for good.
# After a crash of the trainer the job queues itself again, too; exit codes 2 and 3 end it: a restart would repeat them.
# A server that dies is restarted. docs/launch.md has the details.
#SBATCH --job-name=megatron_dppo
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --signal=B:TERM@600
set -euo pipefail

usage() { sed -n '2,/^set /{/^set /d;/^#SBATCH/d;s/^# \{0,1\}//;p}' "$0"; }
say() { echo "launch: $*" >&2; }
fail() {
    say "$1"
    exit "${2:-2}"
}

server_nodes="" nproc="" max_restarts=3 shared=""
arguments=() srun_args=()
while [ $# -gt 0 ]; do
    case $1 in
    --server-nodes=* | --nproc-per-node=* | --max-restarts=* | --shared=* | --srun-args=*)
        set -- "${1%%=*}" "${1#*=}" "${@:2}"
        ;;
    esac
    case $1 in
    --help | -h)
        usage
        exit 0
        ;;
    --server-nodes | --nproc-per-node | --max-restarts | --shared | --srun-args)
        [ $# -gt 1 ] || fail "$1 needs a value"
        case $1 in
        --server-nodes) server_nodes=$2 ;;
        --nproc-per-node) nproc=$2 ;;
        --max-restarts) max_restarts=$2 ;;
        --shared) shared=$2 ;;
        --srun-args) read -ra srun_args <<<"$2" ;;
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
[[ ${server_nodes:-0} =~ ^[0-9]+$ ]] || fail "--server-nodes = '$server_nodes': expected a number of nodes"
[[ ${nproc:-1} =~ ^[1-9][0-9]*$ ]] || fail "--nproc-per-node = '$nproc': expected a number of ranks"
[[ $max_restarts =~ ^[0-9]+$ ]] || fail "--max-restarts = '$max_restarts': expected a number, 0 = never"
[ -n "${SLURM_JOB_ID:-}" ] || fail "not inside of a Slurm job; submit this script: sbatch $0 ..."
given=("$config" "${arguments[@]:1}")
overrides=("${arguments[@]:1}")
python=${PYTHON:-python3}
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
shared=${shared:-$PWD/megatron_dppo-$SLURM_JOB_ID}
logs=$shared/trainer

# A step would inherit how the job asked for GPUs: one node of --gpus=16 cannot have all of them, and --gpus-per-task leaves a
# rank one GPU with another number than its own. Every step gets all GPUs of its nodes instead.
gpus_per_node=${SLURM_GPUS_ON_NODE:-0}
gpu_args=()
if [ "$gpus_per_node" != 0 ]; then
    gpu_args=(--gpus-per-node="$gpus_per_node")
    total=${SLURM_GPUS:-} total=${total##*:}
    [ -z "$total" ] || [ "$total" = $((gpus_per_node * ${#nodes[@]})) ] ||
        fail "--gpus=$total does not give ${#nodes[@]} nodes $gpus_per_node GPUs each; use --gpus-per-node"
fi
unset SLURM_GPUS SLURM_GPUS_PER_NODE SLURM_GPUS_PER_TASK SLURM_GPUS_PER_SOCKET SLURM_GPU_BIND SLURM_TRES_BIND SLURM_GRES \
    SLURM_NTASKS_PER_GPU SLURM_CPUS_PER_GPU SLURM_MEM_PER_GPU SLURM_TRES_PER_TASK

address() { scontrol -o show node "$1" | sed -n 's/.* NodeAddr=\([^ ]*\) .*/\1/p'; }
list() { (IFS=, && echo "$*"); }
# Steps share nodes where they have to (--overlap); the programs limit their own threads.
step() {
    srun --job-name="$1" --cpus-per-task="$2" --overlap --overcommit --cpu-bind=none --kill-on-bad-exit=1 --input=none \
        ${gpu_args[0]:+"${gpu_args[@]}"} "${srun_args[@]}" "${@:3}"
}
# A short command of the program, where the trainer runs: there may be a container around it.
ask() { step "$1" 1 --nodes=1 --ntasks=1 --nodelist="${nodes[-1]}" "$python" -m megatron_dppo.commands.main "${@:2}"; }
restarts() {
    ask restarts restarts "$1" "${given[@]}" --record "$shared/restarts-$SLURM_JOB_ID.json" \
        --max-restarts "$max_restarts" "${@:2}"
}
# Not by kill: after a SIGTERM srun kills its tasks within KillWait, which may be too short for a step and a checkpoint.
signal_steps() {
    squeue --noheader --steps --jobs="$SLURM_JOB_ID" --format="%i %j" | while read -r id name; do
        if [ "$name" = "$2" ]; then scancel --signal="$1" "$id" || true; fi
    done
}
seconds_left() { # before the time limit; nothing if there is none
    local end
    end=$(scontrol -o show job "$SLURM_JOB_ID" | sed -n 's/.* EndTime=\([0-9][^ ]*\).*/\1/p') || true
    [ -z "$end" ] || echo $(($(date -d "$end" +%s) - $(date +%s)))
}
job_has() { scontrol -o show job "$SLURM_JOB_ID" | grep -q " $1"; }
preempted() { job_has 'PreemptTime=[0-9]'; }

# Roles of the nodes.
mode=$(ask mode serve "${given[@]}" --print-mode)
# What the ranks need and you have not set: NCCL's settings as in the servers, and the allocator's.
variables=$(ask variables serve "${given[@]}" --print-rank-variables)
mapfile -t variables <<<"$variables"
if [ "$mode" = colocated ]; then
    [ "${server_nodes:-0}" = 0 ] || fail "--server-nodes $server_nodes, but with rollout.servers.colocated = true every node trains; leave it out"
    server_nodes=0
elif [ "$mode" != start ]; then
    [ "${server_nodes:-0}" = 0 ] || fail "--server-nodes $server_nodes, but this configuration starts no servers; leave it out"
    server_nodes=0
fi
: "${server_nodes:=$((${#nodes[@]} > 1 ? 1 : 0))}" "${nproc:=${SLURM_GPUS_ON_NODE:-1}}"
[ "$server_nodes" -lt "${#nodes[@]}" ] ||
    fail "--server-nodes $server_nodes leaves no node to the trainer: the job has ${#nodes[@]} (${nodes[*]})"
trainer_nodes=("${nodes[@]:server_nodes}")
serving_nodes=("${nodes[@]:0:server_nodes}")
serve_options=(--grace 86400) # until this script ends them
if [ "$mode" = start ] && [ "$server_nodes" = 0 ]; then
    [ "${#nodes[@]}" = 1 ] || fail "--server-nodes 0 is for one node, the job has ${#nodes[@]}; use at least 1"
    serving_nodes=("${nodes[0]}")
    serve_options+=(--skip-gpus "$nproc")
fi
# A server may span nodes (nnodes in [rollout.sglang] or [rollout.vllm]): then each of its nodes has a rank, and they meet at the first one.
declare -A node_options=()
if [ "$mode" = start ]; then
    spanned=$(ask nodes serve "${given[@]}" --print-nodes)
    if [ "$spanned" -gt 1 ]; then
        [ $((${#serving_nodes[@]} % spanned)) = 0 ] ||
            fail "--server-nodes ${#serving_nodes[@]} is no multiple of the $spanned nodes of a server (nnodes)"
        for i in "${!serving_nodes[@]}"; do
            head=${serving_nodes[$((i - i % spanned))]}
            node_options[${serving_nodes[$i]}]="--node-rank $((i % spanned)) --dist-init-addr $(address "$head"):28500"
        done
    fi
fi
if [ "$mode" = colocated ]; then serving_nodes=("${nodes[@]}") mode=start; fi

declare -A servers=() starts=()
trainer="" stopping="" ending="" last_call=""
last_seconds=90 # of the job, for queueing it again

ended_within() { # SECONDS PID...
    local end=$((SECONDS + $1)) pid
    for pid in "${@:2}"; do
        while kill -0 "$pid" 2>/dev/null; do
            [ "$SECONDS" -lt "$end" ] || return 1
            sleep 0.5
        done
    done
}
end_servers() {
    [ ${#servers[@]} -gt 0 ] || return 0
    signal_steps INT servers
    ended_within 40 "${!servers[@]}" || say "the servers did not exit within 40 seconds; Slurm stops them"
    servers=()
}
# shellcheck disable=SC2329  # called by the traps
end_trainer() {
    [ -n "$trainer" ] || return 0
    signal_steps TERM trainer
    ended_within 60 "$trainer" || say "the trainer did not exit within a minute; Slurm stops it"
}
# shellcheck disable=SC2329
finish() {
    local code=$?
    trap '' TERM USR1
    [ -z "$last_call" ] || kill "$last_call" 2>/dev/null || true
    end_trainer
    end_servers
    exit "$code"
}
# shellcheck disable=SC2329
stop() { # SIGNAL
    stopping=1
    local left
    left=$(seconds_left)
    [ "${left:-0}" -gt 0 ] || left="" # the job is over: it was cancelled
    say "$1: the trainer finishes its step and saves${left:+; the job has $left seconds left}"
    signal_steps TERM trainer
    # Slurm does not queue a job again that has reached its time limit.
    [ -z "$left" ] || { sleep $((left > last_seconds ? left - last_seconds : 0)) & last_call=$!; }
}
requeue() { # the exit CODE where that cannot be
    end_servers
    if [ -n "$ending" ]; then
        say "the job ends, as SIGUSR1 asked; the same sbatch line resumes the run"
        exit "$1"
    fi
    job_has JobState=RUNNING || fail "the job was canceled, so it is not queued again" "$1"
    say "queueing the job again"
    scontrol requeue "$SLURM_JOB_ID" || fail "the job cannot be queued again; submit it again to resume" "$1"
    exit 0
}
# Each of these queues the job again, or ends it with the code that `restarts` says.
after_crash() { # CODE [ARGUMENTS of restarts]
    if preempted; then after_preemption; fi
    restarts crashed --exit-code "$@" || exit $?
    requeue "$1"
}
after_stop() {
    if preempted; then after_preemption; fi
    restarts stopped || exit $?
    requeue 0
}
after_preemption() {
    restarts preempted || exit $?
    requeue 0
}
# At the first start the configuration is the likely cause.
cannot_start() {
    say "$1"
    if [ "${SLURM_RESTART_COUNT:-0}" = 0 ] && ! preempted; then exit 1; fi
    after_crash 1
}
# shellcheck disable=SC2086  # node_options are several words
start_servers() { # NODE [SECONDS to wait before]
    rm -f "$shared/urls-$1"
    starts[$1]=$((${starts[$1]:-0} + 1))
    {
        sleep "${2:-0}"
        step servers "$SLURM_CPUS_ON_NODE" --nodes=1 --ntasks=1 --nodelist="$1" \
            "$python" -m megatron_dppo.commands.main serve "${serve_arguments[@]}" \
            --rollout.servers.host "$(address "$1")" "${serve_options[@]}" ${node_options[$1]:-} \
            --urls-file "$shared/urls-$1" --log-dir "$shared/servers-$1"
    } &
    servers[$!]=$1
}
# In training. Exit code 2 says that `serve` has given up by itself.
servers_ended() { # PID CODE
    local node=${servers[$1]}
    unset "servers[$1]"
    if [ -n "$stopping" ] || preempted; then return; fi
    [ ! -e "$shared/urls-$node" ] || starts[$node]=0 # they were healthy
    if [ "$2" != 2 ] && [ "${starts[$node]}" -lt 3 ]; then
        say "the servers on $node exited with code $2; they are restarted"
        start_servers "$node" 5 # what was left there ends
    else
        say "the servers on $node exited with code $2 and are not restarted; the message above has the reason." \
            "Server nodes left: ${#servers[@]}"
    fi
}
trap finish EXIT
trap 'stop SIGTERM' TERM
trap 'ending=1; stop SIGUSR1' USR1
restarts begin

# The servers.
rank_cpus=$((SLURM_CPUS_ON_NODE / nproc > 0 ? SLURM_CPUS_ON_NODE / nproc : 1))
first=${trainer_nodes[0]}
MASTER_ADDR=$(address "$first")
export MASTER_ADDR
if [ "$mode" = start ]; then
    MEGATRON_DPPO_API_KEY=${MEGATRON_DPPO_API_KEY:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}
    export MEGATRON_DPPO_API_KEY
    overrides=(--rollout.servers.api_key_env MEGATRON_DPPO_API_KEY "${overrides[@]}")
    serve_arguments=("$config" "${overrides[@]}")
    for node in "${serving_nodes[@]}"; do start_servers "$node"; done
    for node in "${serving_nodes[@]}"; do
        until [ -e "$shared/urls-$node" ]; do
            [ -z "$stopping" ] || after_stop
            for pid in "${!servers[@]}"; do
                kill -0 "$pid" 2>/dev/null || cannot_start "the servers on ${servers[$pid]} did not start; the message above says why"
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
        "$python" -m megatron_dppo.commands.main serve "$config" "${overrides[@]}" ||
        cannot_start "the trainer's first node $first cannot use the servers"
fi
[ -z "$stopping" ] || after_stop

# The trainer: one task a rank, not torchrun, which would give the ranks 30 seconds after a SIGTERM.
free_port() { # the first one from PORT on that nobody answers at: what is left of another job may hold it
    local port=$1
    while timeout 2 bash -c ": <>/dev/tcp/$MASTER_ADDR/$port" 2>/dev/null; do port=$((port + 1)); done
    echo "$port"
}
# shellcheck disable=SC2329  # sent to the step as text
rank() { # FOLDER COMMAND...
    export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID
    # Megatron overlaps the collectives of tensor and sequence parallelism with GEMMs by the order in one queue, on GPUs
    # before Blackwell.
    export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
    local code=0
    [ "$RANK" = 0 ] || exec >>"$1/rank_$RANK.log" 2>&1
    trap : TERM INT HUP # for the trainer, whose exit code is to be noted: that of the step may be another rank's
    "${@:2}" || code=$?
    # Saved and stopped before the time limit. Another code than 0 would have srun kill ranks that are still ending.
    [ "$code" != 6 ] || { touch "$1/stopped" && code=0; }
    [ "$code" = 0 ] || echo "$code" >"$1/code_$RANK"
    exit "$code"
}
MASTER_PORT=$(free_port $((20000 + SLURM_JOB_ID % 10000)))
export MASTER_PORT LOCAL_WORLD_SIZE=$nproc WORLD_SIZE=$((${#trainer_nodes[@]} * nproc))
mkdir -p "$logs"
rm -f "$logs"/code_* "$logs/stopped"
left=$(seconds_left)
# The trainer stops by itself where its next step would end later.
[ -z "$left" ] || export MEGATRON_DPPO_END_TIME=$(($(date +%s) + left - last_seconds))
say "training on ${#trainer_nodes[@]} nodes (${trainer_nodes[*]}) with $nproc ranks each; the output of ranks other than 0 is in $logs"
step trainer "$rank_cpus" --nodes="${#trainer_nodes[@]}" --ntasks="$WORLD_SIZE" --ntasks-per-node="$nproc" \
    --nodelist="$(list "${trainer_nodes[@]}")" --distribution=block \
    bash -c "$(declare -f rank); rank \"\$@\"" rank "$logs" env ${variables[0]:+"${variables[@]}"} \
    "$python" -m megatron_dppo.train "$config" "${overrides[@]}" &
trainer=$!

# A signal interrupts wait; then it is asked again.
while true; do
    ended="" code=0
    wait -n -p ended "${!servers[@]}" "$trainer" ${last_call:+"$last_call"} || code=$?
    case ${ended:-} in
    "") ;;
    "$trainer")
        trainer=""
        [ "$code" = 0 ] || after_crash "$code" --logs "$logs"
        # At preemption Slurm signals the steps and not this script.
        if [ -n "$stopping" ] || [ -e "$logs/stopped" ] || preempted; then after_stop; fi
        exit 0
        ;;
    "$last_call")
        say "the step does not finish in the remaining time; the job resumes from its last checkpoint"
        after_stop
        ;;
    *) servers_ended "$ended" "$code" ;;
    esac
done
