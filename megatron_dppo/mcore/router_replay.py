"""Router replay: given experts drive Megatron Core's own ``RouterReplay``, per micro-batch and model chunk.

*Which* experts a token visits is replayed. Their weights come from the router's present logits, so gradients reach the
router as always; or they are replayed too, where the routes have them, and the gradients of those that stand in for the
live ones pass straight through to these. Rows that are missing keep the live router's choice and weights.

Megatron's object for a router holds the experts of one micro-batch, and a first-in-first-out list for recomputation in
the backward pass. The pipeline schedules run the micro-batches of one chunk in the same order forward and backward, so
both are right if they are set as each chunk begins a forward pass, which hooks on the chunks do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_dppo.errors import ConfigError
from megatron_dppo.mcore.layer_replay import Counts, LayerReplay
from megatron_dppo.parallel.context import ContextShard
from megatron_dppo.types import MISSING_EXPERT, Metric, MicroBatch, MicroBatches, RoutingShape

ReplayMode = Literal["replay", "compare", "record"]
"""``replay``: use the given experts; ``compare``: use the live ones and count where the given ones differ; ``record``:
use the live ones and keep them."""


def drop_routes(batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
    """The same, made when they are asked for."""
    return MicroBatches(len(batches), lambda i: replace(batches[i], routed_experts=None))


class ReplayDriver:
    """Router replay of one model.

    Args:
        models: the unwrapped chunks of this rank.
        config: theirs.
        shape: of the routes.
        tp_group: ranks that split rows among them, if sequence parallelism does; else None.
        cp_group: ranks that split sequences among them; None = no context parallelism.
    """

    def __init__(
        self,
        models: Sequence[GPTModel],
        config: TransformerConfig,
        shape: RoutingShape,
        tp_group: ProcessGroup | None,
        cp_group: ProcessGroup | None,
    ) -> None:
        self._models, self._shape, self._missing = models, shape, MISSING_EXPERT[shape.dtype]
        self._tp_group, self._cp_group = tp_group, cp_group
        self._device = next(models[0].parameters()).device
        self._counts = Counts(self._device)
        self._num_rows = self._num_missing = 0
        modules = config.recompute_modules or []
        selective = config.recompute_granularity == "selective" and "moe" in modules
        remembers = selective or config.recompute_granularity == "full"
        self._chunks = [self._attach(model, remembers) for model in models]
        self._routers = [router for chunk in self._chunks for router in chunk]
        self.layers = tuple(sorted(router.layer for router in self._routers))
        """that have routers on this rank, counted in the whole model from 0"""
        self._begun: list[int] = []
        self._recorded: list[dict[int, Tensor]] = []

    def _attach(self, model: GPTModel, remembers: bool) -> list[LayerReplay]:
        found = []
        for layer in model.decoder.layers:
            router = getattr(layer.mlp, "router", None)
            if router is None:
                continue
            number = layer.layer_number - 1
            if number in self._shape.dense_layers:
                raise ValueError(f"layer {number} has a router, but the routes take it for a dense one")
            replay = LayerReplay(number, self._shape, remembers=remembers, counts=self._counts)
            if router.router_replay in RouterReplay.global_router_replay_instances:
                RouterReplay.global_router_replay_instances.remove(router.router_replay)
            router.router_replay = replay
            if self._shape.weights:
                router.register_forward_hook(replay.weigh)
            found.append(replay)
        return found

    @contextmanager
    def run(self, batches: Sequence[MicroBatch], mode: ReplayMode) -> Iterator[Sequence[MicroBatch]]:
        """One run of Megatron's schedule over ``batches``; yields them without their routes, which stay on the host.

        Raises:
            ValueError: micro-batches without routes, or rows that do not fit the tokens of a router.
            RuntimeError: a chunk did not run every micro-batch once, or a router's recomputation missed some.
        """
        self._reset()
        self._begun = [0] * len(self._models)
        self._recorded = [{} for _ in batches]
        handles = []
        for chunk, model in enumerate(self._models):
            handles.append(model.register_forward_pre_hook(partial(self._begin, chunk, batches, mode)))
            handles.append(model.register_forward_hook(partial(self._end, chunk, mode)))
        try:
            yield drop_routes(batches)
            self._check_all_used(len(batches))
        finally:
            for handle in handles:
                handle.remove()
            for router in self._routers:
                router.clear()

    def _reset(self) -> None:
        self._counts.clear()
        self._num_rows = self._num_missing = 0
        for router in self._routers:
            router.num_recomputed = 0

    def _begin(self, chunk: int, batches: Sequence[MicroBatch], mode: ReplayMode, *_: Any) -> None:
        routers = self._chunks[chunk]
        action = RouterReplayAction.REPLAY_FORWARD if mode == "replay" else RouterReplayAction.RECORD
        if mode != "record" and routers:
            batch, layers = batches[self._begun[chunk]], [router.layer for router in routers]
            if batch.routed_experts is None:
                raise ValueError(f"router replay in mode {mode!r} needs routed_experts in every micro-batch")
            has_all = batch.routed_experts.shape[1] == self._shape.num_layers
            routes = batch.routed_experts[:, layers if has_all else [self.layers.index(i) for i in layers]]
            self._count_missing(batch, routes)
            given = self._local(batch, routes)
            for router, rows in zip(routers, given, strict=True):
                router.give(rows)
        for router in routers:
            router.set_router_replay_action(action)

    def _end(self, chunk: int, mode: ReplayMode, *_: Any) -> None:
        for router in self._chunks[chunk]:
            if mode == "record":
                self._recorded[self._begun[chunk]][router.layer] = router.recorded_routes()
            router.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
        self._begun[chunk] += 1

    def _count_missing(self, batch: MicroBatch, routes: Tensor) -> None:
        """Rows of tokens that are not padding; the same on all ranks of tensor and context parallelism."""
        layers = routes.shape[1]
        self._num_missing += int((routes[..., 0] == self._missing).sum()) - batch.num_padding * layers
        self._num_rows += (len(batch.tokens) - batch.num_padding) * layers

    def _local(self, batch: MicroBatch, routes: Tensor) -> Tensor:
        """``[layers, local tokens, width]`` on the device, of ``[T, layers, width]``: what this rank's routers see."""
        if self._cp_group is not None:
            routes = ContextShard.of(batch.cu_seqlens, self._cp_group).split(routes)
        if self._tp_group is not None:
            routes = routes.chunk(self._tp_group.size())[self._tp_group.rank()]
        return routes.transpose(0, 1).contiguous().to(self._device, non_blocking=True)

    def _check_all_used(self, num_batches: int) -> None:
        for chunk, begun in enumerate(self._begun):
            if begun != num_batches:
                raise RuntimeError(
                    f"model chunk {chunk} ran {begun} of {num_batches} micro-batches under router replay"
                )
        for router in self._routers:
            if router.num_recomputed not in (0, num_batches):
                raise RuntimeError(
                    f"router of layer {router.layer} ran again for {router.num_recomputed} of {num_batches} "
                    "micro-batches, expected all or none"
                )

    def recorded_routes(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """The routes ``[T, L, width]`` of each micro-batch of the last run in mode ``record``; missing but on those
        layers that this pipeline stage has. A collective over tensor and context parallelism."""
        found = []
        for batch, by_layer in zip(batches, self._recorded, strict=True):
            size = (len(batch.tokens), self._shape.num_layers, self._shape.width)
            routes = torch.full(size, self._missing, dtype=self._shape.dtype)
            if by_layer:
                layers = sorted(by_layer)
                routes[:, layers] = self._whole(torch.stack([by_layer[i] for i in layers], 1), batch).cpu()
            found.append(routes)
        return found

    def _whole(self, routes: Tensor, batch: MicroBatch) -> Tensor:
        raw = routes.view(torch.uint8)  # NCCL has no int16
        if self._tp_group is not None:
            parts = [torch.empty_like(raw) for _ in range(self._tp_group.size())]
            dist.all_gather(parts, raw, group=self._tp_group)
            raw = torch.cat(parts)
        if self._cp_group is not None:
            raw = ContextShard.of(batch.cu_seqlens, self._cp_group).to(raw.device).gather(raw)
        return raw.view(routes.dtype)

    def metrics(self, *, is_first: bool) -> dict[str, Metric]:
        """What the last run counted on this rank, as shares of tokens times layers; of weights the mean difference.

        Args:
            is_first: whether this is the first rank of tensor and context parallelism; what those ranks have in common
                counts once.
        """
        known, live, used = self._counts.rows.tolist()
        apart, weights = self._counts.weights.tolist()
        return {
            "router_disagreement": Metric(used, known),
            "router_live_disagreement": Metric(live, known),
            "router_missing": Metric(self._num_missing * is_first, self._num_rows * is_first),
            **({"router_weight_diff": Metric(apart, weights)} if self._shape.weights else {}),
        }


_AGAINST_REPLAY = {
    "moe_router_fusion": (True, "the fused kernel chooses the experts by itself"),
    "moe_router_load_balancing_type": (
        {"sinkhorn", "quantile_balancing"},
        "this balancing chooses the experts by itself",
    ),
    "moe_router_force_load_balancing": (True, "it replaces the logits by random ones"),
    "moe_router_force_biased": (None, "it adds a random bias to the logits"),
    "moe_expert_capacity_factor": (None, "it drops tokens from the experts that were replayed"),
    "overlap_moe_expert_parallel_comm": (True, "it runs forward and backward passes of micro-batches interleaved"),
    "enable_cuda_graph": (True, "a captured router never asks for the replayed experts"),
    "external_cuda_graph": (True, "a captured router never asks for the replayed experts"),
    "cuda_graph_impl": ({"local", "transformer_engine"}, "a captured router never asks for the replayed experts"),
}
"""Field of TransformerConfig -> values with which Megatron ignores or undoes replay (None = any value that is set)."""


def check_router_replay_support(overrides: Mapping[str, Any]) -> None:
    """Stop before a run in which replay would silently do nothing, or not what it says.

    Args:
        overrides: fields of TransformerConfig that the user sets; the defaults of all of these obey replay.

    Raises:
        ConfigError: naming the field.
    """
    for name, (values, reason) in _AGAINST_REPLAY.items():
        value = overrides.get(name)
        if value is None or isinstance(value, list):
            continue
        if values is None or value in (values if isinstance(values, set) else {values}):
            raise ConfigError(
                f"model.transformer.{name} = {value!r} cannot go with train.router_replay: {reason}; remove one of them"
            )
