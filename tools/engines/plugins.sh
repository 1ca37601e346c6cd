#!/usr/bin/env bash
# verl, SkyRL and TRL as released, for the tests of examples/integrations (make test-plugins).
#
#   tools/engines/plugins.sh install PYTHON     # prints the interpreter of the environment
#
# PYTHON belongs to an environment of this checkout with Python 3.12 or newer, as skyrl needs. The new environment lies
# below $MEGATRON_DPPO_ENGINES (default ~/.cache/megatron_dppo/engines). It uses PYTHON's packages, torch among them, and
# leaves them as they are.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=tools/environment.sh
source "$here/../environment.sh"
[ "${1:-}" = install ] && [ -n "${2:-}" ] || { echo "usage: $0 install PYTHON" >&2; exit 2; }
root=${MEGATRON_DPPO_ENGINES:-${XDG_CACHE_HOME:-$HOME/.cache}/megatron_dppo/engines}
packages=$("$2" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
stamp=$({ cat "$here"/plugins_*.txt; echo "$packages"; } | sha256sum | head -c 12)
base=$root/plugins-$stamp

mkdir -p "$root"
# Two test runs may start at once.
exec 9>"$root/.lock"
flock 9
if [ ! -e "$base/.complete" ]; then
    echo "installing verl, SkyRL and TRL into $base (about a minute)" >&2
    "$2" -m venv --clear "$base"
    own=$("$base/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    # The wheel of SkyRL has its package of environments in a folder.
    printf '%s\n' "$own/skyrl-gym" "$packages" >"$own/plugins.pth"
    pip_install "$base/bin/python" -r "$here/plugins_dependencies.txt"
    # Without what they ask for: that is an inference engine and gigabytes of CUDA libraries.
    pip_install "$base/bin/python" --no-deps -r "$here/plugins_requirements.txt"
    touch "$base/.complete"
fi
echo "$base/bin/python"
