"""A model as SmolLM2 becomes one: tied embeddings, biases, a gated shared expert (Qwen2-MoE)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_dppo.config.servers import WeightSyncConfig
from megatron_dppo.weights.ipc import MemorySharing
from megatron_dppo.weights.sync import WeightSync
from megatron_dppo_engines.server import InferenceServer
from megatron_dppo_engines.sglang import SGLangServer
from megatron_dppo_engines.vllm import VLLMServer
from tests.engines.calls import SHORT, ask, call
from tests.engines.checks import check_logprobs
from tests.engines.conftest import SGLANG_VERSIONS
from tests.engines.servers import Engine, SharedEngine, start_sglang, start_vllm
from tests.engines.tiny import ROUTING, Reference, make_tied
from tests.engines.updates import receive

EMBEDDING = "model.embed_tokens.weight"
SHARED = "model.layers.1.mlp.shared_expert.gate_proj.weight"
HEAD = ("--hf-overrides", '{"head_dtype": "float32"}')


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The weights that servers start with."""
    return Reference(make_tied(tmp_path_factory.mktemp("models") / "tied", seed=0))


@pytest.mark.parametrize("version", SGLANG_VERSIONS)
def test_log_probabilities_and_experts_of_sglang_equal_those_of_transformers(
    model: Reference, version: str, tmp_path: Path
) -> None:
    options = ("--enable-return-routed-experts",)
    weights = dict(model.weights())
    # SGLang has a head of its own, which a folder of tied weights leaves as it was allocated.
    weights["lm_head.weight"] = weights[EMBEDDING]

    async def load(server: InferenceServer) -> None:
        await server.pause()
        await server.begin_update()
        await receive(server, list(weights.items()))
        await server.end_update(-1)
        await server.resume()

    with SharedEngine(lambda: start_sglang(model.folder, tmp_path / "log", *options, version=version)) as shared:
        engine = shared.engine()
        call(engine, load)
        check_logprobs(engine, model, 1.0)
        answer = call(engine, lambda server: server.generate(ask(SHORT, 20, routing=ROUTING)))
        model.check_experts(answer.routed_experts, [*SHORT, *answer.token_ids.tolist()])


@pytest.fixture(scope="module", params=["sglang", "vllm"])
def bf16_server(
    request: pytest.FixtureRequest, model: Reference, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """A server in bf16 with its output layer in fp32, as ``megatron-dppo serve`` starts it."""
    log = tmp_path_factory.mktemp(request.param) / "log"
    dtype = ("--dtype", "bfloat16")

    def start() -> Engine:
        if request.param == "sglang":
            return start_sglang(model.folder, log, *dtype, "--enable-fp32-lm-head")
        return start_vllm(model.folder, log, *dtype, *HEAD)

    with SharedEngine(start) as shared:
        yield shared.engine()


def test_a_one_bit_change_of_one_element_is_proved_in_tied_and_packed_weights(
    bf16_server: Engine, model: Reference, tmp_path: Path
) -> None:
    weights = {name: tensor.bfloat16() for name, tensor in model.weights()}
    client: InferenceServer = (SGLangServer if bf16_server.kind == "sglang" else VLLMServer)(bf16_server.url)
    config = WeightSyncConfig(method="ipc", timeout_seconds=60)
    where = {"model_folder": model.folder, "weights_folder": tmp_path}
    sharing = MemorySharing({client.url: [0]}, 2**20, torch.bfloat16, tied=True, group=None)
    device = torch.device("cpu")
    sync = WeightSync([client], config, **where, dtype=torch.bfloat16, device=device, tied=True, sharing=sharing)
    try:
        for version, changed in enumerate(((), (SHARED,), (EMBEDDING,), (SHARED, EMBEDDING))):
            for name in changed:
                weights[name] = weights[name].clone()
                weights[name].view(torch.int16)[3, 5] ^= 1
            result = sync.send(iter(weights.items()), version)
            assert result.good and not result.failed and not result.notes, result
    finally:
        sync.close()
