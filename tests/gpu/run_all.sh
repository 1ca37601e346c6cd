#!/usr/bin/env bash
# All checks that this project keeps for CUDA, on one device or several, what tells most about a new machine first. Prints a
# table; a row that this machine cannot have says NOT RUN and what it needs. Exit code 0 = all that ran are within their
# bounds, 1 = a check failed or none ran, 2 = an import is missing or an argument is wrong, 3 = no CUDA device.
#
#   tests/gpu/run_all.sh [--wheels DIR] [--only GROUP,GROUP] [--jobs N] [--cpu-rehearsal] [--markdown FILE]
#
# Groups: doctor job head teacher model kernels delta devices sharing runs waits vocab losses plan layers speed (docs/testing.md).
#
# --wheels DIR      install the wheels in DIR into a temporary folder first (no network needed); without what it
#                   needs, the script names the missing imports and the commands that fetch them
# --only            some groups of checks
# --markdown FILE   also write the machine and the table to FILE, to commit
# --cpu-rehearsal   run the same checks on the CPU: it proves the script, not the device
# PYTHON                  the interpreter (default python3)
# GPU_CHECKS_BOUND_SCALE  multiplies every bound (default 1); 0 shows that the script can fail
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
arguments=()
while [ $# -gt 0 ]; do
    case $1 in
    --wheels)
        [ -d "${2:-}" ] || { echo "--wheels needs a folder, got '${2:-}'" >&2; exit 2; }
        compgen -G "$2/*.whl" >/dev/null || { echo "--wheels: no wheels in '$2'" >&2; exit 2; }
        site=$(mktemp -d)
        trap 'rm -rf "$site"' EXIT
        "$python" -m pip install -q --no-index --no-deps --no-compile --target "$site" "$2"/*.whl || exit 2
        export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
        shift 2
        ;;
    *)
        arguments+=("$1")
        shift
        ;;
    esac
done
# One process: nothing here may join the ranks of a launcher that this shell was started under.
export RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 LOCAL_WORLD_SIZE=1
PYTHONWARNINGS=ignore PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} "$python" -m tests.gpu.run_all "${arguments[@]}"
