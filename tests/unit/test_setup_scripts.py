"""Which Python the set-up scripts take, and what they say where there is none."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the scripts alone, and a PATH of interpreters that only know their version."""
    folder = tmp_path / "checkout/tools"
    folder.mkdir(parents=True)
    for name in ("setup_env.sh", "setup_python312.sh", "environment.sh"):
        shutil.copy2(ROOT / "tools" / name, folder)
    (tmp_path / "bin").mkdir()
    return folder.parent


def add_python(checkout: Path, name: str, version: str) -> None:
    """Write an interpreter with another ``sys.version_info`` that refuses to make environments."""
    file = checkout.parent / "bin" / name
    real = shutil.which("python3", path="/usr/bin:/usr/local/bin") or "python3"
    major, minor = version.split(".")
    file.write_text(
        f"""#!/bin/bash
if [ "$1" = -m ]; then echo "$0 -m $2" >&2; exit 9; fi
if [ "$1" = --version ]; then echo "Python {version}"; exit; fi
code=$2; shift 2
exec {real} -S -c "import collections, sys
sys.version_info = collections.namedtuple('V', 'major minor micro')({major}, {minor}, 0)
$code" "$@"
"""
    )
    file.chmod(0o755)


def set_up(checkout: Path, script: str, *arguments: str, **variables: str) -> tuple[int, str]:
    path = f"{checkout.parent / 'bin'}:/usr/bin:/bin"
    env = {"PATH": path, "HOME": str(checkout), "PYENV_ROOT": str(checkout / "pyenv"), **variables}
    command = ["bash", str(checkout / "tools" / script), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("pythons", "taken"),
    [
        ({"python3": "3.11"}, "python3"),
        ({"python3": "3.13", "python3.12": "3.12"}, "python3"),
        ({"python3": "3.9", "python3.12": "3.12", "python3.11": "3.11"}, "python3.12"),
        ({"python3": "3.14", "python3.13": "3.13"}, "python3.13"),
        ({"python3": "3.14", "python3.13": "3.14", "python3.12": "3.14", "python3.11": "3.14"}, "python3"),
    ],
)
def test_the_first_supported_python_is_taken(pythons: dict[str, str], taken: str, checkout: Path) -> None:
    for name, version in pythons.items():
        add_python(checkout, name, version)
    code, text = set_up(checkout, "setup_env.sh")
    assert code == 9 and f"{checkout.parent}/bin/{taken} -m venv" in text


def test_a_python_that_is_too_old_or_absent_is_an_error_with_the_way_out(checkout: Path) -> None:
    for name in ("python3", "python3.13", "python3.12", "python3.11"):
        add_python(checkout, name, "3.9")
    code, text = set_up(checkout, "setup_env.sh")
    assert code == 2 and "Python 3.11 or newer is needed, Python 3.9 found at" in text
    code, text = set_up(checkout, "setup_env.sh", PYTHON="python3.10")
    assert code == 2 and "no python3.10 here; Python 3.11 or newer is needed" in text
    shim = checkout.parent / "bin" / "python3.15"
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    code, text = set_up(checkout, "setup_env.sh", PYTHON="python3.15")
    assert code == 2 and f"{shim} does not start" in text and "Set PYTHON=" in text
    code, text = set_up(checkout, "setup_python312.sh", os.devnull)
    assert code == 3 and "no Python 3.12 here: name one" in text


def test_the_second_environment_takes_the_python_that_it_is_given(checkout: Path) -> None:
    add_python(checkout, "python3.12", "3.11")
    add_python(checkout, "given", "3.12")
    code, text = set_up(checkout, "setup_python312.sh", "given")
    assert code == 9 and "creating .venv312 with given" in text and "given -m venv" in text
