"""The wheel alone, in an environment of its own, outside of the repository: demo, losses, what else it holds."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from megatron_dppo_convert.command import CONVERSIONS
from tests.e2e.runs import ROOT
from tests.unit.test_doc_blocks import NOT_RUN, blocks

pytestmark = pytest.mark.e2e


def done(command: list[str], cwd: Path, limit: int = 240, code: int = 0, **more: str) -> str:
    """Run a command without the repository on any path, check its exit code, and return its output."""
    env = {
        k: v
        for k, v in os.environ.items()
        if k not in ("PYTHONPATH", "PYTHONWARNINGS", "RANK", "WORLD_SIZE", "LOCAL_RANK")
    } | more
    ended = subprocess.run(
        command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=limit
    )
    assert ended.returncode == code, ended.stdout[-5000:]
    return ended.stdout


PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("wheel")
    # Built from a copy: setuptools leaves its work in the source folder.
    ignored = shutil.ignore_patterns(".*", "runs", "build", "*.egg-info", "__pycache__", "tests")
    shutil.copytree(ROOT, place / "source", ignore=ignored)
    build = ["wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(place), str(place / "source")]
    done([*PIP, *build], place)
    shutil.rmtree(place / "source")
    (built,) = place.glob("megatron_dppo-*.whl")
    return built


@pytest.fixture(scope="module")
def program(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``megatron-dppo`` of a fresh environment with the wheel; the packages that it needs are those of this process."""
    place = tmp_path_factory.mktemp("program")
    venv.create(place / "venv", symlinks=True)
    python = place / "venv/bin/python"
    (site,) = (place / "venv").glob("lib/python3*/site-packages")
    # Plain paths: the .pth files in them, with which an editable install finds the repository, are not followed.
    others = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site / "others.pth").write_text("\n".join(others) + "\n")
    done([*PIP, "--python", str(python), "install", "-q", "--no-deps", "--no-index", str(wheel)], place)
    return place / "venv/bin/megatron-dppo"


def link_packages(names: list[str], site: Path) -> set[str]:
    """Link the installed packages, and all that they require, into another environment. Returns their names."""
    linked: set[str] = set()
    waiting = list(names)
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in linked:
            continue
        linked.add(name)
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] != ".."}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(distribution.locate_file(top))))
        required = map(Requirement, distribution.requires or ())
        waiting += [each.name for each in required if each.marker is None or each.marker.evaluate({"extra": ""})]
    return linked


LOSSES = """
import doctest, importlib, importlib.util, pkgutil, sys
import megatron_dppo as md
for name in ("numpy", "megatron", "transformers", "aiohttp", "tomli_w", "rich"):
    assert importlib.util.find_spec(name) is None, name
for name in md.__all__:
    getattr(md, name)
import megatron_dppo.losses, torch
names = {"torch": torch, "LossInputs": md.LossInputs, "LossConfig": md.LossConfig}
attempted = 0
for module in pkgutil.iter_modules(megatron_dppo.losses.__path__):
    loss = importlib.import_module(f"megatron_dppo.losses.{module.name}")
    result = doctest.testmod(loss, extraglobs=names, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert not result.failed, module.name
    attempted += result.attempted
print("examples", attempted)
"""


def test_the_losses_need_torch_and_pydantic_alone(wheel: Path, tmp_path: Path) -> None:
    """The extra ``loss`` in an environment with these two: the worked example of every loss, and the pages' blocks."""
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv/bin/python"
    (site,) = (tmp_path / "venv").glob("lib/python3*/site-packages")
    linked = link_packages(["torch", "pydantic"], site)
    assert "numpy" not in linked and {"torch", "pydantic", "pydantic-core"} <= linked
    # Without an index, pip refuses if the wheel needs anything else.
    done([*PIP, "--python", str(python), "install", "-q", "--no-index", f"{wheel}[loss]"], tmp_path)
    blocks_of_pages = [
        text
        for page, text, above in blocks("python")
        if page.name in ("loss.md", "zero_to_why.md", "api.md") and not above.startswith(NOT_RUN)
    ]
    assert blocks_of_pages
    (tmp_path / "losses.py").write_text("\n".join([LOSSES, *blocks_of_pages]))
    text = done([str(python), "losses.py"], tmp_path, PYTHONWARNINGS="ignore")
    examples = re.search(r"^examples (\d+)$", text, re.M)
    assert examples and int(examples[1]) >= 15, text
    program = str(python.with_name("megatron-dppo"))
    assert "usage: megatron-dppo" in done([program, "--help"], tmp_path)
    for command in (["demo"], ["plan", str(ROOT / "examples/chain_sum/dppo.toml"), "--world-size", "2"]):
        assert "pip install 'megatron-dppo[train]'" in done([program, *command], tmp_path, code=2)


