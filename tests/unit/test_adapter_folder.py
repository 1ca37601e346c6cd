"""Adapters in PEFT's format: what PEFT makes of the folder equals W + s B A of transformers in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_dppo.config.lora import LoraConfig
from megatron_dppo.weights.adapter_folder import adapter_config, fused_experts, save_adapter, write_adapter
from tests.distributed.lora import ALL, ALPHA, RANK, Float64
from tests.distributed.parity import Case, hf_reference, samples

LORA = LoraConfig(rank=RANK, alpha=ALPHA)


def peft_error(side: Float64, case: Case, folder: Path) -> float:
    """Of the log-probabilities of a few sequences, by PEFT on the transformers model."""
    peft = pytest.importorskip("peft")
    model = peft.PeftModel.from_pretrained(hf_reference(case.tied, case.dense, case.shared, case.mixed), str(folder))
    worst = 0.0
    with torch.no_grad():
        for sample, expected in zip(samples()[:4], side.logprobs(side.weights()), strict=False):
            logits = model(sample.tokens[None]).logits[0]
            found = logits.log_softmax(-1).gather(-1, sample.labels[:, None]).squeeze(-1)
            worst = max(worst, float((found - expected).norm() / expected.norm()))
    return worst


def adapters_of(side: Float64) -> dict[str, torch.Tensor]:
    return {name: value.detach().float() for name, value in side.adapters.items()}


@pytest.mark.parametrize("case", [Case(), Case(dense=True)], ids=["experts", "dense"])
def test_peft_loads_the_folder(case: Case, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    if not case.dense and peft.__version__ < "0.19":
        pytest.skip("it has no conversion to transformers 5: see the next test")
    side = Float64(case, ALL)
    save_adapter(tmp_path / "adapter", adapters_of(side).items(), LORA, "unused")
    assert peft_error(side, case, tmp_path / "adapter") < 1e-6


@pytest.mark.parametrize("targets", [ALL, ("q_proj", "up_proj"), ("down_proj",)], ids="+".join)
@pytest.mark.parametrize("case", [Case(), Case(shared=True), Case(mixed=True)], ids=["experts", "shared", "mixed"])
def test_peft_018_loads_fused_experts(case: Case, targets: tuple[str, ...], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    if not peft.__version__.startswith("0.18."):
        pytest.skip("another layout")
    side = Float64(case, targets)
    lora = LoraConfig(rank=RANK, alpha=ALPHA, target_modules=list(targets))
    write_adapter(tmp_path / "adapter", *fused_experts(adapters_of(side), adapter_config(lora, "unused")))
    assert peft_error(side, case, tmp_path / "adapter") < 1e-6
