"""The load-balancing loss of the routers has the same gradient for every layout, and that of its formula in float64.

With p the router's softmax over E experts, c how often an expert is among the k chosen, T the tokens of a micro-batch:

    aux = coefficient * E / (k T^2) * sum over experts of c_e * sum over tokens of p_te

weighted by T and divided by the tokens in the loss, as Megatron does with ``calculate_per_token_loss``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.data.training_samples import pack, to_training_sample
from megatron_dppo.hf.folder import build_hf_model, stream_model
from megatron_dppo.losses import policy_objective
from megatron_dppo.parallel.platform import Platform
from megatron_dppo.types import TrainingSample
from tests.distributed.objective import in_float64
from tests.distributed.parity import LOSS, Case, build_trainer, gradient_reader, hf_reference, on_cpu, worst
from tests.distributed.spawn import run_distributed

pytestmark = pytest.mark.distributed

COEFFICIENT, MICRO_BATCHES = 0.5, 4
AUX = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": COEFFICIENT}
TP = {"tensor_model_parallel_size": 2}
CP = {"context_parallel_size": 2}


def samples() -> list[TrainingSample]:
    """Two for each micro-batch, of lengths that no layout has to pad: padding is routed too."""
    generator = torch.Generator().manual_seed(4)
    result = []
    for i in range(2 * MICRO_BATCHES):
        ids = torch.randint(0, 117, (4 * (1 + i % 3) + 1,), generator=generator).tolist()
        logprobs = (-4.5 + 0.3 * torch.randn(len(ids) - 2, generator=generator)).tolist()
        result.append(to_training_sample(ids[:2], ids[2:], logprobs, 1.0 - 0.3 * i))
    return result


def reference() -> tuple[dict[str, Tensor], float]:
    """Gradients of policy loss and load-balancing loss, and the mean of the latter without its coefficient."""
    model = in_float64(hf_reference(tied=False))
    logits: list[Tensor] = []
    routers = [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]
    for router in routers:
        router.register_forward_hook(lambda module, args, output: logits.append(output[0]))
    num_tokens = sum(int(sample.loss_mask.sum()) for sample in samples())
    loss, balance = torch.zeros((), dtype=torch.float64), 0.0
    for start in range(0, 2 * MICRO_BATCHES, 2):
        logits.clear()
        for sample in samples()[start : start + 2]:
            log_p = model(sample.tokens[None]).logits[0].log_softmax(-1)
            log_p = log_p.gather(1, sample.labels[:, None])[:, 0][sample.loss_mask]
            assert sample.rollout_logprobs is not None
            weight = (log_p.detach() - sample.rollout_logprobs[sample.loss_mask]).exp()
            loss = loss - (weight * sample.advantages[sample.loss_mask] * log_p).sum()
        for layer in range(len(routers)):
            rows = torch.cat(logits[layer :: len(routers)])
            probabilities, count = rows.softmax(-1), rows.shape[0]
            chosen = torch.zeros_like(rows).scatter(1, rows.topk(2, dim=-1).indices, 1.0).sum(0)
            aux = rows.shape[1] / (2 * count**2) * (chosen * probabilities.sum(0)).sum()
            loss = loss + COEFFICIENT * aux * count
            balance += float(aux.detach()) / (MICRO_BATCHES * len(routers))
    (loss / num_tokens).backward()
    holder = build_hf_model(model.config, torch.float64)
    for target, source in zip(holder.parameters(), model.parameters(), strict=True):
        target.data = torch.zeros_like(source) if source.grad is None else source.grad.clone()
    return {name: value.float() for name, value in stream_model(holder)}, balance


def run(rank: int, world_size: int, layouts: list[dict[str, Any]]) -> None:
    """Gradient and metric of each layout."""
    from megatron_dppo.mcore.compat.shims import apply_shims

    platform = Platform.detect(force_cpu=True)
    apply_shims(platform)
    from megatron.core import parallel_state

    gradients, balance = reference()
    for layout in layouts:
        trainer = build_trainer(Case(layout, transformer=AUX), hf_reference(tied=False), platform, "fp32")
        every = [pack(samples()[i : i + 2], trainer.row_shape) for i in range(0, 2 * MICRO_BATCHES, 2)]
        mine = every[trainer.dp_rank :: trainer.layout.dp]
        assert all(batch.cu_seqlens.numel() == 3 for batch in mine), "a row was padded"
        metrics = trainer.accumulate(mine, policy_objective(LOSS))
        actual = on_cpu(trainer.bridge.export(gradient_reader(trainer)))
        error = worst(actual, gradients)
        assert error < 2e-5, f"{layout}: gradient off by {error:.1e}"
        assert abs(metrics["load_balancing_loss"] - balance) < 1e-5, f"{layout}: {metrics['load_balancing_loss']}"
        dist.barrier()
        parallel_state.destroy_model_parallel()


def test_one_and_two_processes() -> None:
    run_distributed(run, 1, [{}])
    layouts = [TP, CP, {}, {"expert_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}]
    run_distributed(run, 2, layouts)


def test_four_processes() -> None:
    run_distributed(run, 4, [{**TP, **CP}, {**TP, "pipeline_model_parallel_size": 2}])
