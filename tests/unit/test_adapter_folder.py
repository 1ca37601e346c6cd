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


def test_fused_experts_by_the_formula_of_peft_018() -> None:
    """``delta[e, i, o] = sum_r B[o, r, e] A[e, r, i]`` of its ``ParamWrapper``, for a parameter ``[experts, i, o]``."""
    generator, prefix = torch.Generator().manual_seed(0), "base_model.model.model.layers.3.mlp.experts"
    experts, rank, width, hidden = 3, 2, 5, 7
    shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    tensors, expected = (
        {},
        {"gate_up": torch.zeros(experts, 2 * width, hidden), "down": torch.zeros(experts, hidden, 5)},
    )
    for e in range(experts):
        for i, (kind, (rows, columns)) in enumerate(shapes.items()):
            a, b = torch.rand(rank, columns, generator=generator), torch.rand(rows, rank, generator=generator)
            tensors |= {f"{prefix}.{e}.{kind}_proj.lora_{p}.weight": x for p, x in (("A", a), ("B", b))}
            where = expected["down"][e] if kind == "down" else expected["gate_up"][e, i * width : (i + 1) * width]
            where += b @ a
    attention = {"base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight": torch.ones(2, 2)}
    found, config = fused_experts(tensors | attention, adapter_config(LoraConfig(rank=rank, alpha=6.0), "unused"))
    for kind, name, width_of in (("gate_up", "base_layer.", 2 * rank), ("down", "", rank)):
        a, b = (found.pop(f"{prefix}.{name}lora_{part}.weight") for part in "AB")
        product = torch.einsum(
            "ore,eri->eio", b.reshape(len(b), width_of, experts), a.reshape(experts, width_of, a.shape[1])
        )
        torch.testing.assert_close(product, expected[kind])
    assert found == attention and config["target_modules"] == ["q_proj"]
    assert config["target_parameters"] == ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    (pattern,) = config["rank_pattern"]
    assert (config["rank_pattern"][pattern], config["alpha_pattern"][pattern], config["r"]) == (4, 12, 2)
