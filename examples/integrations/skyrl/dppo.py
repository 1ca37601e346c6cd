"""The losses of megatron_dppo as policy losses of SkyRL; read in skyrl 0.4.0.

Put ``examples/integrations/skyrl`` on the workers' PYTHONPATH. Import this file in the entry point, so that the loss is
registered, and in the process of the trainer:

    import dppo  # noqa: F401

    @ray.remote(num_cpus=1)
    def skyrl_entrypoint(cfg):
        import dppo  # noqa: F401

        BasePPOExp(cfg).run()

In the trainer's process the import tells SkyRL that these losses do not read the trainer's own log-probabilities. SkyRL
then leaves out the policy pass that computes them, as for its own ``dppo``. Without that import each step has one more
forward pass, whose result is not used.

    uv run -m my_entry_point trainer.algorithm.policy_loss_type=megatron_dppo/dppo_binary_tv \
        trainer.algorithm.dppo.delta_low=0.15 trainer.algorithm.dppo.delta_high=0.15 \
        generator.sampling_params.logprobs=0

SkyRL's own ``dppo`` takes the policy's log-probabilities from before the update where the engine returned none. Here
that is an error. ``delta_low`` and ``delta_high`` are the thresholds, as in SkyRL. The cap of the ratio is 5, the
default here; SkyRL has none.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from skyrl.backends.skyrl_train.utils import ppo_utils
from torch import Tensor

import megatron_dppo as md

NAMES = {f"megatron_dppo/{name}": name for name in ("dppo_binary_tv", "dppo_binary_kl")}
"""Policy losses of SkyRL, mapped to losses of megatron_dppo."""


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    config: Any,
    loss_mask: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    *,
    name: str,
) -> tuple[Tensor, dict[str, float]]:
    """Compute the loss as SkyRL calls it; tensors are ``[batch, response]``.

    SkyRL has scaled the advantages, so that the sum over tokens is its reduction.

    Raises:
        ValueError: The engine returned no log-probabilities, or a correction would count pi / mu twice.
    """
    del old_log_probs  # of the trainer: no anchor
    if rollout_logprobs is None:
        raise ValueError(
            f"policy_loss_type = megatron_dppo/{name} without rollout_logprobs: the anchor would be the trainer's own. "
            "Set generator.sampling_params.logprobs=0"
        )
    correction = config.off_policy_correction
    if correction.tis_ratio_type is not None:
        raise ValueError(
            f"off_policy_correction.tis_ratio_type = {correction.tis_ratio_type!r} with megatron_dppo/{name}: pi / mu "
            "would count twice. Set it to null"
        )
    mask = (log_probs.new_ones(log_probs.shape) if loss_mask is None else loss_mask).bool().flatten()
    output = md.dppo_loss(
        md.LossInputs(
            logprobs=log_probs.flatten(),
            rollout_logprobs=rollout_logprobs.flatten(),
            advantages=advantages.expand_as(log_probs).flatten(),
            loss_mask=mask,
        ),
        md.LossConfig(
            name=name,
            divergence_threshold_low=float(config.dppo.delta_low),
            divergence_threshold_high=float(config.dppo.delta_high),
        ),
    )
    masked = (mask & ~output.keep_mask).sum() / mask.sum().clamp(min=1)
    return output.loss_sum, {"clip_ratio": masked.item()}


def skip_policy_pass() -> None:
    """Add the losses to those for which SkyRL computes no log-probabilities of the trainer (0.4.0 and newer)."""
    attribute = "LOSSES_WITHOUT_OLD_LOGPROBS"
    # The trainer has imported the set by its name, if it was imported before this file.
    for module in (ppo_utils, sys.modules.get("skyrl.train.trainer")):
        if hasattr(module, attribute):
            setattr(module, attribute, frozenset({*getattr(module, attribute), *NAMES}))


for _registered, _name in NAMES.items():
    ppo_utils.register_policy_loss(_registered)(partial(policy_loss, name=_name))
skip_policy_pass()
