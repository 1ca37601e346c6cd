"""Micro-batches of the size that a configuration allows, with made-up contents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from megatron_dppo.config.layout import Layout
from megatron_dppo.config.schema import Config
from megatron_dppo.data.packing import RowShape, pack
from megatron_dppo.data.samples import to_training_sample
from megatron_dppo.hf import routing_shape
from megatron_dppo.losses import BatchTotals
from megatron_dppo.plan.columns import kept_ids
from megatron_dppo.policy.update import weighted
from megatron_dppo.types import KeptSets, MicroBatch, RoutingShape, TrainingSample, with_weights


def _full_row(config: Config, shape: RowShape, routing: RoutingShape | None, vocab_size: int) -> MicroBatch:
    """A row of ``train.micro_batch_tokens``, of sequences as long as the configuration allows.

    Every position after a prompt of a single token has a loss and a gradient: the most work for head and memory.
    """
    tokens, samples = config.train.micro_batch_tokens, list[TrainingSample]()
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    while tokens > 0:
        length = min(tokens, longest)
        samples.append(_sample(length, config, routing, vocab_size))
        tokens -= length
    return pack(samples, shape)


def rows(config: Config, hf_config: Any, layout: Layout, count: int) -> Sequence[MicroBatch]:
    """``count`` full rows, all of one update."""
    shape = RowShape(row_multiple=layout.row_multiple, sequence_multiple=layout.sequence_multiple)
    routing = routing_shape(hf_config, weights=config.train.router_replay_weights)
    row = _full_row(config, shape, routing, hf_config.vocab_size)
    sequences = int((row.loss_mask & (row.position_ids == 0)).sum())
    totals = BatchTotals(num_tokens=count * int(row.loss_mask.sum()), num_sequences=count * sequences)
    return [weighted(row, totals, config.loss)] * count


def _sample(length: int, config: Config, routing: RoutingShape | None, vocab_size: int) -> TrainingSample:
    """A sequence of ``length`` inputs, with every column that the run would have."""
    topk = None
    if config.loss.is_topk:
        ids = torch.arange(config.loss.topk + 1, dtype=torch.int32).expand(length, -1).clone()
        ids[:, -1] = -1
        topk = ids, torch.full(ids.shape, -3.0)
    routes = None
    if routing is not None and config.train.router_replay != "off":
        # Every expert gets as many tokens, in each part of the row.
        experts = torch.arange(length * routing.topk) % routing.num_experts
        one = experts.to(routing.dtype).view(length, 1, routing.topk)
        if routing.weights:
            one = with_weights(one, torch.full(one.shape, 1 / routing.topk))
        routes = one.expand(-1, routing.num_layers, -1).contiguous()
    kept = None
    if number := kept_ids(config, vocab_size):  # distinct, and the label 1 among them
        ids = torch.arange(1, number + 1, dtype=torch.int32) % vocab_size
        kept = KeptSets(ids.repeat(length), torch.full((length,), number, dtype=torch.int32))
    sample = to_training_sample([1], [1] * length, [-0.5] * length, 1.0, topk, routes, kept=kept)
    extra = {name: torch.full((length,), -0.5) for name in ("anchor_logprobs", "reference_logprobs")}
    needed = config.loss.required_inputs | ({"reference_logprobs"} if config.needs_reference else set())
    changes: dict[str, Any] = {name: column for name, column in extra.items() if name in needed}
    return replace(sample, **changes)
