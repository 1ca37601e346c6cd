#!/usr/bin/env bash
# Agent frameworks in an environment of their own, for the tests of [agent] (docs/agents.md).
#
#   tools/engines/agents.sh install          # prints the folder of the environment
#
# It lies below $MEGATRON_DPPO_ENGINES (default ~/.cache/megatron_dppo/engines). PYTHON names the interpreter.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
[ "${1:-}" = install ] || { echo "usage: $0 install" >&2; exit 2; }
root=${MEGATRON_DPPO_ENGINES:-${XDG_CACHE_HOME:-$HOME/.cache}/megatron_dppo/engines}
stamp=$({ cat "$here/agents_requirements.txt"; "${PYTHON:-python3}" -c 'import sys; print(sys.version_info[:2])'; } | sha256sum | head -c 12)
base=$root/agents-$stamp

mkdir -p "$root"
# Two test runs may start at once.
exec 9>"$root/.lock"
flock 9
if [ ! -e "$base/.complete" ]; then
    echo "installing agent frameworks into $base (150 MB, half a minute)" >&2
    "${PYTHON:-python3}" -m venv --clear "$base"
    "$base/bin/python" -m pip install -q --disable-pip-version-check -r "$here/agents_requirements.txt" 2> >(grep -v '^WARNING: Location' >&2)
    touch "$base/.complete"
fi
echo "$base"
