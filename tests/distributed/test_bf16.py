"""bf16 and fp16: our error against float64 is no larger than that of transformers in the same dtype and weights.

All three have the same weights, rounded to that dtype. The errors are those of the arithmetic; the bounds hold for this
model (4 layers, hidden size 64), where one rounded router choice may send a token to another expert.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.hf.folder import build_hf_model, stream_model
from megatron_dppo.losses import policy_objective
from megatron_dppo.parallel.platform import DTYPES, Platform
from megatron_dppo.policy.update import Updater
from tests.distributed.objective import (
    TEMPERATURE,
    in_float64,
    loss_config,
    make_samples,
    model_of,
    statistics,
)
from tests.distributed.parity import Case, build_trainer, config_for, cosine, gradient_reader, on_cpu
from tests.distributed.plain_losses import plain_loss
from tests.distributed.spawn import run_distributed

pytestmark = pytest.mark.distributed

DIRECTION = {"pg_is": {"bf16": 0.01, "fp16": 1e-4}, "dppo_topk_tv": {"bf16": 0.1, "fp16": 3e-4}}
"""Variant -> bound of 1 - cosine of all gradients. A mask flips for a token whose divergence is at the threshold."""
NORM, WORSE = 0.05, 2.0
"""Relative error of the norm, and how many times further off than transformers we may be."""


def gradients(model: Any, samples: list[Any], variant: str) -> dict[str, Tensor]:
    """Of one process, in the dtype of the model."""
    model.zero_grad()
    loss, _ = plain_loss(statistics(model, samples), loss_config(variant))
    loss.backward()
    holder = build_hf_model(model.config, torch.float32)
    for target, source in zip(holder.parameters(), model.parameters(), strict=True):
        target.data = torch.zeros_like(target) if source.grad is None else source.grad.float()
    return dict(stream_model(holder))


def norm(values: dict[str, Tensor]) -> float:
    return float(torch.cat([v.flatten() for v in values.values()]).double().norm())


def run(rank: int, world_size: int, dtype: str, layouts: list[dict[str, Any]]) -> None:
    """Both variants on each layout."""
    from megatron_dppo.mcore.compat.shims import apply_shims

    platform = Platform.detect(force_cpu=True)
    apply_shims(platform)
    from megatron.core import parallel_state

    rounded = model_of(Case())
    for parameter in rounded.parameters():
        parameter.data = parameter.data.to(DTYPES[dtype]).float()
    exact = in_float64(rounded)
    with torch.no_grad():
        samples = make_samples(exact)
    peer = build_hf_model(rounded.config, DTYPES[dtype])
    peer.load_state_dict(rounded.state_dict())
    for layout in layouts:
        layout = dict(layout)
        in_fp32 = {"grad_reduce_in_fp32": layout.pop("grad_reduce_in_fp32", True)}
        sections = {"rollout": {"temperature": TEMPERATURE}, "optimizer": in_fp32}
        trainer = build_trainer(Case(layout), rounded, platform, dtype, **sections)
        scale = 1.0 if dtype == "bf16" else trainer.optimizer.loss_scale.value
        for variant, bound in DIRECTION.items():
            loss = loss_config(variant)
            local_samples = samples[trainer.dp_rank :: trainer.layout.dp]
            batches = Updater(trainer, config_for(Case(layout)).train, loss).pack_batches(local_samples)
            trainer.accumulate(batches, policy_objective(loss))
            parameter = next(trainer.models[0].parameters())
            assert parameter.main_grad.dtype == (torch.float32 if in_fp32["grad_reduce_in_fp32"] else DTYPES[dtype])
            result = on_cpu(trainer.bridge.export(gradient_reader(trainer)))
            expected, peer_result = gradients(exact, samples, variant), gradients(peer, samples, variant)
            ours, others = 1 - cosine(result, expected), 1 - cosine(peer_result, expected)
            size = abs(norm(result) / scale / norm(expected) - 1)
            print(
                f"{dtype} {layout} {variant}: direction {ours:.1e} (transformers {others:.1e}), norm {size:.1e}",
                flush=True,
            )
            assert ours < bound[dtype] and ours < WORSE * others, f"{layout} {variant}: {ours:.1e}, they {others:.1e}"
            assert size < NORM, f"{layout} {variant}: norm off by {size:.1e}"
        dist.barrier()
        parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_is_as_near_to_float64_as_transformers(dtype: str) -> None:
    layouts = [{"tensor_model_parallel_size": 2}, {"context_parallel_size": 2}, {"expert_model_parallel_size": 2}]
    if dtype == "bf16":
        run_distributed(run, 1, dtype, [{}])
        layouts += [{**layouts[0], "grad_reduce_in_fp32": False}, {"grad_reduce_in_fp32": False}]
    run_distributed(run, 2, dtype, layouts)
