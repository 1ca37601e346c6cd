"""The plan of a small run against what the device's allocator says of its first update."""

from __future__ import annotations

from collections.abc import Iterator
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from megatron_dppo.config.layout import Layout, resolve_layout
from megatron_dppo.parallel.platform import Platform
from tests.gpu.checks import Result

TOKENS, MICRO_BATCHES = 2048, 2
PLAIN, ENGINE = 0.05, 0.3
"""Bounds on the part by which the peak differs; Transformer Engine keeps other activations than what is rehearsed."""
_SIZES = dict(
    vocab_size=16384,
    hidden_size=512,
    intermediate_size=1024,
    moe_intermediate_size=256,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    max_position_embeddings=4096,
)


def check(device: torch.device) -> Iterator[Result]:
    """Peak memory of start and first update, without and with recomputation."""
    platform = Platform.detect(0, force_cpu=device.type == "cpu")
    from megatron_dppo.mcore.shims import apply_shims

    apply_shims(platform)
    from megatron.core import parallel_state

    from megatron_dppo.mcore.transformer_engine import has_transformer_engine
    from megatron_dppo_plan.rehearsal_pool import RehearsalPool
    from tests.distributed.layouts import FULL

    bound = ENGINE if platform.is_cuda and has_transformer_engine() else PLAIN
    with TemporaryDirectory() as folder, RehearsalPool(1) as rehearsals:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group(platform.backend, store=store, rank=0, world_size=1)
        try:
            for name, transformer in (("plain", {}), ("full recompute", FULL)):
                planned, measured = _peaks(transformer, platform, rehearsals)
                parallel_state.destroy_model_parallel()
                gib = f"{planned / 2**30:.3f} GiB planned, {measured / 2**30:.3f} measured"
                yield Result(f"peak, {name}: {gib}", abs(measured / planned - 1), bound)
        finally:
            dist.destroy_process_group()


def _peaks(transformer: dict[str, Any], platform: Platform, rehearsals: Any) -> tuple[int, int]:
    """Bytes by the plan, and by the device."""
    from megatron_dppo.hf.folder import DictWeights, build_hf_model, model_shape, stream_model
    from megatron_dppo.losses import policy_objective
    from megatron_dppo_plan.measure import trainer_builder
    from megatron_dppo_plan.models import sample_rows
    from tests.distributed.parity import Case, config_for, hf_config
    from tests.distributed.rehearsal_cases import update

    model = hf_config(tied=False)
    for name, size in _SIZES.items():
        setattr(model, name, size)
    case = Case(micro_batch_tokens=TOKENS, transformer=transformer)
    sizes = {"data": {"train": "unused", "max_prompt_tokens": TOKENS // 2}, "train": {"router_replay": "rollout"}}
    config = config_for(case, "bf16", **sizes, rollout={"max_new_tokens": TOKENS // 2})
    layout = resolve_layout(config.parallel, config.batch, 1, model_shape(model))
    plan = rehearsed(config, model, layout, platform, rehearsals)
    loaded = dict(stream_model(build_hf_model(model, torch.float32, seed=0)))
    if not platform.is_cuda:
        return _highest(plan), _highest(update(config, model, layout, loaded, platform))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    trainer = trainer_builder(config, model, layout, platform, DictWeights(loaded.items()))()
    trainer.update(sample_rows(config, model, layout, MICRO_BATCHES), policy_objective(config.loss))
    return _highest(plan), torch.cuda.max_memory_allocated() - before


def rehearsed(config: Any, model: Any, layout: Layout, platform: Platform, rehearsals: Any) -> Any:
    """The plan of the update that rank 0 makes, for this device if the plan knows it, else for an H100."""
    from megatron_dppo_plan.child import RehearsalRequest
    from megatron_dppo_plan.machine import MACHINES
    from megatron_dppo_plan.rehearse import RankRole

    device = torch.cuda.get_device_name().lower() if platform.is_cuda else ""
    machine = next((known for name, known in MACHINES.items() if name in device), MACHINES["h100"])
    role = RankRole(rank=0, micro_batches=MICRO_BATCHES, as_gpu=platform.is_cuda)
    request = RehearsalRequest(config=config, hf_config=model, layout=layout, role=role, machine=machine)
    (plan,) = rehearsals.run([request])
    return plan


def _highest(measured: Any) -> int:
    """At the start or in the update."""
    return int(max(measured.peak.total, measured.start_peak.total))
