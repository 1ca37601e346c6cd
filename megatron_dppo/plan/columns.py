"""What one response token brings from the engine to the trainer, in bytes: it lies in the host's memory for a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_dppo.config.layout import Layout
from megatron_dppo.config.schema import Config
from megatron_dppo.hf import routing_shape
from megatron_dppo.plan.batch import batch_of

KEPT_IDS = 32
"""An assumption: ids that top-p or min-p leave of a token on average; a run tells its own (``rollout/kept_ids``)."""


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Bytes of one token, as ``types.Completion`` holds it."""

    sampled: int
    """its id and log-probability"""
    topk: int
    """ids and log-probabilities of the Top-K slots"""
    kept: int
    """the ids that the filters left, and their number"""
    routes: int
    """the experts that were chosen for it, in every layer; the prompt's tokens have such rows too"""
    router_weights: int
    """their combine weights"""
    step: int
    """bytes of a step's responses on one data-parallel rank, of the mean length that a plan assumes"""

    @property
    def token(self) -> int:
        """All of a token."""
        return self.sampled + self.topk + self.kept + self.routes + self.router_weights


def kept_ids(config: Config, vocab_size: int) -> int:
    """Ids in the kept set of each token that a plan assumes; 0 = there is no filter.

    Example: top-k alone keeps exactly k.
        >>> from types import SimpleNamespace as Config
        >>> kept_ids(Config(rollout=Config(filters=True, top_k=8, top_p=1.0, min_p=0.0)), 1000)
        8
    """
    rollout = config.rollout
    if not rollout.filters:
        return 0
    bounds = [vocab_size, *([rollout.top_k] if rollout.top_k else [])]
    return min(bounds if rollout.top_p == 1 and rollout.min_p == 0 else [*bounds, KEPT_IDS])


def columns_of(config: Config, hf_config: Any, layout: Layout) -> Columns:
    """Of a configuration: the engine's answer with everything that the run asks it for."""
    kept = kept_ids(config, hf_config.vocab_size)
    shape = routing_shape(hf_config) if config.train.needs_engine_routing else None
    experts = 0 if shape is None else shape.num_layers * shape.topk
    found = Columns(
        sampled=8,
        topk=8 * (config.loss.topk + 1) if config.loss.is_topk else 0,
        kept=4 * (kept + 1) if kept else 0,
        routes=0 if shape is None else experts * shape.dtype.itemsize,
        router_weights=4 * experts if config.train.router_replay_weights else 0,
        step=0,
    )
    batch = batch_of(config, layout)
    tokens = batch.samples // layout.dp * batch.mean_tokens
    return Columns(**{**vars(found), "step": found.token * tokens})
