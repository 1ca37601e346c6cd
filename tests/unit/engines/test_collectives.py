"""NCCL of trainer and servers: one communicator takes one version, and one value of the variables that share memory."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from megatron_dppo.commands.main import main
from megatron_dppo.run.server_checks import trainer_versions
from megatron_dppo_engines.serving.collectives import (
    CollectiveVersions,
    Engine,
    find_mismatches,
    interpreter_versions,
    pinned_versions,
)
from tests.unit import configs

ROOT = Path(__file__).parents[3]
OFF = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
TRAINER = CollectiveVersions(torch="2.13.0", nccl="2.29.7", variables=OFF)


def versions(
    nccl: str | None, torch: str | None, variables: Mapping[str, str | None] | None = None
) -> CollectiveVersions:
    return CollectiveVersions(nccl=nccl, torch=torch, variables=variables or {})


@pytest.mark.parametrize(
    ("engine", "server", "fixes"),
    [
        (
            "sglang",
            pinned_versions("sglang", "0.5.23"),
            ["pip install 'sglang==0.5.21'", "pip install 'torch==2.14.1'"],
        ),
        ("vllm", pinned_versions("vllm", "0.33.0"), ["pip install 'vllm==0.32.0'", "pip install 'torch==2.14.0'"]),
        ("vllm", versions("2.28.9", "2.11.0+cu130"), ["pip install 'vllm==0.32.0'", "pip install 'torch==2.11.0'"]),
    ],
)
def test_different_versions_are_refused_with_both_and_the_command_that_fixes_them(
    engine: Engine, server: CollectiveVersions, fixes: list[str]
) -> None:
    (problem,) = find_mismatches(engine, server, TRAINER)
    for text in (f"NCCL {server.nccl}", f"torch {server.torch}", "NCCL 2.29.7 (torch 2.13.0)", *fixes):
        assert text in problem


def test_equal_and_unknown_versions_are_no_problem() -> None:
    for server in (
        pinned_versions("sglang", "0.5.21"),
        pinned_versions("vllm", "0.32.0"),
        pinned_versions("sglang", "9.9.9"),
        versions(None, "2.14.1+cpu"),
        versions("2.29.7", "2.14.1", OFF),
    ):
        assert list(find_mismatches("sglang", server, TRAINER)) == [], server


@pytest.mark.parametrize(("theirs", "ours", "is_equal"), [("0", "0", True), (None, "0", False), ("1", "0", False)])
def test_variables_that_differ_are_refused(theirs: str | None, ours: str, is_equal: bool) -> None:
    trainer = versions("2.29.7", "2.13.0", {"NCCL_CUMEM_ENABLE": ours})
    problems = list(find_mismatches("vllm", versions("2.29.7", "2.13.0", {"NCCL_CUMEM_ENABLE": theirs}), trainer))
    assert [problem.split(" is ")[0] for problem in problems] == [] if is_equal else ["NCCL_CUMEM_ENABLE"]


def fake_python(folder: Path, answer: str) -> str:
    python = folder / "python3"
    python.write_text(f"#!/bin/sh\necho '{answer}'\n")
    python.chmod(0o755)
    return str(python)


def test_an_interpreter_is_asked_and_other_programs_are_not(tmp_path: Path) -> None:
    own = interpreter_versions([sys.executable, "-m", "sglang.launch_server"])
    assert own is not None and own.torch == torch.__version__ and (own.nccl is None) == (torch.version.cuda is None)
    python = fake_python(tmp_path, '{"torch": "2.14.1", "nccl": "2.30.7"}')
    assert interpreter_versions([python]) == versions("2.30.7", "2.14.1")
    assert interpreter_versions([fake_python(tmp_path, "no JSON")]) is None
    assert interpreter_versions(["/bin/echo", "x"]) is interpreter_versions(["no such python"]) is None
    assert interpreter_versions([]) is None


def test_serve_refuses_an_environment_with_another_nccl_before_it_starts_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "engine").mkdir()
    trainer = fake_python(tmp_path, '{"torch": "2.13.0", "nccl": "2.29.7"}')
    engine = fake_python(tmp_path / "engine", '{"torch": "2.14.1", "nccl": "2.30.7"}')
    monkeypatch.setattr(sys, "executable", trainer)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    logs = tmp_path / "logs"
    options = ["--log-dir", str(logs), "--rollout.servers.command", json.dumps([engine, "-m", "sglang.launch_server"])]
    assert main(["serve", str(ROOT / "examples/chain_sum/sglang.toml"), *options]) == 2
    message = capsys.readouterr().err
    assert "NCCL 2.30.7 (torch 2.14.1)" in message and "NCCL 2.29.7 (torch 2.13.0)" in message and engine in message
    assert not logs.exists()


def test_the_trainer_has_versions_to_compare_only_if_servers_join_its_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OFF:
        monkeypatch.delenv(name, raising=False)

    def of(engine: str, method: str = "distributed") -> CollectiveVersions | None:
        sync = {} if engine == "local" else {"weight_sync": {"method": method}}
        return trainer_versions(configs.config(rollout={"engine": engine, **sync}).rollout)

    assert of("sglang") is None, "no CUDA: gloo does not compare versions"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    expected = versions("2.29.7", torch.__version__, {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "1"})
    assert of("sglang") == of("vllm") == expected
    assert of("local") is of("sglang", "disk") is of("vllm", "ipc") is None
