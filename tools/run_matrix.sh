#!/usr/bin/env bash
# Every loss on every layout, up to 8 processes, with both supported versions of Megatron Core, and every family on every
# layout; writes docs/results/parity.md.
#
#   tools/run_matrix.sh [PYTHON312]     a Python 3.12 for megatron-core 0.19.2 (see tools/setup_python312.sh)
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore TOKENIZERS_PARALLELISM=false

python=$(tools/setup_env.sh)
"$python" -m tests.distributed.run_matrix "$folder/first.md"
"$python" -m tests.distributed.run_family_matrix "$folder/families.md"

newer=$(tools/setup_python312.sh "$@")
"$newer" -m tests.distributed.run_matrix "$folder/second.md"
{
    echo "# The whole objective on every layout, in figures"
    echo
    echo "Written by \`tools/run_matrix.sh\` (2 CPU cores, gloo, fp32). Each loss of docs/loss.md, with ragged packed rows"
    echo "and at least 4 micro-batches. The columns are the relative error of the gradient of the worst parameter, and error of the loss,"
    echo "against one process in float64 (\`tests/distributed/objective.py\`)."
    echo
    cat "$folder/first.md"
    echo
    cat "$folder/second.md"
    echo
    cat "$folder/families.md"
} > docs/results/parity.md
