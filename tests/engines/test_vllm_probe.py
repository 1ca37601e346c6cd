"""The probe on vLLM: what it lets pass, and what it finds."""

from __future__ import annotations

import pytest

from megatron_dppo.errors import ConfigError
from megatron_dppo.weights.probe_requests import ProbeError
from megatron_dppo_engines.server import InferenceServer
from megatron_dppo_engines.servers.http import HttpClient
from tests.engines.calls import call
from tests.engines.probes import TEXT, expectation, run
from tests.engines.servers import Engine
from tests.engines.tiny import SPECIAL, Reference, byte_tokenizer

STOCK_FIX = r"--worker-extension-cls megatron_dppo_vllm\.WorkerExtension .*or use the weight sync method disk"


def test_raw_logprobs_are_reported_with_the_flag_and_equal_at_temperature_one(
    plain_vllm: Engine, old_model: Reference
) -> None:
    with pytest.raises(ProbeError, match=r"raw log-probabilities: .*--logprobs-mode processed_logprobs"):
        run(plain_vllm, expectation(), old_model)
    assert run(plain_vllm, expectation(temperature=1.0, max_new_tokens=200), old_model).logprobs.largest < 1e-4


def test_a_stock_server_rejects_transfers_with_a_fix(plain_vllm: Engine) -> None:
    async def use(server: InferenceServer) -> None:
        with pytest.raises(ConfigError, match=STOCK_FIX):
            await server.join_group("127.0.0.1", 1, 1, 2, "nccl")
        await server.pause()
        with pytest.raises(ConfigError, match=STOCK_FIX):
            await server.begin_update()
        await server.resume()

    call(plain_vllm, use)


def test_the_probe_detects_experts_damaged_by_a_stock_cpu_reload_and_the_extension_loads_them_correctly(
    vllm: Engine, old_model: Reference, new_model: Reference
) -> None:
    async def stock_reload(server: InferenceServer) -> None:
        http = HttpClient(server.url)
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(new_model.folder)}}
        await server.pause()
        await http.post("/collective_rpc", body, timeout=60)
        await http.post("/update_weight_version", {"new_version": "3"}, timeout=60)
        await http.close()
        await server.resume()

    call(vllm, stock_reload)
    with pytest.raises(ProbeError, match=r"wrong weights: .*version 3"):
        run(vllm, expectation(policy_version=3), new_model)
    call(vllm, lambda server: server.update_from_disk(str(new_model.folder), 4))
    assert run(vllm, expectation(policy_version=4), new_model).logprobs.largest < 1e-5
    call(vllm, lambda server: server.update_from_disk(str(old_model.folder), 5))
    assert run(vllm, expectation(policy_version=5), old_model).logprobs.largest < 1e-5


def test_other_weights_another_version_and_another_tokenizer_are_reported(
    vllm: Engine, old_model: Reference, new_model: Reference
) -> None:
    call(vllm, lambda server: server.update_from_disk(str(old_model.folder), 0))
    with pytest.raises(ProbeError, match="wrong weights"):
        run(vllm, expectation(), new_model)
    with pytest.raises(ProbeError, match=r"from version \[0\], expected 3"):
        run(vllm, expectation(policy_version=3), old_model)
    other = tuple(byte_tokenizer([*SPECIAL, "<extra>"]).encode(TEXT))
    with pytest.raises(ProbeError, match=r"wrong tokenizer: .*--tokenizer"):
        run(vllm, expectation(prompt_token_ids=other), old_model)
