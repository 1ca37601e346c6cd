"""TRL's GRPOTrainer with a loss of megatron_dppo, and with its head; read in TRL 1.16.

    from dppo import DPPOTrainer

    DPPOTrainer(model, reward_funcs, args=GRPOConfig(vllm_importance_sampling_correction=False), train_dataset=...,
                loss=md.LossConfig(name="dppo_binary_tv"), fused_head=True).train()

The anchor is what vLLM reported of each token. Transformers' own generation reports nothing. Then the trainer's
log-probabilities at the weights that sampled take its place, as in TRL, and the trust region sees no mismatch between
engine and trainer. The trainer warns of it once.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

import megatron_dppo as md

_INERT = {
    "importance_sampling_level": "token",
    "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None,
    "delta": None,
    "entropy_coef": 0.0,
}
"""GRPOConfig's options of its own loss, which this one does not have -> the values at which they do nothing."""


class DPPOTrainer(GRPOTrainer):
    """GRPOTrainer with another loss, divided as TRL's ``dapo``: by all tokens of the batch.

    Args:
        loss: the loss; ``args.beta`` is its KL coefficient. None = DPPO-Binary-TV.
        fused_head: output layer, loss and gradient in one chunked pass, without logits of the whole batch; for a model
            in one process or in DistributedDataParallel, not in FSDP or DeepSpeed, which shard the output layer.

    Raises:
        ValueError: an option of ``args`` would do nothing, or the loss needs what TRL does not hand over.
    """

    def __init__(self, *args: Any, loss: md.LossConfig | None = None, fused_head: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        config = md.LossConfig() if loss is None else loss
        self.dppo = md.LossConfig(**config.model_dump(exclude_unset=True) | {"kl_coef": float(self.beta)})
        self.fused_head = fused_head
        for name, inert in _INERT.items():
            if getattr(self.args, name, inert) != inert:
                raise ValueError(f"{name} = {getattr(self.args, name)!r} is of TRL's own loss; leave it at {inert!r}")
        if fused_head and (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            raise ValueError(
                "fused_head=True with FSDP or DeepSpeed, which shard the output layer; use fused_head=False"
            )
        if not self.use_vllm:
            warnings.warn(
                "use_vllm=False reports no log-probabilities of the rollout, so the anchor is the trainer's own; the "
                "trust region does not see the mismatch of another engine. Set use_vllm=True to measure from it",
                stacklevel=2,
            )
        if self.use_vllm and self.vllm_importance_sampling_correction:
            raise ValueError("pi / mu would count twice; set vllm_importance_sampling_correction=False")
        if missing := self.dppo.required_inputs - {"rollout_logprobs", "reference_logprobs"}:
            raise ValueError(f"the loss {self.dppo.name!r} needs {sorted(missing)}, which TRL does not hand over")

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        advantages = inputs["advantages"]
        columns: dict[str, Any] = {
            "advantages": (advantages[:, None] if advantages.dim() == 1 else advantages).expand_as(mask).flatten(),
            "loss_mask": mask.flatten().bool(),
            "reference_logprobs": inputs["ref_per_token_logps"].flatten() if self.beta else None,
        }
        mu = inputs.get("sampling_per_token_logps", inputs.get("old_per_token_logps"))
        columns["rollout_logprobs"] = None if mu is None else mu.flatten()
        output = (self._by_head if self.fused_head else self._by_logprobs)(model, inputs, columns)
        mode = "train" if self.model.training else "eval"
        masked = (columns["loss_mask"] & ~output.keep_mask).sum() / mask.sum().clamp(min=1)
        self._metrics[mode]["mask_fraction"].append(self.accelerator.gather(masked).mean().item())
        count = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
        if mode == "train":  # the count is of the batch that was generated, which several updates may share
            count = count * self.current_gradient_accumulation_steps / self.args.steps_per_generation
        return output.loss_sum / count

    def _by_logprobs(self, model: Any, inputs: dict[str, Any], columns: dict[str, Any]) -> md.LossOutput:
        ids, attention_mask = _rows(inputs)
        width = inputs["completion_ids"].size(1)
        logprobs = self._get_per_token_logps_and_entropies(model, ids, attention_mask, width)[0].flatten()
        if columns["rollout_logprobs"] is None:
            columns["rollout_logprobs"] = logprobs.detach()
        return md.policy_loss(md.LossInputs(logprobs=logprobs, **columns), self.dppo)

    def _by_head(self, model: Any, inputs: dict[str, Any], columns: dict[str, Any]) -> md.LossOutput:
        ids, attention_mask = _rows(inputs)
        width = inputs["completion_ids"].size(1)
        # Through the model's own forward, since DistributedDataParallel synchronises the gradients of no other call.
        output = model(input_ids=ids, attention_mask=attention_mask, output_hidden_states=True, logits_to_keep=1)
        hidden = output.hidden_states[-1][:, -width - 1 : -1]
        rows, labels = hidden.reshape(-1, hidden.size(-1)), inputs["completion_ids"].flatten()
        plain = self.accelerator.unwrap_model(model)
        head: dict[str, Any] = {"group": None, "vocab_size": plain.config.vocab_size, "temperature": self.temperature}
        weight = plain.get_output_embeddings().weight
        targets = md.TokenTargets(labels=labels, **columns)
        return md.dppo_head_loss(rows, weight, targets, partial(_anchored, config=self.dppo), **head)


def _anchored(inputs: md.LossInputs, config: md.LossConfig) -> md.LossOutput:
    """Return the loss, with detached policy log-probabilities as the anchor if the rollout reported none."""
    if inputs.rollout_logprobs is None:
        columns = {
            name: getattr(inputs, name) for name in ("logprobs", "advantages", "loss_mask", "reference_logprobs")
        }
        inputs = md.LossInputs(rollout_logprobs=inputs.logprobs.detach(), **columns)
    return md.policy_loss(inputs, config)


def _rows(inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the ids of prompts (padded left) and completions (padded right), and their attention mask."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    return ids, torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
