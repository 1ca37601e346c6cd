"""Padding of rows, kept out of what balances the experts: auxiliary losses, z-loss, and the update of router biases.

Reason: tensor and context parallelism pad rows, and Megatron routes padding like tokens. Its ``padding_mask`` is sliced
for sequence parallelism on the first pipeline stage only, does not broadcast in ``TopKRouter._apply_expert_bias``, and
``attach_and_log_load_balancing_loss`` scales each rank's part by the tokens of that rank, as if all ranks had as many
(0.16.1 forgets the number of ranks, too). Here every layer gets the mask of its tokens, and each part is scaled by the
tokens of the row: the gradient is that of one process without padding.
Affected: Megatron Core 0.16.1 to 0.19.2.
Delete when: Megatron's own mask gives the gradient of one process (tests/distributed/test_balance_loss.py).
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor
from torch.nn import Module

from megatron_dppo.errors import ConfigError
from megatron_dppo.parallel.groups import ParallelGroups

_BY_ALL_TOKENS = {
    "moe_router_load_balancing_type": ({"sinkhorn", "quantile_balancing"}, "it chooses experts by all tokens of a row"),
    "moe_expert_capacity_factor": (None, "it drops tokens by the number that an expert gets"),
}
"""TransformerConfig fields, with the values (None: any) under which padding changes the experts of other tokens."""


def check_padding_support(fields: Mapping[str, object], multiple: int) -> None:
    """Check that padding of rows cannot change the experts of tokens.

    ``multiple`` is the number of which the length of each row is a multiple; with 1 no row has padding.
    """
    if multiple == 1:
        return
    for name, (values, reason) in _BY_ALL_TOKENS.items():
        value = fields.get(name)
        chosen = set(value) if isinstance(value, list) else {value}
        if value is not None and (values is None or chosen & values):
            raise ConfigError(
                f"model.transformer.{name} = {value!r} with rows that are padded to multiples of {multiple} tokens "
                f"(tensor and context parallelism, FP8): {reason}, the padding among them. Remove it, or set these "
                "sizes to 1"
            )


def exclude_padding(models: Sequence[GPTModel], config: TransformerConfig, groups: ParallelGroups) -> None:
    """Exclude padding from the balancing of every router in ``models``, where there is any."""
    # Sequence parallelism splits the tokens of a context-parallel rank over the tensor-parallel ranks, in order.
    part = (dist.get_rank(groups.tp), dist.get_world_size(groups.tp)) if config.sequence_parallel else (0, 1)
    for model in models:
        for layer in model.decoder.layers:
            router = getattr(layer.mlp, "router", None)
            if router is not None and _has_balancing(router):
                layer.register_forward_pre_hook(partial(_pass_mask, part), with_kwargs=True)
                BalancedTokens(router)


def _has_balancing(router: Any) -> bool:
    if router.routing_type == "quantile_balancing":
        return False  # it refuses a mask
    return bool(router.is_aux_loss_enabled() or router.config.moe_z_loss_coeff or router.enable_expert_bias)


def _pass_mask(part: tuple[int, int], _layer: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Give a layer the padding mask ``[1, tokens]`` of this rank's tokens; a forward pre-hook."""
    mask: Tensor | None = getattr(kwargs.get("packed_seq_params"), "is_padding", None)
    if mask is None:
        return None
    rank, size = part
    return args, kwargs | {"padding_mask": mask.chunk(size)[rank][None]}


class BalancedTokens:
    """Replacement of the methods of a ``TopKRouter`` that balance experts, for the tokens that are not padding."""

    def __init__(self, router: Any) -> None:
        self._router = router
        self._mask: Tensor | None = None
        """Padding among this rank's tokens of the current call [tokens]. None means no padding."""
        self._num_tokens = torch.zeros(())
        """Tokens of the row without padding, on all ranks that share it."""
        # The replacements below call the originals.
        self._routing = router.routing
        self._attach = router.attach_and_log_load_balancing_loss
        self._log_z_loss = router.apply_z_loss
        self._count_tokens = router._apply_expert_bias
        router.routing = self.routing
        router.attach_and_log_load_balancing_loss = self.attach
        router.apply_z_loss = self.apply_z_loss
        router._apply_expert_bias = self.count_tokens

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> Any:
        """See ``TopKRouter.routing``."""
        # Without gradients, as in the first pass of a recomputed layer, nothing balances.
        self._mask = None if padding_mask is None or not torch.is_grad_enabled() else padding_mask.reshape(-1)
        num_rows = logits.shape[:-1].numel()
        group = self._router.tp_cp_group
        if self._mask is None:
            self._num_tokens = torch.tensor(float(num_rows * group.size()), device=logits.device)
            return self._routing(logits)
        self._num_tokens = (~self._mask).sum().float()
        if group.size() > 1:
            dist.all_reduce(self._num_tokens, group=group)
        # Megatron divides by the number of tokens. A row of padding alone is passed as tokens; its loss is scaled by 0.
        return self._routing(logits, padding_mask=self._mask & (self._num_tokens > 0))

    def attach(self, activation: Tensor, coefficient: float, aux_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Attach this rank's part of an auxiliary loss, times the tokens of the row. Megatron only logs it."""
        self._attach(activation.detach(), coefficient, aux_loss.detach() * (self._num_tokens > 0), *args, **kwargs)
        # Megatron divides the gradients by the global token count, so a part weighs as many tokens as its row has.
        scaled: Tensor = MoEAuxLossAutoScaler.apply(activation, aux_loss * self._num_tokens)
        return scaled

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Attach the z-loss of this rank's tokens. Megatron only logs it. See ``TopKRouter.apply_z_loss``."""
        coefficient = self._router.config.moe_z_loss_coeff
        if coefficient is None or not self._router.training or not torch.is_grad_enabled():
            return logits
        self._log_z_loss(logits.detach(), padding_mask=padding_mask)
        squares = logits.logsumexp(-1).square()
        if self._mask is not None:
            squares = squares * ~self._mask
        attached: Tensor = MoEAuxLossAutoScaler.apply(logits, coefficient * squares.sum())
        return attached

    def count_tokens(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Count the tokens of each expert for the update of its bias. See ``TopKRouter._apply_expert_bias``."""
        self._count_tokens(routing_map if self._mask is None else routing_map & ~self._mask[:, None])
