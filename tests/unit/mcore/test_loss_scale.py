"""The loss scale of fp16, followed by hand."""

from __future__ import annotations

import pytest
import torch

from megatron_dppo.config.optimizer import OptimizerConfig
from megatron_dppo.errors import ConfigError
from megatron_dppo.mcore.compat.shims import apply_shims
from megatron_dppo.parallel.platform import Platform
from tests.unit import configs


def test_overflows_halve_it_and_a_window_without_one_doubles_it() -> None:
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


def test_its_keys_are_for_fp16_alone() -> None:
    assert configs.config(model={"path": "m", "dtype": "fp16"}, optimizer={"initial_loss_scale": 4.0})
    with pytest.raises(ConfigError, match=r"optimizer\.hysteresis has no effect with model\.dtype = 'bf16'"):
        configs.config(optimizer={"hysteresis": 3})
