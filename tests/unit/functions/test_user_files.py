"""Files of the user: what they can import, from every folder and by every command, and in other processes."""

from __future__ import annotations

import ast
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_dppo.config.paths import FUNCTION_KEYS
from megatron_dppo.errors import FunctionError
from megatron_dppo.functions import load_function
from megatron_dppo.setup.contents import read_contents
from source_folders import PYTHON_FILES
from tests.unit.data_files import write_jsonl

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def restored_imports() -> Iterator[None]:
    """Undo what loading a file leaves in this process."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder


MINE = "import beside_it\n\n\ndef value(*_, **__):\n    import beside_too\n    return beside_it.ONE + beside_too.TWO\n"


def test_a_file_imports_its_neighbors_and_their_content_counts(tmp_path: Path) -> None:
    write(tmp_path, mine=MINE, beside_it="ONE = 1\n", beside_too="TWO = 2\n")
    assert load_function(f"{tmp_path}/mine.py:value", "reward.function")() == 3
    contents = read_contents({"reward": {"function": f"{tmp_path}/mine.py:value"}}).contents
    assert set(contents["reward.function"]) == {"", "beside_it.py", "beside_too.py"}


@pytest.mark.parametrize("flags", [["-P"], []], ids=["megatron-dppo", "python -m"])
@pytest.mark.parametrize("here", ["files", "elsewhere"])
def test_every_user_function_is_loaded_alike_by_both_commands_from_every_folder(
    tmp_path: Path, flags: list[str], here: str
) -> None:
    """``-P`` leaves the working directory out of the search path, as the installed command does."""
    write(tmp_path / "files", mine=MINE, beside_it="ONE = 1\n", beside_too="TWO = 2\n")
    write(tmp_path / "elsewhere", beside_me="", module_here="def value():\n    return 3\n")
    code = "from megatron_dppo.functions import load_function as load\n" + "".join(
        f"print(load({str(tmp_path / 'files/mine.py:value')!r}, '{section}.{key}')())\n"
        for section, key in FUNCTION_KEYS
    )
    if here == "elsewhere":
        code += "print(load('module_here:value', 'reward.function')())"
    result = subprocess.run(
        [sys.executable, *flags, "-c", code],
        cwd=tmp_path / here,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stdout.split() == ["3"] * (len(FUNCTION_KEYS) + (here == "elsewhere")), result.stderr


@pytest.mark.parametrize(
    "flags",
    [pytest.param(["-P"], id="megatron-dppo"), pytest.param([], id="python -m", marks=pytest.mark.long)],
)
def test_a_dry_run_accepts_a_reward_with_a_neighbor(tmp_path: Path, flags: list[str]) -> None:
    """Both of ``megatron-dppo train`` and ``python -m megatron_dppo.train``, from another folder."""
    mine = "import beside_it\n\n\ndef score(completion, label, **_):\n    return beside_it.ONE\n"
    write(tmp_path / "files", mine=mine, beside_it="ONE = 0.5\n")
    rows = [{"prompt": f"{number} + 1", "label": str(number + 1)} for number in range(64)]
    write_jsonl(tmp_path / "files/rows.jsonl", rows)
    (tmp_path / "files/my.toml").write_text(
        f'extends = "{ROOT}/examples/chain_sum/dppo.toml"\n[data]\ntrain = "rows.jsonl"\neval = "rows.jsonl"\n'
        '[reward]\nfunction = "mine.py:score"\n'
    )
    result = subprocess.run(
        [sys.executable, *flags, "-m", "megatron_dppo.train", str(tmp_path / "files/my.toml"), "--dry-run"],
        cwd=write(tmp_path / "elsewhere"),
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "cannot be imported" not in result.stderr and result.returncode == 0, result.stdout + result.stderr


def test_a_name_that_stands_for_two_modules_is_refused(tmp_path: Path) -> None:
    first = write(tmp_path / "a", mine="import same_name\n\n\ndef f():\n    return same_name.X\n", same_name="X = 1\n")
    second = write(tmp_path / "b", mine="import same_name\n\n\ndef f():\n    return same_name.X\n", same_name="X = 2\n")
    assert load_function(f"{first}/mine.py:f", "reward.function")() == 1
    with pytest.raises(FunctionError, match=r"'same_name', .*/b/same_name\.py .*/a/same_n"):
        load_function(f"{second}/mine.py:f", "loss.mask")
    lazy = write(tmp_path / "c", mine="def f():\n    import same_name\n    return same_name.X\n", same_name="X = 3\n")
    with pytest.raises(FunctionError, match=r"rename .*beside mine\.py$"):
        load_function(f"{lazy}/mine.py:f", "loss.mask")


@pytest.mark.parametrize("module", ["statistics", "pytest", "math"])
def test_a_neighbor_does_not_replace_an_installed_module(tmp_path: Path, module: str) -> None:
    before = sys.modules.get(module)
    write(tmp_path, mine="def f():\n    return 1\n", **{module: "raise SystemExit('executed')\n"})
    assert load_function(f"{tmp_path}/mine.py:f", "reward.function")() == 1, "a neighbor that it does not import"
    assert subprocess.run([sys.executable, "-c", f"import {module}"], check=False).returncode == 0
    write(tmp_path, other=f"import {module}\n\n\ndef f():\n    return {module}\n")
    with pytest.raises(FunctionError, match=rf"other\.py imports '{module}', .*{module}\.py"):
        load_function(f"{tmp_path}/other.py:f", "reward.function")
    assert sys.modules.get(module) is before


@pytest.mark.parametrize("name", ["mine.py", "my-reward.v2.py", "größe.py"])
def test_a_function_of_a_file_goes_to_a_new_process_by_name(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_text("import beside_it\n\n\ndef f():\n    return beside_it.ONE\n")
    write(tmp_path, beside_it="ONE = 7\n")
    pickled = pickle.dumps(load_function(f"{file}:f", "reward.function"))
    code = f"import pickle; print(pickle.loads({pickled!r})())"
    result = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd="/", env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True
    )
    assert result.stdout.split() == [b"7"], result.stderr


def test_two_files_of_one_name_are_two_modules(tmp_path: Path) -> None:
    values = []
    for folder in ("a", "b"):
        write(tmp_path / folder, mine=f"def f():\n    return {folder!r}\n")
        values.append(load_function(f"{tmp_path}/{folder}/mine.py:f", "reward.function"))
    assert [f() for f in values] == ["a", "b"] and len({f.__module__ for f in values}) == 2
    assert [pickle.loads(pickle.dumps(f))() for f in values] == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "import no_such_module_here\n",
            "No module named 'no_such_module_here'.",
        ),
        ("raise ValueError('too early')\n", "ValueError: too early"),
        (None, "does not exist. A"),
    ],
)
def test_the_message_has_the_hint_of_its_cause(tmp_path: Path, text: str | None, words: str) -> None:
    if text is not None:
        (tmp_path / "mine.py").write_text(text)
    with pytest.raises(FunctionError, match=words) as error:
        load_function(f"{tmp_path}/mine.py:f", "reward.function")
    assert ("relative to it" in str(error.value)) == (text is None)


def test_no_other_module_loads_files() -> None:
    """Every key goes by ``load_function``: a second loader would know other neighbors."""
    loaders = {
        file.relative_to(ROOT).as_posix()
        for file in PYTHON_FILES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "exec_module"
    }
    assert loaders - {"megatron_dppo/mcore/extensions.py"} == {"megatron_dppo/functions/user_files.py"}
