#!/usr/bin/env bash
# Prepare .venv312, a second environment of this checkout with Python 3.12, and print the path of its interpreter.
#
#   python=$(tools/setup_python312.sh [PYTHON])     # PYTHON: an interpreter of Python 3.12
#
# Python 3.12 gets the newest Megatron Core, 3.11 an older one (setup.py): tests run with both. Without PYTHON, python3.12
# is looked for in PATH and among the versions of pyenv. The exit code is 3 where there is none.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=tools/environment.sh
source tools/environment.sh

# Two suites of .ci/run may want it at once.
exec 9>.venv312.lock
flock 9
if ! is_current .venv312/.installed; then
    python=$(find_python 12 "$@" python3.12 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12.*/bin/python3.12) || {
        say "no Python 3.12 here: name one, as tools/setup_python312.sh /path/to/python3.12"
        exit 3
    }
    fill_environment .venv312 "$python"
    touch .venv312/.installed
fi
.venv312/bin/python -c 'import sys; print(sys.executable)'
