"""Which Python the set-up scripts take, and what they say where there is none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
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


def install(tmp_path: Path, uv_code: int, **variables: str) -> tuple[int, str, str]:
    """Run ``pip_install`` with a uv that only notes its call, and a Python whose pip says so. Returns also the note."""
    uv = tmp_path / "uv"
    uv.write_text(
        f'#!/bin/bash\necho "$@" >>{tmp_path}/note\nenv | grep -E "^(UV_|SSL_)" >>{tmp_path}/note\nexit {uv_code}\n'
    )
    uv.chmod(0o755)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/bash\nif [ "$3" = config ]; then exec {sys.executable} "$@"; fi\necho "pip: $@"\n')
    python.chmod(0o755)
    script = f"source {ROOT}/tools/environment.sh; pip_install {python} --no-deps -r list.txt"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_", "SSL_"))}
    env = {**inherited, "PIP_CONFIG_FILE": os.devnull, "UV": str(uv), **variables}
    done = subprocess.run(["bash", "-euc", script], env=env, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, (tmp_path / "note").read_text()


def test_uv_gets_what_pip_is_configured_with_but_keeps_its_own_settings(tmp_path: Path) -> None:
    config = tmp_path / "pip.conf"
    config.write_text(
        "[global]\nextra-index-url = https://b/simple\n  https://c/simple\nconstraint = /caps.txt\ncert = /ours.pem\n"
    )
    code, text, note = install(
        tmp_path,
        0,
        PIP_CONFIG_FILE=str(config),
        PIP_INDEX_URL="https://a/simple",
        PIP_FIND_LINKS="/w",
        UV_FIND_LINKS="/mine",
    )
    assert code == 0 and text == ""
    call, *settings = note.splitlines()
    assert call == f"pip install -q --python {tmp_path}/python -c /caps.txt --no-deps -r list.txt"
    assert {"UV_DEFAULT_INDEX=https://a/simple", "SSL_CERT_FILE=/ours.pem", "UV_FIND_LINKS=/mine"} <= set(settings)
    assert "UV_INDEX=https://b/simple https://c/simple" in " ".join(settings)


def test_what_uv_cannot_install_is_installed_by_pip(tmp_path: Path) -> None:
    code, text, note = install(tmp_path, 1, PIP_FIND_LINKS="/w /x")
    assert code == 0 and text == "pip: -m pip install -q --disable-pip-version-check --no-deps -r list.txt\n"
    assert note.startswith("pip install") and "UV_DEFAULT_INDEX" not in note and "UV_FIND_LINKS=/w,/x" in note
