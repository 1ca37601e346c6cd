"""The tiny model through Megatron on the device, one process, against transformers in fp32 on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.parallel.platform import Platform
from megatron_dppo.types import TrainingSample
from tests.gpu.checks import Result

FP32 = {"export": 0.0, "logprobs": 1e-5, "loss": 1e-4, "gradient": 1e-4, "grad_norm": 1e-4, "weights": 1e-4}
BF16 = {"export": 0.0, "logprobs": 2e-2, "gradient_direction": 2e-2, "grad_norm": 5e-2}
"""bf16 keeps 8 bits and may route a token to another expert than fp32 does, so single parameters are not compared; nor
is the loss, a sum of terms of both signs that nearly cancel."""
FP8 = {"export": 0.0, "logprobs": 2e-1, "gradient_direction": 1e-1, "grad_norm": 2e-1}
"""Products of 3 or 2 bits of mantissa, the weights as with bf16."""
OWN_BF16 = 3.0
"""Bound on Megatron's bf16 error over that of transformers in bf16 on the same device: both round one model."""


def check(device: torch.device) -> Iterator[Result]:
    """fp32 closely, bf16 loosely."""
    from megatron_dppo.mcore.shims import apply_shims
    from megatron_dppo_megatron_cpu.shims import megatron_version

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    platform = Platform.detect(0, force_cpu=device.type == "cpu")
    apply_shims(platform)
    from megatron.core import parallel_state

    from megatron_dppo.mcore.transformer_engine import has_transformer_engine
    from tests.distributed.parity import Case, measure

    engine = platform.is_cuda and has_transformer_engine()
    print(f"Megatron Core {'.'.join(map(str, megatron_version()))}, Transformer Engine: {engine}")
    with TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group(platform.backend, store=store, rank=0, world_size=1)
        try:
            for dtype, tied, bounds in (("fp32", False, FP32), ("fp32", True, FP32), ("bf16", False, BF16)):
                errors = measure(Case(tied=tied), platform, dtype)
                parallel_state.destroy_model_parallel()
                label = f"{dtype}{' tied' if tied else ''}"
                yield from (Result(f"{label} {name}", errors[name], bound) for name, bound in bounds.items())
            # ``errors`` are those of the last, the bf16 case.
            for name, own in transformers_bf16_errors(device).items():
                yield Result(f"bf16 {name}, times transformers' own in bf16 here", errors[name] / own, OWN_BF16)
            if engine and torch.cuda.get_device_capability(device) >= (8, 9):
                errors = measure(Case(transformer={"fp8": "hybrid", "fp8_recipe": "tensorwise"}), platform, "bf16")
                parallel_state.destroy_model_parallel()
                yield from (Result(f"fp8 {name}", errors[name], bound) for name, bound in FP8.items())
        finally:
            dist.destroy_process_group()


def transformers_bf16_errors(device: torch.device) -> dict[str, float]:
    """Return errors of transformers in bf16 on the device, against fp32 on the CPU from the same rounded weights."""
    from tests.distributed.parity import Case, HFSide, cosine, on_cpu, relative_error, samples

    class OnDevice(HFSide):
        """The model on the device; everything after its log-probabilities stays on the CPU."""

        def logprobs(self, sample: TrainingSample) -> Tensor:
            moved = replace(sample, tokens=sample.tokens.to(device), labels=sample.labels.to(device))
            return super().logprobs(moved).cpu()

    exact, low = HFSide(Case(), rounded=True), OnDevice(Case(), rounded=True)
    low.model.to(device, torch.bfloat16)
    with torch.no_grad():
        expected, actual = (torch.cat([side.logprobs(s)[s.loss_mask] for s in samples()]) for side in (exact, low))
    exact.backward()
    low.backward()
    direction = 1 - cosine(on_cpu(low.gradients().items()), exact.gradients())
    return {"logprobs": relative_error(actual, expected), "gradient_direction": direction}