def test_the_wheel_says_to_an_index_what_it_is(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith(".dist-info/METADATA"))
    head, _, description = metadata.partition("\n\n")
    fields = [line.split(": ", 1) for line in head.splitlines() if ": " in line]
    values = {name: [value for key, value in fields if key == name] for name, _ in fields}
    assert values["License-Expression"] == ["Apache-2.0"] and any(name.endswith("/LICENSE") for name in names)
    assert {value for value in values["Requires-Dist"] if "extra" not in value} == {"torch>=2.6", "pydantic>=2.10"}
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)} <= set(values["Classifier"])
    assert values["Description-Content-Type"] == ["text/markdown"]
    # An index shows no file of the repository.
    targets = re.findall(r"\]\(([^)\s]+)\)", description)
    assert "## Try it" in description and targets and all(target.startswith("https://") for target in targets)
    # The page of set-up says what every extra brings.
    page = (ROOT / "docs/setup.md").read_text(encoding="utf-8")
    assert not [extra for extra in values["Provides-Extra"] if f"`[{extra}]`" not in page]


def test_the_demo_runs_from_the_wheel_alone(program: Path, tmp_path: Path) -> None:
    result = "import megatron_dppo as m; print(m.__file__)"
    where = done([str(program.with_name("python")), "-c", result], tmp_path, PYTHONWARNINGS="ignore").strip()
    assert Path(where).is_relative_to(program.parents[1])

    text = done([str(program), "demo", "--steps", "2"], tmp_path, limit=500)
    folder = tmp_path / "runs/demo"
    assert "base model of seed" not in text, "the wheel has no base model"
    assert "Warning" not in text, "the terminal is for the demo"
    assert (folder / "demo.png").read_bytes().startswith(b"\x89PNG") and (folder / "demo.png").stat().st_size > 20_000
    said = (folder / "demo.txt").read_text().strip()
    assert said in text and said.startswith("In 2 steps")
    # The first steps are those of the base model.
    assert said.endswith("none of them ends clearly highest.")
    for name in ("DPPO with capped weights", "GRPO clip-higher", "PG-IS without a trust region"):
        assert f"{name} (masks" in said
    report = (folder / "report.html").read_text()
    assert f"report   {folder.relative_to(tmp_path)}/report.html" in text and report.count('id="step-') == 6
    assert "w0" in report and "GRPO clip-higher" in report, "tokens are decoded"
    assert len(list((folder / "rows").glob("*.json"))) == 3 and list(tmp_path.iterdir()) == [tmp_path / "runs"]
    assert not list((folder / "bases").iterdir()) and not list((folder / "runs").iterdir())


def test_the_wheel_has_the_examples_the_launch_scripts_and_the_conversions(program: Path, tmp_path: Path) -> None:
    listed = done([str(program), "examples"], tmp_path)
    there = {line.split()[0] for line in listed.splitlines() if line and not line.startswith("megatron-dppo")}
    assert there == {"launch", *(f.name for f in (ROOT / "examples").iterdir() if f.is_dir())}
    done([str(program), "examples", *sorted(there), "--to", "mine"], tmp_path)
    for folder in ("examples", "launch"):
        tracked = subprocess.check_output(["git", "ls-files", folder], cwd=ROOT, text=True).splitlines()
        copied = {str(f.relative_to(tmp_path / "mine")) for f in (tmp_path / "mine" / folder).rglob("*") if f.is_file()}
        assert set(tracked) <= copied and len(tracked) > 2
        for name in tracked:
            assert (tmp_path / "mine" / name).read_bytes() == (ROOT / name).read_bytes(), name
    example = ["train", "mine/examples/chain_sum/dppo.toml", "--dry-run", "--world-size", "2", "--verbose"]
    assert "chain_sum" in done([str(program), *example], tmp_path, PYTHONWARNINGS="ignore")
    assert os.access(tmp_path / "mine/launch/torchrun.sh", os.X_OK)
    done(["bash", "launch/torchrun.sh", "--help"], tmp_path / "mine", PYTHON=str(program.with_name("python")))
    for conversion in CONVERSIONS:
        assert f"usage: megatron-dppo convert {conversion}" in done(
            [str(program), "convert", conversion, "--help"], tmp_path
        )
