#!/usr/bin/env bash
# Prepare .venv312, a second environment of this checkout with Python 3.12, and print the path of its interpreter.
#
#   python=$(tools/setup_python312.sh [PYTHON])     # PYTHON: an interpreter of Python 3.12
#
# Python 3.12 gets the newest Megatron Core, 3.11 an older one (setup.py): tests run with both. Without PYTHON, python3.12
# is looked for in PATH and among the versions of pyenv. The exit code is 3 where there is none.
set -euo pipefail
cd "$(dirname "$0")/.."
say() { echo "$@" >&2; }

find_python() {
    local candidate
    for candidate in "$@" python3.12 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12.*/bin/python3.12; do
        # A shim of pyenv is there also for versions that are not in use.
        if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    say "no Python 3.12 here: name one, as tools/setup_python312.sh /path/to/python3.12"
    exit 3
}

target=.venv312/bin/python
stamp=.venv312/.installed
if [ ! -e "$stamp" ] || [ setup.py -nt "$stamp" ] || [ requirements/lock.txt -nt "$stamp" ]; then
    python=$(find_python "$@")
    say "installing into .venv312 with $python (up to 6 GB where no index offers a CPU build of torch)"
    "$python" -m venv --clear .venv312
    constraints=$(mktemp)
    cp requirements/lock.txt "$constraints"
    command -v nvidia-smi >/dev/null || $target tools/cpu_torch.py "$constraints" "$constraints.cpu"
    if [ -e "$constraints.cpu" ]; then mv "$constraints.cpu" "$constraints"; fi
    PIP_REQUIRE_VIRTUALENV=1 $target -m pip install -q --disable-pip-version-check -c "$constraints" -e '.[dev]' \
        2> >(grep -v '^WARNING: Location' >&2)
    rm -f "$constraints"
    touch "$stamp"
fi
"$target" -c 'import sys; print(sys.executable)'
