# shellcheck shell=bash
# What the scripts of tools/ that make environments share. fill_environment and is_current: in the root of the checkout.

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

# pip_install PYTHON ARGUMENT...: do as "PYTHON -m pip install ARGUMENT..." does, by uv (UV, that environment's, or one in PATH),
# which needs a tenth of pip's seconds. It does not read what pip is configured with (indexes, folders of wheels, constraints,
# certificate), so it gets that here. What uv cannot install, pip is asked for.
pip_install() {
    local python=$1 configured uv each constraints=() flags=(-q --disable-pip-version-check)
    local variables=(UV_NO_CONFIG=1 UV_INDEX_STRATEGY=unsafe-best-match)
    shift
    uv=${UV:-$(command -v "$(dirname "$python")/uv" || command -v uv || true)}
    if [ -z "$uv" ] && "$python" -m pip install "${flags[@]}" uv 2>/dev/null; then
        uv=$(dirname "$python")/uv
    fi
    configured=$("$python" -m pip config list)
    # setting NAME: what pip is configured with, its lines joined. Variables are listed before files, and are stronger.
    setting() { sed -n "s/^[^=]*\.$1='\(.*\)'$/\1/p" <<<"$configured" | head -n 1 | sed 's/\\n/ /g'; }
    # tell VARIABLE NAME: give uv this setting of pip, unless it has one of its own.
    tell() {
        local value
        value=$(setting "$2")
        if [ "$2" = find-links ]; then value=${value// /,}; fi
        if [ -n "$value" ] && [ -z "${!1:-}" ]; then variables+=("$1=$value"); fi
    }
    tell UV_DEFAULT_INDEX index-url
    tell UV_INDEX extra-index-url
    tell UV_FIND_LINKS find-links
    tell UV_INSECURE_HOST trusted-host
    tell SSL_CERT_FILE cert
    for each in $(setting constraint); do constraints+=(-c "$each"); done
    if [ -n "$uv" ] && env "${variables[@]}" "$uv" pip install -q --python "$python" "${constraints[@]}" "$@" >&2; then
        return
    fi
    say "uv is absent here or did not install that: by pip, which takes longer"
    "$python" -m pip install "${flags[@]}" "$@" 2> >(grep -v '^WARNING: Location' >&2)
}

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
    PIP_REQUIRE_VIRTUALENV=1 pip_install "$target" -c "$constraints" -e '.[dev]'
    # Where the environment forbids processes to write bytecode, each would compile these anew.
    "$target" -m compileall -q megatron_dppo packages tests tools
    PYTHONDONTWRITEBYTECODE='' "$target" -c 'import torch, megatron.core.models.gpt, transformers, aiohttp, pydantic'
    rm -f "$constraints"
}
