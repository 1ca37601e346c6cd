"""A resume compares the content of files that a configuration names, and of modules beside them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_dppo.config.schema import Config
from megatron_dppo.errors import CheckpointError, ConfigError
from megatron_dppo.setup.changes import check_changes, find_content_changes
from megatron_dppo.setup.contents import read_contents, same_value
from tests.unit.configs import config

MAIN = """
import json
import numpy as np
import helper
from package import part
from package.deep.one import x
import importlib

def score(completion):
    import late
    importlib.import_module("dynamic")
    return len(completion)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A function's file with modules beside it."""
    folder = tmp_path / "code"
    (folder / "package/deep").mkdir(parents=True)
    (folder / "lib").mkdir()
    (folder / "rewards.py").write_text(MAIN)
    (folder / "helper.py").write_text("import second\nimport missing_module_of_this_test\nimport in_lib")
    for name in ("second", "late", "dynamic", "unused", "package/__init__", "package/part", "lib/in_lib"):
        (folder / f"{name}.py").write_text("x = 1\n")
    (folder / "package/deep/__init__.py").write_text("from . import two\nfrom .. import sibling\n")
    for name in ("one", "two", "three"):
        (folder / f"package/deep/{name}.py").write_text("x = 1\n")
    (folder / "package/sibling.py").write_text("x = 1\n")
    return folder


IMPORTED = [
    *(
        "helper.py",
        "second.py",
        "late.py",
        "dynamic.py",
        "package/__init__.py",
        "package/part.py",
        "package/sibling.py",
    ),
    *("package/deep/__init__.py", "package/deep/one.py", "package/deep/two.py", "lib/in_lib.py"),
]


def named(function: str) -> Config:
    return config(reward={"function": function})


def contents(configuration: Config) -> dict[str, dict[str, str]]:
    read = read_contents(configuration.model_dump(mode="json")).contents
    return {key: dict(files) for key, files in read.items()}


def test_the_imports_beside_a_file_belong_to_its_content(folder: Path) -> None:
    """Each module that importing the file executes, and no other; nothing is executed by reading."""
    before = contents(named(f"{folder}/rewards.py:score"))
    assert sorted(before["reward.function"]) == sorted(["", *IMPORTED])
    for name in ["rewards.py", *IMPORTED]:
        (folder / name).write_text((folder / name).read_text() + "# edited\n")
        changed = find_content_changes(before, contents(named(f"{folder}/rewards.py:score")), named("math"))
        assert [(change.key, change.kind, Path(change.file).name) for change in changes_of(changed)] == [
            ("reward.function", "results", Path(name).name)
        ]
        before = contents(named(f"{folder}/rewards.py:score"))
    (folder / "unused.py").write_text("x = 2\n")
    assert contents(named(f"{folder}/rewards.py:score")) == before
    assert not {"helper", "second", "package"} & sys.modules.keys()


def changes_of(changes: list) -> list:
    """Paths of the main file are absolute only because the value is unknown to ``named("math")``."""
    return [change._replace(file="rewards.py") if change.file == "math" else change for change in changes]


def test_a_copy_of_the_folder_elsewhere_has_the_same_content(folder: Path, tmp_path: Path) -> None:
    before = contents(named(f"{folder}/rewards.py:score"))
    folder.rename(tmp_path / "moved")
    assert contents(named(f"{tmp_path}/moved/rewards.py:score")) == before


