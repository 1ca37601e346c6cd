"""Variables of ranks and servers: equal ones on a communicator, no expandable segments where memory is shared."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from megatron_dppo.commands.main import main
from megatron_dppo.engines.serving.command import plan_servers, server_options
from megatron_dppo.engines.serving.environment import expandable_segments_variable
from megatron_dppo.errors import UserError
from megatron_dppo.parallel.platform import Platform
from megatron_dppo.setup import preflight
from megatron_dppo.weights import open_by_pidfd
from tests.unit import configs

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples/chain_sum"
NAMES = ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
NCCL = ["NCCL_CUMEM_ENABLE=0", "NCCL_NVLS_ENABLE=0"]
EXPANDABLE = ["PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"]
IPC = ["--rollout.weight_sync.method", "ipc"]
COLOCATED = ["--rollout.servers.colocated", "true", "--rollout.weight_sync.method"]


@pytest.fixture(autouse=True)
def no_values_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("example", "options", "user", "expected"),
    [
        ("dppo", [], {}, EXPANDABLE),
        ("sglang", [], {}, NCCL + EXPANDABLE),
        ("vllm", [], {}, NCCL + EXPANDABLE),
        ("sglang", ["--rollout.weight_sync.method", "disk"], {}, EXPANDABLE),
        ("sglang", IPC, {}, []),
        ("vllm", [*COLOCATED, "ipc"], {}, []),
        ("sglang", [*COLOCATED, "disk"], {}, []),
        ("sglang", [], {"NCCL_CUMEM_ENABLE": "1"}, NCCL[1:] + EXPANDABLE),
        ("sglang", [], {"NCCL_NVLS_ENABLE": "", "PYTORCH_ALLOC_CONF": "backend:native"}, NCCL[:1]),
        ("dppo", [], {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, []),
    ],
)
def test_ranks_get_what_the_transfer_needs_and_the_user_has_not_set(
    example: str,
    options: list[str],
    user: dict[str, str],
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in user.items():
        monkeypatch.setenv(name, value)
    assert main(["serve", str(EXAMPLES / f"{example}.toml"), "--print-rank-variables", *options]) == 0
    assert capsys.readouterr().out.splitlines() == expected


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
@pytest.mark.parametrize(("method", "user"), [("distributed", {}), ("distributed", {NAMES[1]: "1"}), ("disk", {})])
def test_servers_get_the_same_values_as_ranks(engine: str, method: str, user: dict[str, str]) -> None:
    config = configs.config(rollout={"engine": engine, "weight_sync": {"method": method}})
    options = server_options(config.rollout, config.model, config.lora, routed_experts=False, topk_logprobs=0)
    (plan,) = plan_servers(config.rollout, options, user)
    actual = {name: (user | plan.env)[name] for name in NAMES if name in user | plan.env}
    assert actual == ({} if method == "disk" else {NAMES[0]: "0", NAMES[1]: "0"} | user)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "a:1, Expandable_Segments: true"}, "PYTORCH_ALLOC_CONF=a:1, Expandable_Segments: true"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, None),
        ({}, None),
    ],
)
def test_expandable_segments_are_recognized(environ: dict[str, str], expected: str | None) -> None:
    assert expandable_segments_variable(environ) == expected


(ALLOCATOR,) = (check for check in preflight.CHECKS if check.name == "memory allocator")


def allocator_problems(method: str, *, colocated: bool = False) -> Iterable[UserError]:
    servers = {"colocated": colocated}
    rollout = {"engine": "sglang", "servers": servers, "weight_sync": {"method": method}}
    return list(ALLOCATOR.find(preflight.Start(configs.config(rollout=rollout), 1)))


def test_a_run_that_shares_expandable_memory_is_refused_where_others_cannot_open_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = Platform(Platform.detect(force_cpu=True).device, "nccl")
    monkeypatch.setattr(Platform, "is_cuda", True)
    monkeypatch.setattr(Platform, "detect", lambda *_, **__: cuda)
    monkeypatch.setattr(preflight, "pidfd_problem", lambda: "pidfd_getfd: Operation not permitted")
    assert not allocator_problems("ipc", colocated=True), "no expandable segments"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    (problem,) = allocator_problems("ipc", colocated=True)
    for text in ("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", "Operation not permitted", "Fix: unset"):
        assert text in str(problem)
    assert not allocator_problems("distributed") and not allocator_problems("disk")
    monkeypatch.setattr(preflight, "pidfd_problem", lambda: None)
    assert not allocator_problems("ipc", colocated=True)


PROBE = """
import ctypes
from megatron_dppo.weights.open_by_pidfd import pidfd_problem
print(pidfd_problem())
# Without CAP_SYS_PTRACE in its children, and with PR_SET_DUMPABLE = 0: no process but root's may attach.
assert ctypes.CDLL(None).prctl(24, 19, 0, 0, 0) == 0
assert ctypes.CDLL(None).prctl(4, 0, 0, 0, 0) == 0
print(pidfd_problem())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give up a capability")
def test_the_probe_asks_the_kernel() -> None:
    paths = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
    result = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, env=paths, check=False)
    assert result.stdout.splitlines() == ["None", "pidfd_getfd: Operation not permitted"], result.stderr


def test_the_probe_names_the_setting_of_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scope").write_text("1\n")
    monkeypatch.setattr(open_by_pidfd, "PTRACE_SCOPE", tmp_path / "scope")
    monkeypatch.setattr(open_by_pidfd, "PROGRAM", "import sys; sys.exit('Operation not permitted')")
    problem = open_by_pidfd.pidfd_problem()
    assert problem == "pidfd_getfd: Operation not permitted, with kernel.yama.ptrace_scope = 1"
