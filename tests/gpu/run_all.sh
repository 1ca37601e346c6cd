#!/usr/bin/env bash
# All checks that this project keeps for one CUDA device. Prints a table; exit code 0 = all within their bounds,
# 1 = a check failed, 2 = a package is missing, 3 = no CUDA device.
#
#   tests/gpu/run_all.sh [--wheels DIR] [--only losses,vocab,model] [--cpu-rehearsal]
#
# --wheels DIR      install the wheels in DIR into a temporary folder first (no network needed). On a machine with
#                   network, for Python 3.12 on x86-64:
#                     pip download --no-deps --only-binary=:all: --python-version 3.12 -d DIR \
#                       --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 megatron-core==0.19.2 PACKAGE...
# --only            some groups of checks
# --cpu-rehearsal   run the same checks on the CPU: it proves the script, not the device
# PYTHON            the interpreter (default python3)
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
arguments=()
while [ $# -gt 0 ]; do
    case $1 in
    --wheels)
        [ -d "${2:-}" ] || { echo "--wheels needs a folder, got '${2:-}'" >&2; exit 2; }
        site=$(mktemp -d)
        trap 'rm -rf "$site"' EXIT
        "$python" -m pip install -q --no-index --no-deps --no-compile --target "$site" "$2"/*.whl
        export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
        shift 2
        ;;
    *)
        arguments+=("$1")
        shift
        ;;
    esac
done
PYTHONWARNINGS=ignore PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} "$python" -m tests.gpu.run_all "${arguments[@]}"
