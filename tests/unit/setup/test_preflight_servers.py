"""Messages about inference servers of the checks before a start."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.config.io import read_config
from megatron_dppo.setup import server_checks
from megatron_dppo.setup.preflight import Start, find_problems
from megatron_dppo.setup.server_checks import check_servers
from megatron_dppo_engines.serving.collectives import CollectiveVersions

EXAMPLE = Path(__file__).parents[3] / "examples/chain_sum"
MODEL = EXAMPLE / "model"
SINGLE = ("--parallel.expert_model_parallel_size", "1")
SGLANG = {"version": "0.5.23", "context_length": 256, "enable_return_routed_experts": True}


@pytest.fixture
def servers() -> Iterator[Any]:
    """Starts stand-ins for servers that answer GET by a table; returns their URLs."""
    running = []

    def start(answers: dict[str, Any]) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answer = answers.get(self.path)
                self.send_response(404 if answer is None else 200)
                self.end_headers()
                self.wfile.write(json.dumps(answer).encode())

            do_POST = do_GET

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        running.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


def sglang(**changes: Any) -> dict[str, Any]:
    return {"/health": {}, "/server_info": {**SGLANG, **changes}, "/model_info": {"model_path": "m"}}


def vllm(*, model: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    config = {
        "model_config": {"max_model_len": 256, "logprobs_mode": "processed_logprobs", "max_logprobs": 32}
        | (model or {}),
        "parallel_config": {"worker_extension_cls": "megatron_dppo_vllm.WorkerExtension"},
    }
    return {
        "/health": {},
        "/version": {"version": "0.32.0"},
        "/v1/models": {"data": [{"id": "m"}]},
        "/server_info?config_format=json": {"vllm_config": config | changes},
    }


def problems_of(engine: str, *urls: str, **settings: str) -> list[str]:
    overrides = ["--rollout.engine", engine, "--rollout.servers.urls", json.dumps(urls), *SINGLE]
    overrides += [part for key, value in settings.items() for part in (f"--{key.replace('__', '.')}", value)]
    config = read_config(EXAMPLE / "dppo.toml", overrides).config
    assert config is not None
    return [str(error) for error in check_servers(config, None, generating=True).problems]


def test_a_server_without_sampling_masks_is_reported_before_the_start(servers: Any) -> None:
    filters = {"data__max_prompt_tokens": "200", "rollout__top_p": "0.9", "rollout__top_k": "100"}
    assert problems_of("sglang", servers(sglang(sampling_mask_max_tokens=100)), **filters) == []
    assert problems_of("sglang", servers(sglang(version="0.5.21")), **filters) == []
    (old,) = problems_of("sglang", servers(sglang(version="0.5.20")), **filters)
    assert "0.5.20 is older than 0.5.21, the first that can work with a sampling filter" in old
    (few,) = problems_of("sglang", servers(sglang(sampling_mask_max_tokens=99)), **filters)
    assert "is 99, and rollout.top_k = 100; start it with --sampling-mask-max-tokens 100" in few
    with_masks = vllm(model={"return_sampling_mask": True})
    assert problems_of("vllm", servers(with_masks), **filters, rollout__weight_sync__method="disk") == []
    without_masks = servers(vllm(model={"return_sampling_mask": False}))
    (without,) = problems_of("vllm", without_masks, **filters, rollout__weight_sync__method="disk")
    assert "start it with --return-sampling-mask" in without


def test_a_server_that_cannot_serve_the_run_is_reported_with_the_flag_that_fixes_it(servers: Any) -> None:
    replay = {"train__router_replay": "rollout", "data__max_prompt_tokens": "200"}
    assert problems_of("sglang", servers(sglang()), **replay) == []
    assert problems_of("sglang", servers(sglang(version="0.5.19")), **replay) == []
    without = {"data__max_prompt_tokens": "200"}
    assert problems_of("sglang", servers(sglang(enable_return_routed_experts=False)), **without) == []
    bad = servers(sglang(context_length=100, version="0.5.9", enable_return_routed_experts=False, dp_size=2))
    old, short, routes, dp = problems_of("sglang", bad, **replay)
    assert "0.5.9 is older than 0.5.19" in old and "100 tokens" in short
    assert "leaves 2 positions unused; start it with --context-length 242" in short
    assert len(problems_of("sglang", servers(sglang(context_length=241)), **replay)) == 1
    assert len(problems_of("sglang", servers(sglang(context_length=242)), **replay)) == 0
    assert "--enable-return-routed-experts" in routes and "--dp-size 2" in dp
    assert len(problems_of("sglang", servers(sglang(dp_size=2)), **replay, rollout__weight_sync__method="disk")) == 0
    assert problems_of("sglang", servers(sglang(dp_size=2, enable_dp_attention=True)), **replay) == []
    (router,) = problems_of("sglang", servers(sglang(disaggregation_mode="decode")), **replay)
    assert "--disaggregation-mode is decode: it answers only together with others" in router
    adapter = without | {"rollout__weight_sync__method": "adapter", "lora__rank": "32"}
    assert problems_of("sglang", servers(sglang(enable_lora=True, max_lora_rank=32)), **adapter) == []
    (lora,) = problems_of("sglang", servers(sglang(enable_lora=None)), **adapter)
    (rank,) = problems_of("vllm", servers(vllm(lora_config={"max_lora_rank": 16}, parallel_config={})), **adapter)
    assert "--enable-lora --max-lora-rank 32" in lora and "--max-lora-rank is 16, and lora.rank = 32" in rank
    assert len(problems_of("vllm", servers(vllm(lora_config=None)), **adapter)) == 1
    topk = {"loss__name": "dppo_topk_tv", "data__max_prompt_tokens": "200"}
    assert problems_of("vllm", servers(vllm()), **topk) == []
    bad = servers(vllm(model={"logprobs_mode": "raw_logprobs", "max_logprobs": 20}, parallel_config={}))
    mode, most, extension = problems_of("vllm", bad, **topk)
    assert "processed_logprobs" in mode and "--max-logprobs 21" in most and "worker extension" in extension
    closed = vllm()
    del closed["/server_info?config_format=json"]
    (control,) = problems_of("vllm", servers(closed), **topk)
    assert "VLLM_SERVER_DEV_MODE=1" in control


def test_another_engine_a_dead_server_and_junk_are_each_reported(servers: Any) -> None:
    assert "does not respond like vLLM" in problems_of("vllm", servers(sglang()))[0]
    assert "not healthy" in problems_of("sglang", "http://127.0.0.1:9")[0]
    for junk in ([], "text", {"version": 5, "context_length": "long"}, {"version": None, "context_length": {}}):
        found = problems_of("sglang", servers({**sglang(), "/server_info": junk}))
        assert found and "Traceback" not in found[0]


def test_a_run_continues_with_usable_servers_and_a_dry_run_notes_those_that_are_not_running(servers: Any) -> None:
    urls = json.dumps([servers(sglang()), "http://127.0.0.1:9"])
    fits = ["--data.max_prompt_tokens", "200", *SINGLE]
    config = read_config(EXAMPLE / "dppo.toml", ["--rollout.engine", "sglang", "--rollout.servers.urls", urls, *fits])
    assert config.config is not None and not config.problems
    start = Start(config.config, 1)
    assert find_problems(start) == [] and "127.0.0.1:9" in start.notes[0]
    dry = Start(config.config, 1, dry_run=True)
    assert find_problems(dry) == []
    assert any(note.startswith("servers  1 of 2 not running yet (http://127.0.0.1:9)") for note in dry.notes)
    # A server that runs and does not fit is a problem, beside one that does not run.
    urls = json.dumps([servers({**sglang(), "/server_info": []}), "http://127.0.0.1:9"])
    config = read_config(EXAMPLE / "dppo.toml", ["--rollout.engine", "sglang", "--rollout.servers.urls", urls, *fits])
    assert config.config is not None
    (problem,) = find_problems(Start(config.config, 1, dry_run=True))
    assert "127.0.0.1:9" not in str(problem)


def test_a_server_that_a_killed_trainer_left_paused_does_not_block_the_next_run(servers: Any) -> None:
    paused = sglang()
    del paused["/health"]  # a paused SGLang fails its own check, which generates a token
    urls, fits = json.dumps([servers(paused)]), ["--data.max_prompt_tokens", "200", *SINGLE]
    config = read_config(EXAMPLE / "dppo.toml", ["--rollout.engine", "sglang", "--rollout.servers.urls", urls, *fits])
    assert config.config is not None
    assert find_problems(Start(config.config, 1)) == []
    assert "generates nothing now (paused" in str(find_problems(Start(config.config, 1, dry_run=True))[0])


def test_a_server_with_another_nccl_is_refused_where_weights_are_broadcast(
    servers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
    trainer = CollectiveVersions(torch="2.13.0", nccl="2.29.7", variables=variables)
    monkeypatch.setattr(server_checks, "trainer_versions", lambda _: trainer)
    prompts = {"data__max_prompt_tokens": "200"}
    assert problems_of("sglang", servers(sglang(version="0.5.21")), **prompts) == []
    (pinned,) = problems_of("sglang", servers(sglang()), **prompts)
    for text in ("NCCL 2.30.7 (torch 2.14.1, which sglang 0.5.23 pins)", "NCCL 2.29.7", "pip install 'sglang==0.5.21'"):
        assert text in pinned
    assert problems_of("sglang", servers(sglang(device="cpu")), **prompts) == []
    monkeypatch.setenv("MEGATRON_DPPO_SERVER_NCCL", "2.29.7")
    assert problems_of("sglang", servers(sglang()), **prompts) == []
    monkeypatch.setenv("MEGATRON_DPPO_SERVER_NCCL", "2.28.9")
    assert "NCCL 2.28.9" in problems_of("sglang", servers(sglang(version="0.5.21")), **prompts)[0]
    monkeypatch.delenv("MEGATRON_DPPO_SERVER_NCCL")
    (nvls,) = problems_of("sglang", servers(sglang(version="0.5.21", enable_nccl_nvls=True)), **prompts)
    assert "NCCL_NVLS_ENABLE is 1 in the server and 0 in the trainer" in nvls

    reported = {"torch": "2.14.0", "nccl": "2.30.7", "variables": {**variables, "NCCL_CUMEM_ENABLE": None}}
    call = {"/collective_rpc": {"results": [reported]}}
    version, cumem = problems_of("vllm", servers({**vllm(), **call}), **prompts)
    assert "NCCL 2.30.7 (torch 2.14.0), but the trainer has NCCL 2.29.7 (torch 2.13.0)" in version
    assert "NCCL_CUMEM_ENABLE is not set in the server" in cumem
    fits = {"/collective_rpc": {"results": [{"torch": "2.13.0", "nccl": "2.29.7", "variables": variables}]}}
    assert problems_of("vllm", servers({**vllm(), **fits}), **prompts) == []
    # An older extension has no such call; the versions are then those that vLLM pins.
    assert problems_of("vllm", servers(vllm()), **prompts) == []


def test_memory_of_one_node_is_refused_for_servers_over_two(servers: Any) -> None:
    ipc = {"data__max_prompt_tokens": "200", "rollout__weight_sync__method": "ipc"}
    extension = {"worker_extension_cls": "megatron_dppo_vllm.WorkerExtension"}
    for engine, answers in (
        ("sglang", lambda nodes: sglang(nnodes=nodes)),
        ("vllm", lambda nodes: vllm(parallel_config=extension | {"nnodes": nodes})),
    ):
        assert not any("--nnodes" in text for text in problems_of(engine, servers(answers(1)), **ipc))
        assert sum("--nnodes 2: " in text for text in problems_of(engine, servers(answers(2)), **ipc)) == 1, engine
