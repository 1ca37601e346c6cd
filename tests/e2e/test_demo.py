"""The wheel alone, in an environment of its own, outside of the repository: the demo, and what else it holds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from megatron_dppo.commands.convert import CONVERSIONS
from tests.e2e.runs import ROOT

pytestmark = pytest.mark.e2e


def done(command: list[str], cwd: Path, limit: int = 240, **more: str) -> str:
    """What a command prints on both streams that ends well, without the repository on any path."""
    env = {
        k: v
        for k, v in os.environ.items()
        if k not in ("PYTHONPATH", "PYTHONWARNINGS", "RANK", "WORLD_SIZE", "LOCAL_RANK")
    } | more
    ended = subprocess.run(
        command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=limit
    )
    assert ended.returncode == 0, ended.stdout[-5000:]
    return ended.stdout


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``megatron-dppo`` of a fresh environment with the wheel; the packages that it needs are those of this process."""
    place = tmp_path_factory.mktemp("wheel")
    # Built from a copy: setuptools leaves its work in the source folder.
    ignored = shutil.ignore_patterns(".*", "runs", "build", "*.egg-info", "__pycache__", "tests")
    shutil.copytree(ROOT, place / "source", ignore=ignored)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = ["wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(place), str(place / "source")]
    done([*pip, *build], place)
    (wheel,) = place.glob("megatron_dppo-*.whl")
    shutil.rmtree(place / "source")
    venv.create(place / "venv", symlinks=True)
    python = place / "venv/bin/python"
    (site,) = (place / "venv").glob("lib/python3*/site-packages")
    # Plain paths: the .pth files in them, with which an editable install finds the repository, are not followed.
    others = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site / "others.pth").write_text("\n".join(others) + "\n")
    done([*pip, "--python", str(python), "install", "-q", "--no-deps", "--no-index", str(wheel)], place)
    return place / "venv/bin/megatron-dppo"


def test_the_demo_runs_from_the_wheel_alone(program: Path, tmp_path: Path) -> None:
    found = "import megatron_dppo as m; print(m.__file__)"
    where = done([str(program.with_name("python")), "-c", found], tmp_path, PYTHONWARNINGS="ignore").strip()
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
