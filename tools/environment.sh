# shellcheck shell=bash
# What tools/setup_env.sh and tools/setup_python312.sh share. Sourced in the root of the checkout.

say() { echo "$@" >&2; }

# find_python MINORS PYTHON...: print the first of these interpreters that is a Python 3.MINOR of the list; 1 if none is.
find_python() {
    local minors=$1 candidate
    shift
    for candidate in "$@"; do
        # A shim of pyenv is there also for versions that are not in use.
        if "$candidate" -c 'import sys; sys.exit(str(sys.version_info.minor) not in sys.argv[1].split())' "$minors" 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

# prefix PYTHON: the environment that an interpreter belongs to.
prefix() { "$1" -c 'import os, sys; print(os.path.realpath(sys.prefix))'; }

# is_current STAMP: whether STAMP is newer than everything that says what to install.
is_current() {
    local file
    [ -e "$1" ] || return 1
    for file in setup.py pyproject.toml requirements/lock.txt packages/*/pyproject.toml; do
        if [ "$file" -nt "$1" ]; then return 1; fi
    done
}

# fill_environment FOLDER PYTHON: make a virtual environment if there is none that works, and install this checkout into it
# with the versions of requirements/lock.txt.
fill_environment() {
    local target=$1/bin/python constraints
    # A folder without a working pip is what an interrupted set-up leaves behind.
    if ! "$target" -m pip --version >/dev/null 2>&1; then
        say "creating $1 with $2"
        "$2" -m venv --clear "$1"
    fi
    # An interpreter started through a wrapper can resolve to the system's: never install there.
    [ "$(prefix "$target")" = "$(pwd -P)/$1" ] || {
        say "$target runs in $(prefix "$target"), not in $1; name a real interpreter, not a wrapper"
        exit 2
    }
    say "installing into $1 (a minute; five where torch has to be downloaded)"
    constraints=$(mktemp)
    if "$target" -c 'import sys; sys.exit(sys.version_info >= (3, 14))'; then
        cp requirements/lock.txt "$constraints"
    else
        say "requirements/lock.txt is for Python 3.11 to 3.13: taking the newest versions"
    fi
    command -v nvidia-smi >/dev/null || "$target" tools/cpu_torch.py "$constraints" "$constraints.cpu"
    if [ -e "$constraints.cpu" ]; then mv "$constraints.cpu" "$constraints"; fi
    PIP_REQUIRE_VIRTUALENV=1 "$target" -m pip install -q --disable-pip-version-check -c "$constraints" -e '.[dev]' \
        2> >(grep -v '^WARNING: Location' >&2)
    # Where the environment forbids processes to write bytecode, each would compile this checkout anew.
    "$target" -m compileall -q megatron_dppo packages tests tools
    rm -f "$constraints"
}
