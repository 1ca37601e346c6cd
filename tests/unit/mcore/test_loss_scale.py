"""The loss scale of fp16, followed by hand."""

from __future__ import annotations

import pytest
import torch

from megatron_dppo.config.optimizer import OptimizerConfig
from megatron_dppo.errors import ConfigError
from megatron_dppo.mcore.shims import apply_shims
from megatron_dppo.parallel.platform import Platform
from tests.unit import configs


def test_overflows_halve_the_scale_and_a_window_without_one_doubles_it() -> None:
    apply_shims(Platform.detect(force_cpu=True))
    from megatron_dppo.mcore.optim import LossScale

    settings = OptimizerConfig(lr=1e-3, initial_loss_scale=8.0, min_loss_scale=2.0, loss_scale_window=3, hysteresis=2)
    scale = LossScale(settings, torch.device("cpu"))
    seen = []
    for overflow in (True, True, True, True, True, False, False, False, False, True, False, True):
        scale.update(overflow)  # the parts of the optimizer say so, one after the other; it does not count twice
        scale.update(overflow)
        seen.append((scale.adjust(overflow=overflow), scale.value))
    assert seen == [
        *((True, 8.0), (True, 4.0), (True, 2.0), (False, 2.0), (False, 2.0)),  # the second overflow, and each after it
        *((True, 2.0), (True, 2.0), (True, 4.0)),  # three in a row without
        *((True, 4.0), (True, 4.0), (True, 4.0), (True, 2.0)),
    ]
    other = LossScale(settings, torch.device("cpu"))
    other.load_state_dict(scale.state_dict())
    assert other.state_dict() == scale.state_dict() and float(other.inv_scale) == 0.5


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_any_order_of_overflows_gives_the_scale_of_megatron(hysteresis: int) -> None:
    """Megatron's own scaler is the reference. After every second step ours is saved and loaded."""
    apply_shims(Platform.detect(force_cpu=True))
    from megatron.core.optimizer.grad_scaler import DynamicGradScaler

    from megatron_dppo.mcore.optim import LossScale

    settings = OptimizerConfig(
        lr=1e-3, initial_loss_scale=64.0, min_loss_scale=2.0, loss_scale_window=3, hysteresis=hysteresis
    )
    scale = LossScale(settings, torch.device("cpu"))
    reference = DynamicGradScaler(
        initial_scale=64.0,
        min_scale=2.0,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=3,
        hysteresis=hysteresis,
    )
    random = torch.Generator().manual_seed(hysteresis)
    values = []
    for step in range(400):
        overflow = bool(torch.rand((), generator=random) < 0.3)
        scale.adjust(overflow=overflow)
        reference.update(overflow)
        values.append(scale.value)
        assert scale.value == float(reference.scale), step
        if step % 2:
            saved = scale.state_dict()
            scale = LossScale(settings, torch.device("cpu"))
            scale.load_state_dict(saved)
    assert len(set(values)) > 3


def test_loss_scale_keys_need_fp16() -> None:
    assert configs.config(model={"path": "m", "dtype": "fp16"}, optimizer={"initial_loss_scale": 4.0})
    with pytest.raises(ConfigError, match=r"optimizer\.hysteresis .*model\.dtype = 'bf16'"):
        configs.config(optimizer={"hysteresis": 3})
