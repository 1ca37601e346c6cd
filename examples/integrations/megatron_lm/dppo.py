"""A ``forward_step`` for Megatron's own schedules, with megatron_dppo's fused head; read in megatron-core 0.16.1.

    losses = get_forward_backward_func()(forward_step_func=partial(forward_step, config=LossConfig(), vocab_size=...),
                                         data_iterator=iter(batches), model=model, ...)

Build the model with ``TransformerConfig(calculate_per_token_loss=True)``: Megatron then divides by the tokens of the
whole step. A batch is a dictionary of ``tokens``, ``labels``, ``position_ids``, ``rollout_logprobs``, ``advantages``
and ``loss_mask``, all ``[B, S]`` and aligned to the labels. For ``dppo_topk_*`` it also has ``rollout_topk_ids`` and
``rollout_topk_logprobs``, ``[B, S, K + 1]``: the rollout's K most probable tokens, and the sampled one in the last slot
if it is none of them, else -1. The logits of the batch never exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

import megatron_dppo as md

_ANCHORS = ("rollout_logprobs", "rollout_topk_ids", "rollout_topk_logprobs")
Step = tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]]


def forward_step(
    data_iterator: Iterator[dict[str, Tensor]],
    model: Any,
    *,
    config: md.LossConfig,
    vocab_size: int,
    temperature: float = 1.0,
) -> Step:
    """Return the hidden states of the model and their loss function, as Megatron's ``forward_step_func`` does.

    Args:
        data_iterator: Iterator over batches.
        model: The model of this pipeline stage, wrapped or not.
        config: Token-level loss whose ``required_inputs`` the batch holds.
        vocab_size: Vocabulary size without padding.
        temperature: Sampling temperature of the rollout.
    """
    batch = next(data_iterator)
    core = get_attr_wrapped_model(model, "decoder", return_model_obj=True)
    if core.post_process:
        # Hidden states instead of logits; the head below has the output layer's weight.
        core.output_layer.forward = _pass_through
    hidden = model(batch["tokens"], batch["position_ids"], None)
    return hidden, partial(_loss, core, batch, config, vocab_size, temperature)


def _pass_through(hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None) -> Any:
    return hidden, None


def _loss(
    core: Any, batch: dict[str, Tensor], config: md.LossConfig, vocab_size: int, temperature: float, hidden: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the loss sum, the number of tokens to divide by, and the logged values as (sum, count).

    Raises:
        ValueError: The batch has no log-probabilities of the rollout.
    """
    missing = [name for name in _ANCHORS[: 3 if config.is_topk else 1] if batch.get(name) is None]
    if missing:
        raise ValueError(f"the batch has no {' and no '.join(missing)}; {config.name} is anchored on the rollout's own")
    states = hidden.transpose(0, 1)  # [B, S, H] to Megatron's [S, B, H], of which ranks may have parts
    if core.config.sequence_parallel:
        states = gather_from_sequence_parallel_region(states)
    else:
        states = copy_to_tensor_model_parallel_region(states)
    tied = core.share_embeddings_and_output_weights
    output = md.dppo_head_loss(
        states.transpose(0, 1).flatten(0, 1),
        core.shared_embedding_or_output_weight() if tied else core.output_layer.weight,
        md.TokenTargets(
            labels=batch["labels"].flatten(),
            advantages=batch["advantages"].flatten(),
            loss_mask=batch["loss_mask"].flatten(),
            rollout_logprobs=batch["rollout_logprobs"].flatten(),
            rollout_topk_ids=batch["rollout_topk_ids"].flatten(0, 1) if config.is_topk else None,
            rollout_topk_logprobs=batch["rollout_topk_logprobs"].flatten(0, 1) if config.is_topk else None,
        ),
        partial(md.policy_loss, config=config),
        group=parallel_state.get_tensor_model_parallel_group(),
        vocab_size=vocab_size,
        temperature=temperature,
    )
    num_masked = (batch["loss_mask"].flatten() & ~output.keep_mask).sum()
    masked = torch.stack([num_masked, output.num_tokens]).detach()
    return output.loss_sum, output.num_tokens.int(), {"mask_fraction": masked}
