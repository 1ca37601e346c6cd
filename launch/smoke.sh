#!/usr/bin/env bash
# All parts of a run on this machine in a few minutes, before the real job: a tiny mixture of experts and a real server.
#
#   launch/smoke.sh [sglang|vllm] [--output FOLDER] [--nproc-per-node N] [--section.key VALUE ...]
#
# Trains the embedded example by launch/torchrun.sh, ends it by SIGTERM after its second step, runs the same command
# again, and judges what the two left: sync, proof and probe of weights, log-probabilities of both programs, router
# replay, the save, the resume, the exported model. The last lines are the verdict. Exit code 0 = all good.
#
#   FOLDER                new folder for the run (default runs/smoke)
#   N                     trainer ranks (default: all GPUs but one; one GPU is shared with the server; without a GPU 2)
#   PYTHON                interpreter with megatron_dppo (default python3)
#
# Without a GPU the server is one for the CPU, which tools/engines installs. With GPUs it is the engine that is installed
# beside megatron_dppo; name another one by --rollout.servers.command '["/envs/sglang/bin/python","-m","sglang.launch_server"]'.
set -euo pipefail

usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; }
fail() {
    echo "smoke: $1" >&2
    exit 2
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
engine=sglang output=runs/smoke nproc="" overrides=()
while [ $# -gt 0 ]; do
    case $1 in
    --help | -h)
        usage
        exit 0
        ;;
    sglang | vllm) engine=$1 ;;
    --output)
        output=${2:-}
        shift
        ;;
    --nproc-per-node)
        nproc=${2:-}
        shift
        ;;
    *) overrides+=("$1") ;;
    esac
    shift || break
done
[ -n "$output" ] || fail "--output needs a folder"
[ ! -e "$output" ] || fail "$output exists; choose another --output, or remove it"
export PYTHON=${PYTHON:-python3}
gpus=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')
if [ "$gpus" = 0 ]; then
    nproc=${nproc:-2}
else
    nproc=${nproc:-$((gpus > 1 ? gpus - 1 : 1))}
    overrides=(--rollout.servers.command null "${overrides[@]}")
    [ "$gpus" -gt "$nproc" ] || overrides=(--rollout.servers.colocated true "${overrides[@]}")
fi
[[ $nproc =~ ^[1-9][0-9]*$ ]] || fail "--nproc-per-node = '$nproc': expected a number of ranks"
arguments=("$root/examples/chain_sum/$engine.toml" --nproc-per-node "$nproc" --run.output_dir "$output"
    --run.num_steps 4 --checkpoint.save_every 1 --eval.max_prompts 16
    --rollout.prompts_per_step "$((8 * nproc))" --rollout.samples_per_prompt 8
    --parallel.expert_model_parallel_size "$((nproc % 2 ? 1 : 2))" "${overrides[@]}")

mkdir -p "$(dirname "$output")"
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
steps() { grep -c '"step": [1-9]' "$output/metrics.jsonl" 2>/dev/null || true; }

setsid "$root/launch/torchrun.sh" "${arguments[@]}" > >(tee "$logs/first") 2>&1 &
run=$!
trap 'kill -TERM "$run" 2>/dev/null || true; wait "$run" || true; rm -rf "$logs"' EXIT
until [ "$(steps)" -ge 2 ] 2>/dev/null; do
    kill -0 "$run" 2>/dev/null || break
    sleep 0.2
done
kill -TERM "$run" 2>/dev/null || true
first=0
wait "$run" || first=$?
second=0
if [ "$first" = 0 ]; then
    setsid "$root/launch/torchrun.sh" "${arguments[@]}" > >(tee "$logs/second") 2>&1 &
    run=$!
    wait "$run" || second=$?
fi
"$PYTHON" "$root/launch/judge_smoke.py" "$output" "$first" "$second"
