"""megatron-dppo doctor: the table of known-bad combinations, servers, the self-test for real, redaction."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.commands.main import main
from megatron_dppo_doctor.doctor.combinations import TABLE, find_bad_combinations
from megatron_dppo_doctor.doctor.machine import Gpu, MachineFacts, format_machine
from megatron_dppo_doctor.doctor.self_test import run_self_test

H100 = Gpu(name="NVIDIA H100 80GB HBM3", capability=(9, 0), gib=79.6)
GOOD = MachineFacts(
    python=(3, 12, 3),
    packages={
        "torch": "2.11.0+cu130",
        "megatron-core": "0.19.2",
        "transformer-engine": "2.20.2",
        "transformer-engine-cu13": "2.20.2",
        "transformers": "5.17.0",
        "triton": "3.6.0",
        "psutil": "7.2.2",
    },
    torch_cuda="13.0",
    driver="580.95",
    nccl="2.28.9",
    gpus=(H100,) * 8,
    transformer_engine="works",
    variables={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
)


def with_packages(**versions: str | None) -> MachineFacts:
    packages = dict(GOOD.packages) | {name.replace("_", "-"): version for name, version in versions.items()}
    return replace(GOOD, packages={name: version for name, version in packages.items() if version is not None})


def with_variables(**values: str) -> MachineFacts:
    return replace(GOOD, variables={**GOOD.variables, **values})


BAD: dict[str, tuple[MachineFacts, str, bool]] = {
    # name -> (machine, observed text, True if a run stops)
    "old megatron": (with_packages(megatron_core="0.15.3"), "megatron-core 0.15.3", True),
    "new megatron": (with_packages(megatron_core="0.20.0"), "megatron-core 0.20.0", True),
    "no megatron": (with_packages(megatron_core=None), "no megatron-core", True),
    "python": (replace(GOOD, python=(3, 11, 7)), "megatron-core 0.19.2 with Python 3.11.7", True),
    "psutil": (with_packages(psutil=None), "no psutil", True),
    "transformers": (with_packages(transformers="4.55.4"), "transformers 4.55.4", True),
    "torch": (with_packages(torch="2.5.1"), "torch 2.5.1", True),
    "cpu build": (
        replace(GOOD, torch_cuda=None, gpus=(), transformer_engine="not checked"),
        "driver 580.95 with torch",
        True,
    ),
    "no device": (replace(GOOD, gpus=(), transformer_engine="not checked"), "and no device", True),
    "broken engine": (replace(GOOD, transformer_engine="cannot be used (OSError)"), "cannot be used (OSError)", True),
    "engine of another CUDA": (
        with_packages(transformer_engine_cu13=None, transformer_engine_cu12="2.20.2"),
        "transformer-engine-cu12 with torch for CUDA 13.0",
        True,
    ),
    "attention switch": (with_variables(NVTE_FLASH_ATTN="0"), "NVTE_FLASH_ATTN=0", True),
    "old GPU": (replace(GOOD, gpus=(replace(H100, capability=(7, 5)),)), "compute capability 7.5", True),
    "old engine": (with_packages(transformer_engine="1.13.0"), "transformer-engine 1.13.0", False),
    "no engine": (replace(GOOD, transformer_engine="not installed"), "no Transformer Engine", False),
    "no triton": (with_packages(triton=None), "no triton", False),
    "delta kernels": (
        with_packages(fla_core="0.6.0", triton="3.6.0"),
        "fla-core with triton 3.6.0 on NVIDIA H100",
        False,
    ),
    "connections": (with_variables(CUDA_DEVICE_MAX_CONNECTIONS="8"), "CUDA_DEVICE_MAX_CONNECTIONS=8", False),
    "no connections": (replace(GOOD, variables={}), "CUDA_DEVICE_MAX_CONNECTIONS=(not set)", False),
    "apex": (with_packages(apex="0.9.10.dev0"), "apex 0.9.10.dev0 without compiled kernels", False),
    "no C compiler": (replace(GOOD, c_compiler=None), "no C compiler", True),
    "no build tools": (replace(GOOD, missing_build_tools=("ninja",)), "megatron-core 0.19.2 without ninja", False),
    "blocking": (with_variables(CUDA_LAUNCH_BLOCKING="1"), "CUDA_LAUNCH_BLOCKING=1", False),
}


@pytest.mark.parametrize("case", BAD)
def test_each_known_bad_combination_is_matched_alone_with_reason_and_fix(case: str) -> None:
    machine, observed, is_fatal = BAD[case]
    (finding,) = find_bad_combinations(machine)
    assert observed in finding.observed and finding.combination.is_fatal is is_fatal
    text = str(finding)
    assert text.startswith("problem" if is_fatal else "warning")
    assert finding.combination.reason in text and finding.fix in text and finding.combination.source in text
    assert finding.fix and "{" not in finding.fix


def test_every_row_has_a_case_and_good_machines_match_none() -> None:
    met = {finding.combination for machine, *_ in BAD.values() for finding in find_bad_combinations(machine)}
    assert met == set(TABLE)
    blackwell = replace(GOOD, gpus=(replace(H100, capability=(10, 0)),), variables={})
    cpu = MachineFacts(
        python=(3, 11, 7),
        packages={"torch": "2.13.0+cpu", "megatron-core": "0.16.1", "transformers": "5.23.0", "psutil": "7"},
        transformer_engine="not checked: no CUDA device",
        missing_build_tools=("ninja",),  # megatron-core 0.16.1 compiles nothing
        c_compiler=None,
    )
    assert [list(find_bad_combinations(machine)) for machine in (GOOD, blackwell, cpu)] == [[], [], []]


def test_the_facts_are_formatted_as_text() -> None:
    text = "\n".join(format_machine(replace(GOOD, apex=("FusedAdam",), missing_build_tools=("ninja",))))
    assert "8 x NVIDIA H100 80GB HBM3, compute capability 9.0, 80 GiB" in text
    assert "driver 580.95, CUDA of torch 13.0, NCCL 2.28.9" in text
    assert "C compiler: gcc\nmissing for compiling C++ extensions: ninja" in text
    assert "not installed: megatron-dppo" in text and "nvidia-modelopt" in text
    assert "Apex kernels that Megatron uses: FusedAdam" in text and "CUDA_DEVICE_MAX_CONNECTIONS=1" in text


SGLANG = {
    "/server_info": {"version": "0.5.23", "context_length": 512, "tp_size": 2, "enable_return_routed_experts": False},
    "/model_info": {"model_path": "/home/someone/models/tiny"},
    "/health": {},
}
VLLM = {
    "/version": {"version": "0.32.0"},
    "/v1/models": {"data": [{"id": "/home/someone/models/tiny", "max_model_len": 1024}]},
    "/health": {},
}


@pytest.fixture
def serve() -> Iterator[Any]:
    started = []

    def start(answers: dict[str, Any], key: str | None = None) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                allowed = key is None or self.headers["Authorization"] == f"Bearer {key}"
                answer = answers.get(self.path) if allowed else {}
                self.send_response(401 if not allowed else 404 if answer is None else 200)
                self.end_headers()
                self.wfile.write(json.dumps(answer).encode())

            def log_message(self, *_: object) -> None: ...

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        started.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


def run_doctor(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megatron_dppo.commands.main", "doctor", *arguments]
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, env=os.environ | hidden | variables, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_doctor_end_to_end_with_two_kinds_of_servers(serve: Any) -> None:
    urls = serve(SGLANG, "a-secret-key"), serve(VLLM, "a-secret-key")
    done = run_doctor(
        "--verbose",
        "--api-key-env",
        "OUR_SERVERS",
        "--servers",
        *urls,
        OUR_SERVERS="a-secret-key",
        HF_TOKEN="hf_abcdef",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SGLang 0.5.23, model tiny, context 512, tp 2, returns routed experts: False" in done.stdout
    assert "vLLM 0.32.0, model tiny, context 1024" in done.stdout
    assert "problems: none" in done.stdout and "2 processes, CPU, gloo" in done.stdout
    for check in (
        "all-to-all of uneven parts",
        "head, fp32",
        "probe of the local engine",
        "router replay",
        "update",
    ):
        assert any(check in line and line.endswith("ok") for line in done.stdout.splitlines()), check
    assert "someone" not in done.stdout and "a-secret-key" not in done.stdout and "hf_abcdef" not in done.stdout


CONFIG = """
[run]
output_dir = "unused"
num_steps = 1
[model]
path = "tiny"
[data]
train = "data.jsonl"
max_prompt_tokens = 512
[rollout]
engine = "sglang"
prompts_per_step = 4
samples_per_prompt = 4
max_new_tokens = 512
[rollout.servers]
urls = ["http://gpu-7.internal:1"]
[train]
router_replay = "rollout"
[optimizer]
lr = 1e-6
"""


def test_servers_are_checked_for_a_configuration(
    serve: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    url = serve(SGLANG)
    assert main(["doctor", str(tmp_path / "run.toml"), "--servers", url, "http://127.0.0.1:9", "--no-self-test"]) == 1
    output = capsys.readouterr().out
    problems = [line for line in output.splitlines() if line.startswith("problem  ")]
    assert len(problems) == 3 and "problems: 3" in output
    assert "start it with --context-length 1026" in problems[0]
    assert "--enable-return-routed-experts" in problems[1]
    assert "127.0.0.1:9" in problems[2] and "Connection refused" in problems[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--train.epochs=2"], "overrides need a configuration"),
        (["--servers", "http://127.0.0.1:9", "--api-key-env", "NOT_SET"], "no such environment variable"),
        (["/nowhere.toml"], "/nowhere.toml"),
    ],
)
def test_unusable_arguments_exit_with_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_output_contains_no_hosts_keys_folders_or_user(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron_dppo_doctor.doctor import command

    monkeypatch.setattr(command, "user_name", lambda: "ada.lovelace")
    monkeypatch.setenv("HOME", "/home/ada.lovelace")
    redactor = command.Redactor(
        {"WANDB_API_KEY": "1234567890"}, ["http://me:word12@gpu-7.internal:30000", "localhost:1"]
    )
    redactor.print(
        "gpu-7.internal 1234567890 word12 /home/ada.lovelace/x /scratch/ada.lovelace", f"{Path.cwd()}/y localhost"
    )
    assert capsys.readouterr().out == "host1 *** *** ~/x /scratch/USER\n./y localhost\n"


BROKEN = """
import os, sys
if os.environ.get("RANK") == "1":
    import torch, torch.distributed as dist
    gather = dist.all_gather_into_tensor
    def wrong(out, own, *a, **k):
        work = gather(out, own, *a, **k)
        out[0] += 1
        return work
    dist.all_gather_into_tensor = wrong
    class Dies:
        def find_spec(self, name, *_):
            if name == "megatron_dppo.mcore.shims":
                print("a library is missing", flush=True)
                os._exit(7)
    sys.meta_path.insert(0, Dies())
"""


@pytest.mark.slow
def test_a_wrong_number_and_a_dead_process_on_one_rank_are_reported(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BROKEN)
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3])])
    report = run_self_test(0, environment=os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""})
    failed = [check.name for check in report.checks if not check.passed]
    assert failed[:2] == [f"collective {name}: wrong elements" for name in ("all-gather", "reduce-scatter")]
    assert report.checks[0].passed
    assert report.failure is not None and "1: 7" in report.failure and "a library is missing" in report.failure
    assert not report.passed
