"""An engine that differs from the trainer in its routers alone: what replay of experts leaves, and that weights leave
nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.data.training_samples import to_training_sample
from megatron_dppo.engines.local.engine import LocalEngine
from megatron_dppo.hf.folder import stream_model
from megatron_dppo.parallel.platform import Platform
from megatron_dppo.types import Prompt, SamplingParams, TrainingSample
from tests.distributed.layouts import CP, EP, FULL, PP, TP
from tests.distributed.parity import Case, build_trainer, hf_reference
from tests.distributed.spawn import run_distributed
from tests.silent_tokenizer import SilentTokenizer

pytestmark = pytest.mark.distributed

LAYOUTS = {
    1: [Case(), Case(shared=True, transformer=FULL)],
    2: [Case(CP), Case(EP)],
    4: [Case({**TP, **PP}, dense_layers=(2,))],
}
NOISE = 0.05
ROUNDING = 3e-5
"""nats, of sums in fp32 in another order"""


def sampled(model: Any, width: int) -> list[TrainingSample]:
    """Responses of the local engine, whose router weights have noise that the trainer's have not; of their routes the
    first ``width`` numbers of a row."""
    noisy = [(name, value.clone()) for name, value in stream_model(model)]
    generator = torch.Generator().manual_seed(3)
    for name, value in noisy:
        if name.endswith("mlp.gate.weight"):
            value.add_(NOISE * torch.randn(value.shape, generator=generator))
    tokenizer = SilentTokenizer()
    engine = LocalEngine(model.config, tokenizer, dtype=torch.float32, device=torch.device("cpu"))
    engine.update_weights(noisy, 0)
    prompts = [Prompt(prompt_id=str(i), text="", token_ids=(5 + i, 9, 30 + i)[: 1 + i % 3], label="") for i in range(8)]
    params = SamplingParams(max_new_tokens=12, seed=1, routed_experts=True, router_weights=True)
    answers = engine.generate(prompts, params)
    engine.close()
    result = []
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.routed_experts is not None
        routes = answer.routed_experts[..., :width].clone()
        result.append(to_training_sample(prompt.token_ids, answer.token_ids, answer.logprobs, 1.0, None, routes))
    return result


def apart(rows: list[Tensor], batches: Any) -> tuple[float, float]:
    """(mean, largest) ``|log pi - log mu|`` of the response tokens of this rank."""
    pairs = zip(rows, batches, strict=True)
    result = torch.cat([(row.cpu() - batch.rollout_logprobs)[batch.loss_mask].abs() for row, batch in pairs])
    return float(result.mean()), float(result.max())


def measured(case: Case, platform: Platform, *, weights: bool) -> list[tuple[float, float]]:
    """``apart`` with the live routers and under replay; empty but on the last stage."""
    from megatron.core import parallel_state

    model = hf_reference(case.tied, case.dense, case.shared, case.dense_layers)
    replay = {"router_replay": "rollout", "router_replay_weights": weights}
    trainer = build_trainer(case, model, platform, "fp32", train=replay)
    samples = sampled(model, trainer.routing_shape.width)[trainer.dp_rank :: trainer.layout.dp]
    batches = trainer.pack(samples, 48).batches
    rows = [trainer.record_routing(batches)[0], trainer.logprobs(batches)]
    result = [apart(part, batches) for part in rows] if trainer.is_last_stage else []
    dist.barrier()
    parallel_state.destroy_model_parallel()
    return result


def run(rank: int, world_size: int, cases: list[Case]) -> None:
    """Each layout with the experts alone and with their weights."""
    from megatron_dppo.mcore.shims import apply_shims

    platform = Platform.detect(force_cpu=True)
    apply_shims(platform)
    for case in cases:
        alone, both = (measured(case, platform, weights=weights) for weights in (False, True))
        if both:
            (live, _), (experts, _), (_, nothing) = alone[0], alone[1], both[1]
            where = f"{case}, rank {rank}: live {live:.1e}, experts {experts:.1e}, with weights {nothing:.1e}"
            assert both[0] == alone[0] and 0.01 < experts < live and nothing < ROUNDING, where


@pytest.mark.parametrize("processes", sorted(LAYOUTS))
def test_with_experts_and_weights_replayed_other_routers_make_no_difference(processes: int) -> None:
    run_distributed(run, processes, LAYOUTS[processes], timeout=300.0)
