#!/usr/bin/env bash
# Prepare the Python environment of this checkout and print the path of its interpreter.
#
#   python=$(tools/setup_env.sh)       # then: $python -m pytest, $python -m torch.distributed.run
#
# The interpreter and not its folder: a container may have torchrun elsewhere, and no plain "python" beside python3.
#
# - Inside an environment that already has torch and megatron.core (an NGC container, your own virtual environment),
#   that environment is used: its torch and Megatron stay as they are, only what is missing is added.
# - Otherwise .venv is created here and filled with the versions of requirements/lock.txt (Python 3.11 to 3.13, for which
#   there are wheels of all of them; newer: the newest versions). On a machine without NVIDIA driver torch is a CPU
#   build, where an index of pip's offers one (tools/cpu_torch.py).
# PYTHON names the interpreter to start from. Without it: python3 if that is a Python 3.11 to 3.13, else such a one that
# goes by its version in PATH or in pyenv, else python3.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=tools/environment.sh
source tools/environment.sh

has() { "$1" -c "import importlib.util as u, sys; sys.exit(not all(u.find_spec(m) for m in sys.argv[1:]))" "${@:2}" 2>/dev/null; }

choose_python() {
    local pyenv=${PYENV_ROOT:-$HOME/.pyenv}/versions
    if has python3 torch megatron megatron.core; then
        echo python3
    else
        find_python "11 12 13" python3 python3.1{3,2,1} "$pyenv"/3.1{3,2,1}.*/bin/python3 || echo python3
    fi
}
python=${PYTHON:-$(choose_python)}

command -v "$python" >/dev/null || {
    say "no $python here; Python 3.11 or newer is needed. Set PYTHON=/path/to/python3.11, for example."
    exit 2
}
version=$("$python" --version 2>/dev/null) || {
    say "$(command -v "$python") does not start (a shim of pyenv without that version?). Set PYTHON=/path/to/python3.11, for example."
    exit 2
}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    say "Python 3.11 or newer is needed, $version found at $(command -v "$python"). Set PYTHON=python3.12, for example."
    exit 2
}

if has "$python" torch megatron megatron.core && [ "$(prefix "$python")" != "$(pwd -P)/.venv" ]; then
    target=$python
    stamp=.venv-$("$python" -c 'import hashlib, sys; print(hashlib.md5(sys.prefix.encode()).hexdigest()[:8])').stamp
    mode=keep
else
    target=.venv/bin/python
    stamp=.venv/.installed
    mode=fill
fi

if ! is_current "$stamp"; then
    if [ $mode = keep ]; then
        say "using the torch and Megatron of $("$target" -c 'import sys; print(sys.prefix)')"
        constraints=$(mktemp)
        # What is installed stays: everything already there is pinned to its own version.
        "$target" -m pip list --format=freeze 2>/dev/null | grep -E '^[A-Za-z0-9._-]+==[0-9]' | sed 's/+.*//' >"$constraints"
        "$target" tools/missing_requirements.py >"$constraints.missing"
        if [ -s "$constraints.missing" ]; then
            "$target" -m pip install -q --disable-pip-version-check -c "$constraints" -r "$constraints.missing" >&2
        fi
        # The environment's own setuptools needs no network, but an old one cannot build without the package wheel.
        build=(--no-build-isolation)
        has "$target" setuptools.command.bdist_wheel || has "$target" setuptools wheel || build=()
        "$target" -m pip install -q --disable-pip-version-check --no-deps "${build[@]}" -e . >&2
        rm -f "$constraints" "$constraints.missing"
    else
        fill_environment .venv "$python"
    fi
    touch "$stamp"
fi
"$target" -c 'import sys; print(sys.executable)'
