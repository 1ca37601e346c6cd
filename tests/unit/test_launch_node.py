"""``launch/node.sh``: the ranks of a node, their variables, SIGTERM, and the exit code of the rank that fails first."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RANK = """
import json, os, pathlib, signal, sys, time
folder = pathlib.Path(os.environ["STUB_FOLDER"])
rank = os.environ["RANK"]
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"]
names += ["MASTER_ADDR", "MASTER_PORT", "CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_CUDA_ALLOC_CONF"]
(folder / f"env_{rank}").write_text(json.dumps([{name: os.environ[name] for name in names}, sys.argv[1:]]))
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
(folder / f"ready_{rank}").touch()
while not asked or os.environ.get("DEAF"):
    if (folder / f"fail_{rank}").exists():
        sys.exit(int((folder / f"fail_{rank}").read_text()))
    time.sleep(0.02)
(folder / f"saved_{rank}").touch()
"""


def start(folder: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    (folder / "rank.py").write_text(RANK)
    python = folder / "python"
    python.write_text(
        '#!/bin/sh\ncase "$*" in *--print-rank-variables*) echo PYTORCH_CUDA_ALLOC_CONF=segments; exit;; esac\n'
        f'exec {sys.executable} {folder}/rank.py "$@"\n'
    )
    python.chmod(0o755)
    defaults = {"PYTHON": str(python), "STUB_FOLDER": str(folder), "NUM_NODES": "2", "MASTER_ADDR": "n0"}
    return subprocess.Popen(
        [str(ROOT / "launch/node.sh"), *arguments],
        env=os.environ | defaults | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_ready(folder: Path, ranks: list[int]) -> None:
    end = time.monotonic() + 30
    while not all((folder / f"ready_{rank}").exists() for rank in ranks):
        assert time.monotonic() < end
        time.sleep(0.02)


def test_ranks_get_their_variables_and_save_at_sigterm(tmp_path: Path) -> None:
    process = start(tmp_path, "my.toml", "--nproc-per-node", "2", "--run.seed", "3", JOB_COMPLETION_INDEX="1")
    wait_ready(tmp_path, [2, 3])
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=30)[0]
    assert process.returncode == 0 and "finish their step and save" in output, output
    assert (tmp_path / "saved_2").exists() and (tmp_path / "saved_3").exists()
    variables, arguments = json.loads((tmp_path / "env_3").read_text())
    assert variables == {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "n0",
        "MASTER_PORT": "29500",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "segments",
    }
    assert arguments == ["-m", "megatron_dppo.train", "my.toml", "--run.seed", "3"]


@pytest.mark.parametrize("code", [2, 3, 5])
def test_the_exit_code_is_that_of_the_rank_that_fails_first(code: int, tmp_path: Path) -> None:
    process = start(tmp_path, "my.toml", "--nproc-per-node", "3", NODE_RANK="0")
    wait_ready(tmp_path, [0, 1, 2])
    (tmp_path / "fail_1").write_text(str(code))
    output = process.communicate(timeout=30)[0]
    assert process.returncode == code and f"rank 1 ended with exit code {code}" in output, output
    assert (tmp_path / "saved_0").exists() and (tmp_path / "saved_2").exists()


@pytest.mark.parametrize(
    ("environment", "arguments", "message"),
    [
        ({}, ["my.toml", "--nproc-per-node", "2"], "NODE_RANK = ''"),
        ({"NODE_RANK": "2"}, ["my.toml", "--nproc-per-node", "2"], "expected a number below NUM_NODES = 2"),
        ({"NODE_RANK": "0"}, ["my.toml"], "--nproc-per-node = ''"),
        ({"NODE_RANK": "0", "MASTER_ADDR": ""}, ["my.toml", "--nproc-per-node", "2"], "no MASTER_ADDR"),
        ({"NODE_RANK": "0", "NUM_NODES": "x"}, ["my.toml", "--nproc-per-node", "2"], "NUM_NODES = 'x'"),
        ({"NODE_RANK": "0"}, ["--nproc-per-node", "2"], "no configuration"),
    ],
)
def test_what_is_missing_is_named(
    environment: dict[str, str], arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NODE_RANK", "JOB_COMPLETION_INDEX"):
        monkeypatch.delenv(name, raising=False)
    process = start(tmp_path, *arguments, **environment)
    output = process.communicate(timeout=30)[0]
    assert process.returncode == 2 and message in output, output
