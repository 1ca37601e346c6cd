#!/usr/bin/env bash
# Each library of packages/ alone: built, installed into an environment without the trainer (and without torch, if it needs
# none), and its tests there.
#
#   tools/test_packages.sh PYTHON [PYTEST ARGUMENT...]     PYTHON: the trainer's interpreter
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
shift
work=$(mktemp -d)
trap 'rm -r "$work"' EXIT
# setuptools leaves its work in the folder that it builds.
git ls-files -z | xargs -0 cp --parents -t "$work"
for library in $(PYTHONPATH=tools "$python" -c 'import source_folders; print(*source_folders.LIBRARIES)'); do
    "$python" -m venv "$work/$library"
    pip=("$work/$library/bin/python" -m pip install -q --disable-pip-version-check)
    mapfile -t requirements < <("$python" - "packages/$library/pyproject.toml" <<'END'
import sys, tomllib
dependencies = tomllib.load(open(sys.argv[1], "rb"))["project"]["dependencies"]
sys.stdout.writelines(f"{each}\n" for each in dependencies if each != "megatron-dppo")
END
    )
    if [[ ${requirements[*]} == *torch* ]]; then
        # The packages that are installed for the trainer. A .pth file in such a folder is not read, and the trainer, which
        # is installed by one, is not found.
        "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
            >"$("$work/$library/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/trainer.pth"
        if "$work/$library/bin/python" -I -c 'import megatron_dppo' 2>/dev/null; then
            echo "the trainer can be imported in the environment of packages/$library, which is to be without it" >&2
            exit 1
        fi
        requirements=()
    fi
    "${pip[@]}" pytest "${requirements[@]}" 2> >(grep -v '^WARNING: Location' >&2)
    if grep -q '"megatron-dppo"' "packages/$library/pyproject.toml"; then
        # The base of megatron-dppo without torch, which the configuration does not need.
        "${pip[@]}" 'pydantic>=2.10' tomli-w 2> >(grep -v '^WARNING: Location' >&2)
        "${pip[@]}" --no-deps "$work"
    fi
    "${pip[@]}" --no-deps "$work/packages/$library"
    (cd "$work/packages/$library" && "$work/$library/bin/python" -m pytest -q -c /dev/null --rootdir . --confcutdir . tests "$@") || {
        # CI repeats what failed (--last-failed): in the other library that is nothing, which pytest calls 5.
        [ $? = 5 ] && [[ "$*" == *--last-failed* ]]
    }
done
