#!/usr/bin/env bash
# One machine: the inference servers of CONFIG and the trainer.
#
#   launch/torchrun.sh CONFIG.toml [--nproc-per-node N] [--section.key VALUE ...]
#
# Starts the servers (megatron-dppo serve), waits until they are healthy, trains with torchrun, ends the servers. The
# exit code is the training's. With rollout.engine = "local" there are no servers; those named in rollout.servers.urls
# are only checked. The trainer's N ranks get the first N GPUs, the servers those after them, or with
# rollout.servers.colocated = true the same ones. A server that dies is restarted (docs/launch.md).
#
#   --nproc-per-node N    trainer ranks (default 1)
#   PYTHON                the interpreter to use (default python3)
#
# SIGTERM, SIGHUP or Ctrl-C: the trainer finishes its step, saves and ends with 0; the same command resumes from there.
# A kill -9 of this script does the same, by launch/guard.sh. A second Ctrl-C does not wait for the step.
set -euo pipefail

usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; }
# The terminal may be gone.
say() { echo "launch: $*" >&2 || true; }

nproc=1
arguments=()
while [ $# -gt 0 ]; do
    case $1 in
    --help | -h)
        usage
        exit 0
        ;;
    --nproc-per-node | --nproc_per_node)
        nproc=${2:-}
        shift
        ;;
    --nproc-per-node=* | --nproc_per_node=*) nproc=${1#*=} ;;
    *) arguments+=("$1") ;;
    esac
    shift || break
done
config=${arguments[0]:-}
if [ -z "$config" ] || [ "${config#-}" != "$config" ]; then
    usage >&2
    exit 2
fi
if ! [[ $nproc =~ ^[1-9][0-9]*$ ]]; then
    say "--nproc-per-node = '$nproc': expected a number of ranks"
    exit 2
fi
python=${PYTHON:-python3}

work=$(mktemp -d)
server="" trainer="" stopping=""
# Only this script holds the other end of the guard's input: all that it starts for long gets 9>&-.
exec 9> >("$(dirname "${BASH_SOURCE[0]}")/guard.sh" "$work" >&2)
# In a subshell, which a broken pipe may kill.
tell_guard() { (printf '%s\n' "$@" >&9) 2>/dev/null || true; }

# shellcheck disable=SC2329  # called by the traps
finish() {
    local code=$?
    trap '' TERM INT HUP
    if [ -n "$trainer" ]; then kill -TERM "$trainer" 2>/dev/null && wait "$trainer" || true; fi
    if [ -n "$server" ]; then
        kill -TERM "$server" 2>/dev/null || true
        wait "$server" || true
    fi
    tell_guard trainer server
    rm -rf "$work"
    exit "$code"
}
# The ranks themselves: torchrun would give them 30 seconds, and a step and its checkpoint may need more.
# shellcheck disable=SC2329
forward() { # NAME CODE: the signal, and the exit code if nothing trains yet
    stopping=1
    local ranks=()
    if [ -z "$trainer" ]; then exit "$2"; fi
    say "$1: the trainer finishes its step and saves"
    read -ra ranks <"/proc/$trainer/task/$trainer/children" || true
    kill -TERM "${ranks[@]:-$trainer}" 2>/dev/null || true
}
trap finish EXIT
trap 'forward SIGTERM 143' TERM
trap 'forward SIGHUP 129' HUP
trap 'if [ -n "$stopping" ]; then exit 130; fi; forward Ctrl-C 130' INT

mode=$("$python" -m megatron_dppo.commands.main serve "${arguments[@]}" --print-mode 9>&-)
# What the ranks need and you have not set: NCCL's settings as in the servers, and the allocator's.
variables=$("$python" -m megatron_dppo.commands.main serve "${arguments[@]}" --print-rank-variables 9>&-)
mapfile -t variables <<<"$variables"
case $mode in
attach) "$python" -m megatron_dppo.commands.main serve "${arguments[@]}" 9>&- ;;
start | colocated)
    # A terminal sends Ctrl-C to all of its processes. What is started here gets signals from this script alone.
    setsid "$python" -m megatron_dppo.commands.main serve "${arguments[@]}" --skip-gpus "$nproc" --urls-file "$work/urls" 9>&- &
    server=$!
    tell_guard "server $server"
    until [ -e "$work/urls" ]; do
        # Its own message says what is wrong.
        kill -0 "$server" 2>/dev/null || { wait "$server" && exit 1 || exit $?; }
        sleep 0.5
    done
    ;;
esac

# Megatron overlaps the collectives of tensor and sequence parallelism with GEMMs by the order in one queue, on GPUs before
# Blackwell.
CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1} \
    setsid env ${variables[0]:+"${variables[@]}"} "$python" -m torch.distributed.run --standalone --nproc-per-node "$nproc" -m megatron_dppo.train "${arguments[@]}" 9>&- &
trainer=$!
tell_guard "trainer $trainer"
# A signal interrupts wait; then it is asked again.
while true; do
    ended=
    code=0
    wait -n -p ended ${server:+"$server"} "$trainer" || code=$?
    if [ "${ended:-}" = "$trainer" ]; then
        trainer=
        tell_guard trainer
        exit "$code"
    fi
    if [ -n "${ended:-}" ]; then
        server=
        tell_guard server
        if [ -n "$stopping" ]; then continue; fi
        say "the servers exited with code $code, so training stops; the message above has the reason"
        exit 1
    fi
done
