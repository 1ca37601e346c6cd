"""The losses of megatron_dppo as a loss function of NeMo-RL; read in NeMo-RL at 7ea279abf (2026-08-22).

In ``examples/run_grpo.py``, after ``setup(...)`` has returned its ``loss_fn``:

    loss_fn = DPPOLossFn(md.LossConfig(name="dppo_binary_tv"))

and put ``examples/integrations/nemo_rl`` on the workers' PYTHONPATH. The log-probabilities of generation, which NeMo-RL
records with each sample, are the anchor; ``prev_logprobs`` are not used (``loss_fn.force_on_policy_ratio=true`` in the
configuration saves their computation). Whether the reference is loaded is decided by the configuration's
``loss_fn.reference_policy_kl_penalty``: give it the value of ``kl_coef``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from nemo_rl.algorithms.loss.interfaces import LossFunction, LossInputType, LossType
from torch import Tensor

import megatron_dppo as md


class DPPOLossFn(LossFunction):
    """A token-level loss on log-probabilities: a sum divided by the global number of valid tokens.

    Args:
        config: the loss; None = DPPO-Binary-TV.

    Raises:
        ValueError: the loss needs what NeMo-RL does not hand over.
    """

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.LOGPROB

    def __init__(self, config: md.LossConfig | None = None) -> None:
        self.config = md.LossConfig() if config is None else config
        # NeMo-RL reads this attribute of ClippedPGLossFn: 0 disables the log-probabilities of the reference.
        self.reference_policy_kl_penalty = self.config.kl_coef
        if missing := self.config.required_inputs - {"rollout_logprobs", "reference_logprobs"}:
            raise ValueError(f"the loss {self.config.name!r} needs {sorted(missing)}, which NeMo-RL does not hand over")

    def __call__(
        self,
        next_token_logprobs: Tensor,
        data: Mapping[str, Any],
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Compute the loss. ``next_token_logprobs``: ``[B, S - 1]``; columns of ``data``: ``[B, S]`` or ``[B]``."""
        mask = data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(-1)
        reference = data["reference_policy_logprobs"][:, 1:].flatten() if self.config.kl_coef else None
        output = md.policy_loss(
            md.LossInputs(
                logprobs=next_token_logprobs.flatten(),
                rollout_logprobs=data["generation_logprobs"][:, 1:].flatten(),
                advantages=data["advantages"][:, 1:].flatten(),
                loss_mask=mask.flatten().bool(),
                reference_logprobs=reference,
            ),
            self.config,
        )
        loss = output.loss_sum / global_valid_toks
        with torch.no_grad():
            masked = (mask.flatten().bool() & ~output.keep_mask).sum() / global_valid_toks
        valid = int(data["sample_mask"].sum().item())
        return loss, {"loss": loss.item(), "mask_fraction": masked.item(), "num_valid_samples": valid}
