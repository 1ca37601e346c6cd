"""Servers with a model of each family: the exported folder loads, answers are those of float64, syncs are proved.

docs/models.md has its column of servers from ``SERVED``, and docs/results/models.md what stops the other pairs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dppo.config.servers import WeightSyncConfig
from megatron_dppo.weights.ipc import MemorySharing
from megatron_dppo.weights.probe_requests import ProbeError
from megatron_dppo.weights.sync import WeightSync
from megatron_dppo_engines.server import Generation, InferenceServer
from megatron_dppo_engines.serving.collectives import TESTED
from tests.engines.calls import LONG, SHORT, ask, call, client
from tests.engines.family_models import PUBLISHED, FamilyModel
from tests.engines.probes import expectation, run
from tests.engines.servers import Engine, SharedEngine, start_sglang, start_vllm

SERVED: Mapping[str, tuple[str, ...]] = {
    "vllm": (
        "deepseek_v3",
        "glm4_moe",
        "kimi_k2",
        "llama",
        "mistral",
        "mixtral",
        "olmoe",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "qwen3_next",
        "qwen3_5_moe_text",
        PUBLISHED,
    ),
    "sglang": ("glm4_moe", "llama", "mistral", "mixtral", "olmoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
}
"""Models of ``family_models.NAMES`` that each engine serves on a CPU."""
STOPPED: Mapping[str, tuple[str, ...]] = {
    "vllm": ("glm4_moe_lite", "minimax_m2", "gpt_oss"),
    "sglang": ("minimax_m2", "gpt_oss", "qwen3_next", "qwen3_5_moe_text", "deepseek_v3", "glm4_moe_lite"),
}
"""Families that an engine cannot serve on a CPU. docs/results/models.md has the line of the source that stops it."""
SAMPLED = frozenset({("sglang", "mixtral")})
"""Pairs that CI takes."""
BF16 = ("qwen3_next", "qwen3_5_moe_text", PUBLISHED)
"""Models that vLLM computes in bf16 only on a CPU: its kernel of gated delta nets."""
FP32_STATES = ("--mamba-ssm-cache-dtype", "float32")
SERVED_BF16 = ("--dtype", "bfloat16", "--hf-overrides", '{"head_dtype": "float32"}', *FP32_STATES)
"""As ``megatron-dppo serve`` starts them."""
METHODS = ("ipc", "distributed", "disk")
CASES = [
    pytest.param(engine, name, id=f"{engine}-{name}", marks=() if (engine, name) in SAMPLED else pytest.mark.long)
    for engine in SERVED
    for name in SERVED[engine]
]


def start(engine: str, model: FamilyModel, name: str, log: Path) -> Engine:
    """Start a server with the options that the model needs on a CPU."""
    if engine == "sglang":
        return start_sglang(model.folder, log, version=TESTED["sglang_newest"])
    options = SERVED_BF16 if name in BF16 else ()
    images = ("--limit-mm-per-prompt", '{"image": 0, "video": 0}') if name == PUBLISHED else ()
    return start_vllm(model.folder, log, *options, *images)


def error(engine: Engine, model: FamilyModel) -> float:
    """Return the mean difference of the log-probabilities of three responses from those of float64."""
    requests = [ask(prompt, 40) for prompt in (SHORT, LONG, SHORT)]

    async def use(server: InferenceServer) -> list[Generation]:
        return await asyncio.gather(*(server.generate(request) for request in requests))

    differences = [
        answer.logprobs.double() - model.logprobs(request.token_ids, answer.token_ids.tolist())
        for request, answer in zip(requests, call(engine, use), strict=True)
    ]
    return float(torch.cat(differences).abs().mean())


@pytest.mark.parametrize(("engine_name", "name"), CASES)
def test_the_exported_folder_is_served_and_each_way_of_a_sync_is_proved(
    engine_name: str, name: str, tmp_path: Path
) -> None:
    dtype = torch.bfloat16 if engine_name == "vllm" and name in BF16 else torch.float32
    limit = 0.05 if dtype == torch.bfloat16 else 1e-5
    old, new = (FamilyModel(name, tmp_path / str(seed), seed, dtype) for seed in (0, 1))
    with SharedEngine(lambda: start(engine_name, old, name, tmp_path / "log")) as shared:
        engine = shared.engine()
        errors = {"start": error(engine, old)}
        assert errors["start"] < limit
        for version, method in enumerate(("disk",) if name == PUBLISHED else METHODS):
            model, other = (old, new) if version % 2 else (new, old)
            synced(engine, method, model, other, version, dtype, tmp_path / "weights")
            errors[method] = error(engine, model)
            assert errors[method] < limit, method
        # docs/results/models.md has these figures (pytest -rP).
        print(engine_name, name, *(f"{key} {value:.1e}" for key, value in errors.items()))
        probed: Any = expectation(policy_version=version, dtype="fp32" if dtype == torch.float32 else "bf16")
        assert run(engine, probed, model).logprobs.mean < limit  # type: ignore[arg-type]
        with pytest.raises(ProbeError, match="wrong weights"):
            run(engine, probed, other)  # type: ignore[arg-type]


@pytest.mark.long
def test_experts_that_vllm_leaves_as_they_were_are_found(tmp_path: Path) -> None:
    """Runs refuse gpt-oss with vLLM: an update does not reach its experts. Its responses are near those of float64."""
    old, new = (FamilyModel("gpt_oss", tmp_path / str(seed), seed) for seed in (0, 1))
    with SharedEngine(lambda: start("vllm", old, "gpt_oss", tmp_path / "log")) as shared:
        assert error(shared.engine(), old) < 1e-2
        with pytest.raises(AssertionError, match=r"mlp\.experts\.\*"):
            synced(shared.engine(), "disk", new, old, 0, torch.float32, tmp_path / "weights")


def synced(
    engine: Engine,
    method: Any,
    model: FamilyModel,
    other: FamilyModel,
    version: int,
    dtype: torch.dtype,
    weights_folder: Path,
) -> None:
    """Send weights. Their proof must cover every tensor, and fail for other weights."""
    device = torch.device("cpu")
    sharing = MemorySharing({engine.url: [0]}, 2**20, dtype, tied=False, group=None) if method == "ipc" else None
    config = WeightSyncConfig(method=method, timeout_seconds=60)
    where = {"model_folder": model.folder, "weights_folder": weights_folder}
    sync = WeightSync([client(engine)], config, **where, dtype=dtype, device=device, sharing=sharing)
    try:
        result = sync.send(iter(model.weights()), version)
        assert result.good and not result.failed and not result.notes, (method, result)
        proof = sync.prove_base(iter(other.weights()), [engine.url])
        assert not proof.good and "not what was sent" in str(proof.failed), (method, proof)
    finally:
        sync.close()
