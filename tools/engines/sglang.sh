#!/usr/bin/env bash
# SGLang in an environment of its own, on a machine without GPU (tests, the example).
#
#   tools/engines/sglang.sh install [VERSION]          # prints the folder of the environment
#   tools/engines/sglang.sh serve VERSION ARGS...      # becomes the server: python -m sglang.launch_server ARGS...
#
# All versions share the packages that they need; a version itself is a folder beside them. Both are made once, below
# $MEGATRON_DPPO_ENGINES (default ~/.cache/megatron_dppo/engines). PYTHON names the interpreter (default python3).
# With a GPU use SGLang's own installation: this one has no kernels.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=tools/environment.sh
source "$here/../environment.sh"
command=${1:?install or serve}
version=${2:-$(sed -n 's/^sglang_newest = "\(.*\)"$/\1/p' "$here/../../packages/engines/src/megatron_dppo_engines/serving/versions.toml")}
root=${MEGATRON_DPPO_ENGINES:-${XDG_CACHE_HOME:-$HOME/.cache}/megatron_dppo/engines}

# The stamp names what is inside, so that another list of packages or another Python makes another environment.
stamp=$({ cat "$here/sglang_requirements.txt"; "${PYTHON:-python3}" -c 'import sys; print(sys.version_info[:2])'; } | sha256sum | head -c 12)
base=$root/sglang-$stamp
package=$base/sglang-$version

install() {
    # A server need not wait while another environment is made.
    if [ -e "$base/.complete" ] && [ -e "$package/.complete" ]; then return; fi
    mkdir -p "$root"
    # Two test runs may start at once.
    exec 9>"$root/.lock"
    flock 9
    if [ ! -e "$base/.complete" ]; then
        say "installing what SGLang needs into $base (1.4 GB, about a minute)"
        "${PYTHON:-python3}" -m venv --clear "$base"
        pip_install "$base/bin/python" -r "$here/sglang_requirements.txt"
        touch "$base/.complete"
    fi
    if [ ! -e "$package/.complete" ]; then
        say "installing SGLang $version"
        rm -rf "$package"
        # Without what they ask for: that is gigabytes of CUDA libraries.
        pip_install "$base/bin/python" --no-deps --target "$package" "sglang==$version" xgrammar==0.2.7 apache-tvm-ffi==0.1.11
        touch "$package/.complete"
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
    # One thread: the kernels are tiny, more threads make a token ten times slower.
    # The cache ends at --max-total-tokens. The fraction has to leave room for it beside the weights of a real model, and
    # SGLang counts what other programs took meanwhile.
    export OMP_NUM_THREADS=1 SGLANG_USE_CPU_ENGINE=1 HF_HUB_OFFLINE=1 TORCHDYNAMO_DISABLE=1
    # SGLANG_EXTRA_PATH: a folder whose sitecustomize.py changes the server (tests).
    export PYTHONPATH=${SGLANG_EXTRA_PATH:+$SGLANG_EXTRA_PATH:}$here/sglang_shim:$package
    # ENGINE_PROGRAM: what runs in the place of the server, with its arguments (tests).
    read -ra program <<<"${ENGINE_PROGRAM:--m sglang.launch_server}"
    exec "$base/bin/python" "${program[@]}" --device cpu --attention-backend torch_native \
        --mem-fraction-static 0.5 --max-total-tokens 32768 --sleep-on-idle "${@:3}"
    ;;
*)
    say "unknown command $command: install or serve"
    exit 2
    ;;
esac