def test_a_module_on_the_path_is_read_like_a_file_and_imports_elsewhere_are_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "common_of_this_test.py").write_text("x = 1\n")
    (folder / "package/part.py").write_text("import common_of_this_test, numpy, sympy\nfrom .deep import three\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.syspath_prepend(elsewhere)
    read = read_contents(named("package.part:score").model_dump(mode="json"))
    names = ["", "package/__init__.py", "package/deep/__init__.py", "package/deep/three.py", "package/deep/two.py"]
    assert sorted(read.contents["reward.function"]) == sorted([*names, "package/sibling.py"])
    (note,) = read.notes
    assert f"reward.function imports common_of_this_test ({elsewhere}/common_of_this_test.py)" in note
    assert not {"package", "package.part"} & sys.modules.keys()


def test_a_module_of_an_installed_package_is_its_own_file() -> None:
    read = read_contents(named("sympy.core.numbers:Integer").model_dump(mode="json"))
    assert list(read.contents["reward.function"]) == [""] and not read.notes
    assert "reward.function" not in contents(named("math")), "a built-in function has no file"


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({}, "free"),
        ({"reward": {"kl_coef": 0.1}}, "results"),
        ({"lora": {"rank": 4}}, "results"),
        ({"loss": {"kl_coef": 0.1}}, "results"),
    ],
)
def test_the_weights_of_the_model_matter_as_reference_and_below_adapters(
    settings: dict, kind: str, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("model.safetensors", "tokenizer.json", "README.md"):
        (model / name).write_text("1")
    run = config(model={"path": str(model)}, **settings)
    before = contents(run)
    for name in ("model.safetensors", "tokenizer.json", "README.md"):
        (model / name).write_text("2")
    changes = find_content_changes(before, contents(run), run)
    assert [(c.file, c.kind) for c in changes] == [("model.safetensors", kind), ("tokenizer.json", "results")]


def test_lists_of_words_and_paths_and_programs(tmp_path: Path) -> None:
    """Each path in an agent's command counts, but not the interpreter."""
    script = tmp_path / "agent.py"
    script.write_text("1")
    run = config(agent={"command": [sys.executable, str(script), "--flag"]})
    assert list(contents(run)["agent.command"]) == ["1"]


def test_one_message_has_every_file_with_old_and_new(folder: Path) -> None:
    """At most four files a key, and the number of the others; names that are accepted are not in it."""
    before = contents(named(f"{folder}/rewards.py:score"))
    for name in IMPORTED:
        (folder / name).write_text("x = 3\n")
    now = contents(named(f"{folder}/rewards.py:score"))
    changes = find_content_changes(before, now, named(f"{folder}/rewards.py:score"))
    with pytest.raises(CheckpointError) as caught:
        check_changes(changes, Path("step_000001"), accepted=["loss.name"])
    lines = str(caught.value).splitlines()
    first = before["reward.function"]["dynamic.py"][:12]
    assert lines[1] == f"  reward.function: the content of dynamic.py differs: {first} -> no such file"[
        : len(lines[1])
    ] or (lines[1].startswith(f"  reward.function: the content of dynamic.py differs: {first} -> "))
    assert "more files" in lines[5] and lines[6].endswith("--allow-changed reward.function")
    check_changes(changes, Path("step_000001"), accepted=["reward.function"])


def accepts(value: object) -> Callable[[], Config]:
    return lambda: config(checkpoint={"accept_changes": value})


def test_names_of_accepted_keys() -> None:
    for value in ("reward.function", "reward.function, loss.name", ["model.transformer.x"], True, False):
        accepts(value)()
    for wrong in ("reward.functon", "rewards.function", "reward", ["run.seed", 3], "yes"):
        with pytest.raises(ConfigError, match=r"accept_changes"):
            accepts(wrong)()


def moved_values(folder: Path) -> dict[str, tuple[object, object, bool]]:
    """Value of a run, value of this start, and whether they are the same: files are those of ``moved_files``."""
    a, b = folder / "a", folder / "b"
    return {
        "a file elsewhere": (f"{a}/x.jsonl", f"{b}/x.jsonl", True),
        "a file with another name": (f"{a}/x.jsonl", f"{b}/renamed.jsonl", True),
        "another file": (f"{a}/x.jsonl", f"{b}/other.jsonl", False),
        "a folder elsewhere": (f"{a}/model", f"{b}/model", True),
        "a folder with one other file": (f"{a}/model", f"{b}/changed", False),
        "an empty folder": (f"{a}/empty", f"{b}/empty", False),
        "a path without a file": (f"{a}/none", f"{b}/none", False),
        "a function elsewhere": (f"{a}/f.py:score", f"{b}/f.py:score", True),
        "another function of the same file": (f"{a}/f.py:score", f"{a}/f.py:other", False),
        "a list elsewhere": ([f"{a}/x.jsonl", f"{a}/model"], [f"{b}/x.jsonl", f"{b}/model"], True),
        "a list in another order": ([f"{a}/x.jsonl", f"{a}/y.jsonl"], [f"{b}/y.jsonl", f"{b}/x.jsonl"], False),
        "a list with a word": (["run", f"{a}/x.jsonl", "7"], ["run", f"{b}/x.jsonl", "7"], True),
        "a list with another word": (["run", f"{a}/x.jsonl", "7"], ["run", f"{b}/x.jsonl", "8"], False),
        "a longer list": ([f"{a}/x.jsonl"], [f"{b}/x.jsonl", f"{b}/x.jsonl"], False),
        "words": (["a", "b"], ["b", "a"], False),
    }


def moved_files(folder: Path) -> None:
    for place in (folder / "a", folder / "b"):
        for name in ("model", "changed", "empty"):
            (place / name).mkdir(parents=True)
        for name in ("x.jsonl", "renamed.jsonl", "model/weights", "changed/weights", "changed/config"):
            (place / name).write_text("1\n")
        for name in ("y.jsonl", "other.jsonl", "model/config"):
            (place / name).write_text("2\n")
        (place / "f.py").write_text("def score(): ...\ndef other(): ...\n")


def test_a_value_is_the_same_where_all_its_files_are_and_nothing_else_differs(tmp_path: Path) -> None:
    moved_files(tmp_path)
    for name, (old, new, expected) in moved_values(tmp_path).items():
        key = "reward.function" if "function" in name else "data.train"
        section, _, field = key.partition(".")
        before, now = (read_contents({section: {field: value}}).contents.get(key) for value in (old, new))
        assert same_value(old, new, tmp_path, before, now) is expected, name
        assert same_value(old, old, tmp_path, before, before), name
