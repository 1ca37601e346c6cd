"""Where one update of the small model waits for the device, counted by torch; what each fused kernel saves."""

from __future__ import annotations

import collections
import warnings
from collections.abc import Iterator
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from megatron_dppo.parallel.platform import Platform
from tests.gpu.checks import Result, not_run

PLAIN, FUSED = 8.0, 5.0
"""Waits of a layer in a forward pass, by the audit of the sources: 4 of unfused RoPE, 2 of the dispatcher's copies to
the host, 2 of the sorting of tokens; the backward has none. With the fused kernels the dispatcher's stay."""
NAME = "waits for the device a layer and micro-batch"


def check(device: torch.device) -> Iterator[Result]:
    """One micro-batch, one update."""
    if device.type != "cuda":
        yield not_run(NAME, "CUDA (torch.cuda.set_sync_debug_mode)")
        return
    platform = Platform.detect(0)
    from megatron_dppo.mcore.shims import apply_shims

    apply_shims(platform)
    from megatron.core import parallel_state

    from megatron_dppo.mcore.transformer_engine import has_transformer_engine

    engine = has_transformer_engine()
    with TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group(platform.backend, store=store, rank=0, world_size=1)
        try:
            waits, layers = _waits(platform)
            parallel_state.destroy_model_parallel()
        finally:
            dist.destroy_process_group()
    for place, count in waits.most_common(20):
        print(f"waits: {count} x {place}")
    kind = "Transformer Engine's kernels" if engine else "plain layers"
    yield Result(f"{NAME}, {kind}", sum(waits.values()) / layers, FUSED if engine else PLAIN)


def _waits(platform: Platform) -> tuple[collections.Counter[str], int]:
    """By the line of Python, of the second update; and layers x micro-batches."""
    from megatron_dppo.losses import policy_objective
    from megatron_dppo.policy.update import Updater
    from tests.distributed.parity import LOSS, Case, HFSide, build_trainer, config_for, samples

    case = Case(micro_batch_tokens=1000)
    hf = HFSide(case)
    trainer = build_trainer(case, hf.model, platform, "bf16")
    batches = Updater(trainer, config_for(case, "bf16").train, LOSS).pack_batches(samples())
    objective = policy_objective(LOSS)
    trainer.update(batches, objective)
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            trainer.accumulate(batches, objective)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    result = [w for w in caught if "synchroniz" in str(w.message)]
    places = collections.Counter(f"{w.filename.split('site-packages/')[-1]}:{w.lineno}" for w in result)
    return places, hf.model.config.num_hidden_layers * len(batches)
