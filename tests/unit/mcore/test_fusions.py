"""Which fused kernels a model gets by default, what a run says about them, and experts in one grouped GEMM."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_dppo.errors import ConfigError
from megatron_dppo.mcore import fusions
from megatron_dppo_megatron_cpu.grouped_gemm import grouped_gemm, grouped_linear, has_grouped_gemm

GRADIENTS = "gradient_accumulation_fusion"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's names are bound, as with a Transformer Engine that is new enough."""
    monkeypatch.setattr(fusions, "has_fused_rope", lambda: True)
    monkeypatch.setattr(fusions, "has_fused_permute", lambda: True)


def defaults(overrides: dict[str, Any] | None = None, **more: bool) -> set[str]:
    given = {"is_cuda": True, "engine": True, "experts": True} | more
    return {name for name, on in fusions.default_fusions(overrides or {}, **given).items() if on}


def test_fusions_are_on_only_with_transformer_engine_on_cuda(engine: None) -> None:
    assert defaults() == set(fusions.FUSIONS)
    assert defaults(experts=False) == set(fusions.FUSIONS) - {"moe_permute_fusion"}
    assert defaults(engine=False) == defaults(engine=False, is_cuda=False) == set()


def test_apex_alone_adds_weight_gradients_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusions, "has_apex_gradient_kernel", lambda: True)
    assert defaults(engine=False) == {GRADIENTS}
    assert defaults(engine=False, is_cuda=False) == set()


def test_an_old_transformer_engine_has_neither_rope_nor_permutation() -> None:
    # Here Megatron binds these names to None.
    assert defaults() == {"bias_activation_fusion", GRADIENTS}


@pytest.mark.parametrize(
    ("name", "value"),
    [("use_te_activation_func", True), ("activation_func_clamp_value", 7.0), ("glu_linear_offset", 1.0)],
)
def test_the_fused_swiglu_is_off_for_settings_that_it_ignores(engine: None, name: str, value: Any) -> None:
    assert defaults({name: value}) == set(fusions.FUSIONS) - {"bias_activation_fusion"}


@pytest.mark.parametrize("is_cuda", [True, False])
def test_gradients_cannot_be_fused_without_a_kernel(is_cuda: bool) -> None:
    with pytest.raises(ConfigError, match=f"{GRADIENTS} = true: it needs"):
        defaults({GRADIENTS: True}, engine=False, is_cuda=is_cuda)


def config(*on: str, experts: int | None = 8) -> Any:
    fused = {name: name in on for name in fusions.FUSIONS}
    return SimpleNamespace(num_moe_experts=experts, linear_attention_freq=None, **fused)


def test_a_run_prints_one_line_about_its_kernels() -> None:
    words = fusions.summarize_kernels(config(*fusions.FUSIONS), {}, engine=True)
    assert words == f"kernels  Transformer Engine with {', '.join(fusions.FUSIONS)}"
    overrides = {"apply_rope_fusion": False, "activation_func_clamp_value": 7.0}
    words = fusions.summarize_kernels(config("moe_permute_fusion", GRADIENTS), overrides, engine=True)
    assert "without apply_rope_fusion: model.transformer says so" in words
    assert "without bias_activation_fusion: the fused SwiGLU does not clamp" in words
    dense = fusions.summarize_kernels(
        config("apply_rope_fusion", "bias_activation_fusion", experts=None), {GRADIENTS: False}, engine=True
    )
    assert "moe_permute_fusion" not in dense
    plain = fusions.summarize_kernels(config(), {}, engine=False)
    assert plain.startswith("warning: no Transformer Engine here: plain torch layers") and "\n" not in plain


def numbers(run: Callable[..., Tensor], splits: list[int], dtype: torch.dtype, width: int = 32) -> list[Tensor]:
    """Output and gradients of both arguments."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16().to(dtype)

    x, grad = draw(sum(splits), width), draw(sum(splits), 24)
    weights = [draw(24, width).requires_grad_() for _ in splits]
    y = run(x.requires_grad_(), splits, weights)
    y.backward(grad)
    result = [weight.grad for weight in weights]
    assert x.grad is not None and all(g is not None for g in result)
    return [y.detach(), x.grad, torch.stack([g for g in result if g is not None])]


@pytest.mark.parametrize("splits", [[5, 0, 17, 2], [0, 0, 0, 8], [1, 0], [64, 64]])
def test_the_grouped_gemm_equals_the_product_of_each_expert(splits: list[int]) -> None:
    exact = numbers(grouped_linear, splits, torch.float64)
    result, one_by_one = (numbers(run, splits, torch.bfloat16) for run in (grouped_gemm, grouped_linear))
    for mine, loop, expected in zip(result, one_by_one, exact, strict=True):
        assert mine.shape == expected.shape
        error, of_loop = ((part - expected).norm() / expected.norm() for part in (mine, loop))
        assert error <= 1.5 * of_loop + 1e-3  # both are rounded to bf16 once
    assert all(not result[2][i].any() for i, rows in enumerate(splits) if rows == 0)


def test_the_gradient_may_come_in_any_strides() -> None:
    x, weight = torch.ones(1, 16).bfloat16().requires_grad_(), torch.ones(8, 16).bfloat16().requires_grad_()
    grouped_gemm(x, [1], [weight]).sum().backward()
    assert x.grad is not None and (x.grad == 8).all()


def test_the_grouped_gemm_needs_cuda_and_bf16() -> None:
    assert not has_grouped_gemm(torch.ones(4, 16).bfloat16(), torch.ones(8, 16).bfloat16())
    # Without rows there is nothing to multiply, and the loop gives the gradient of zeros.
    weights = [torch.ones(8, 16, requires_grad=True) for _ in range(2)]
    grouped_linear(torch.empty(0, 16), [0, 0], weights).sum().backward()
    assert all(w.grad is not None and not w.grad.any() for w in weights)
