#!/usr/bin/env bash
# The tests of packages/. Each library alone: built, installed into an environment without the trainer (and without torch, if
# it needs none). Then the companions with the trainer, but for their slow tests (make test-rest-unit).
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
folders() { PYTHONPATH=tools "$python" -c "import source_folders; print(*source_folders.$1)"; }
failed=0
# tested CODE: note what pytest returned. CI repeats what failed (--last-failed): where that is nothing, pytest returns 5.
tested() {
    case $1:$* in
    0:*) ;;
    5:*--last-failed*) ;;
    *) failed=1 ;;
    esac
}
for library in $(folders LIBRARIES); do
    # The trainer's pip, so that none is installed, and nothing is compiled that no test imports.
    "$python" -m venv --without-pip "$work/$library"
    pip=("$python" -m pip --python "$work/$library/bin/python" install -q --disable-pip-version-check --no-compile)
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
    code=0
    (cd "$work/packages/$library" && "$work/$library/bin/python" -m pytest -q -c /dev/null --rootdir . --confcutdir . tests "$@") || code=$?
    tested "$code" "$@"
done
read -ra companions < <(folders COMPANIONS)
code=0
"$python" -m pytest "${companions[@]/#/packages/}" -m "not slow" -n 2 --dist loadfile --durations 10 "$@" || code=$?
tested "$code" "$@"
exit "$failed"
