"""The loss scale of fp16: one for all parts of Megatron's optimizer.

Reason: Megatron gives each part (dense weights, experts) a scaler of its own, which follows the overflows of that part;
the loss is multiplied by the first one's scale, and each part divides by its own. After an overflow in one part alone
the gradients of the others have another scale than they are divided by. Affected: Megatron Core 0.16 to 0.19.2
(``optimizer/__init__.py``). Delete it when its parts share a scaler.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer.grad_scaler import MegatronGradScaler
from torch import Tensor

from megatron_dppo.config.optimizer import OptimizerConfig


class LossScale(MegatronGradScaler):
    """Halves the scale after an overflow, and doubles it after many updates without one.

    Args:
        settings: the first scale, the lowest one, and how many updates go by.
        device: of the gradients.
    """

    def __init__(self, settings: OptimizerConfig, device: torch.device) -> None:
        self._scale = torch.tensor([settings.initial_loss_scale], dtype=torch.float, device=device)
        self._lowest, self._window = settings.min_loss_scale, settings.loss_scale_window
        self._patience = settings.hysteresis
        self._without, self._left = 0, settings.hysteresis

    @property
    def value(self) -> float:
        """The scale."""
        return float(self._scale)

    @property
    def scale(self) -> Tensor:
        """``[1]``."""
        return self._scale

    @property
    def inv_scale(self) -> Tensor:
        """``[1]``."""
        return self._scale.double().reciprocal().float()

    def update(self, found_inf: bool) -> None:
        """A part of the optimizer has looked at its gradients; ``settle`` decides when all have."""

    def settle(self, *, overflow: bool) -> bool:
        """The scale after an update that all ranks know to have overflowed or not; False = there is none lower."""
        if not overflow:
            self._without += 1
            if self._without == self._window:
                self._without, self._left = 0, self._patience
                self._scale *= 2
            return True
        self._without, self._left = 0, self._left - 1
        if self._left > 0:
            return True
        lowered = max(self.value / 2, self._lowest)
        has_lower = lowered < self.value
        self._scale.fill_(lowered)
        return has_lower

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"scale": self.value, "without": self._without, "left": self._left}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on as when it was written."""
        self._scale.fill_(state_dict["scale"])
        self._without, self._left = state_dict["without"], state_dict["left"]
