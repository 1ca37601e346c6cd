#!/usr/bin/env bash
# Agent frameworks in environments of their own, for the tests of [agent] (docs/agents.md).
#
#   tools/engines/agents.sh install [clients|verifiers|openenv]  # prints the folder of the environment
#
# Without an argument: SDKs and frameworks. clients: more of them, for a long test. verifiers: the package of
# environments, which needs an older openai. openenv: the same with OpenEnv, for a long test.
# It lies below $MEGATRON_DPPO_ENGINES (default ~/.cache/megatron_dppo/engines). PYTHON names the interpreter.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=tools/environment.sh
source "$here/../environment.sh"
name=${2:-agents}
requirements=$here/${name}_requirements.txt
[ "${1:-}" = install ] && [ -e "$requirements" ] || { echo "usage: $0 install [clients|verifiers|openenv]" >&2; exit 2; }
root=${MEGATRON_DPPO_ENGINES:-${XDG_CACHE_HOME:-$HOME/.cache}/megatron_dppo/engines}
stamp=$({ cat "$requirements"; "${PYTHON:-python3}" -c 'import sys; print(sys.version_info[:2])'; } | sha256sum | head -c 12)
base=$root/$name-$stamp

mkdir -p "$root"
# Two test runs may start at once.
exec 9>"$root/.lock"
flock 9
if [ ! -e "$base/.complete" ]; then
    echo "installing $name into $base (150 to 600 MB, about a minute)" >&2
    "${PYTHON:-python3}" -m venv --clear "$base"
    pip_install "$base/bin/python" -r "$requirements"
    touch "$base/.complete"
fi
echo "$base"
