"""Router replay: the routes of the samples drive Megatron Core's ``RouterReplay``, per micro-batch and model chunk.

Replayed is *which* experts a token visits. The combine weights come from the router's current logits, so the router
gets its usual gradient; routes with weights replay those too, with a straight-through gradient. Tokens with missing
routes keep the live router's choice and weights.

Megatron's ``RouterReplay`` holds the experts of one micro-batch, and a first-in-first-out list for recomputation in the
backward pass. The pipeline schedules run the micro-batches of a chunk in the same order forward and backward, so both
are right if forward hooks set them when a chunk begins a forward pass.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_dppo.errors import ConfigError
from megatron_dppo.mcore.layer_replay import LayerReplay, ReplayCounts
from megatron_dppo.parallel.objects import all_gather
from megatron_dppo.types import MISSING_EXPERT, Metric, MicroBatch, MicroBatches, RoutingShape
from megatron_dppo_megatron_cpu.context import ContextShard

ReplayMode = Literal["replay", "compare", "record"]
"""``replay`` uses the experts of the routes. ``compare`` uses the live ones and counts differences. ``record`` uses the
live ones and records them."""


def drop_routes(batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
    """Return the micro-batches without their routes, created lazily."""
    return MicroBatches(len(batches), lambda i: replace(batches[i], routed_experts=None))


class ReplayDriver:
    """Router replay of one model. ``layers``: those with a router on this rank, counted in the whole model from 0.

    ``tp_group`` are the tensor-parallel ranks if sequence parallelism splits rows among them, else None; ``cp_group``
    is None without context parallelism.
    """

    def __init__(
        self,
        models: Sequence[GPTModel],
        config: TransformerConfig,
        shape: RoutingShape,
        tp_group: ProcessGroup | None,
        cp_group: ProcessGroup | None,
    ) -> None:
        self._models = models
        self._shape = shape
        self._missing = MISSING_EXPERT[shape.dtype]
        self._tp_group = tp_group
        self._cp_group = cp_group
        self._device = next(models[0].parameters()).device
        self._counts = ReplayCounts(self._shape.num_layers, self._device)
        self._num_rows = self._num_missing = 0
        # Activation recomputation runs the routers of these layers a second time, in the backward pass.
        modules = config.recompute_modules or []
        is_selective = config.recompute_granularity == "selective" and "moe" in modules
        is_recomputed = is_selective or config.recompute_granularity == "full"
        self._chunks = [self._attach(model, is_recomputed) for model in models]
        self._routers = [router for chunk in self._chunks for router in chunk]
        self.layers = tuple(sorted(router.layer for router in self._routers))
        self._next_batch: list[int] = []
        self._recorded: list[dict[int, Tensor]] = []
        self._differences: list[dict[int, Tensor]] = []
        """``LayerReplay.differences`` of each micro-batch, by layer."""

    def _attach(self, model: GPTModel, is_recomputed: bool) -> list[LayerReplay]:
        replays = []
        for layer in model.decoder.layers:
            router = getattr(layer.mlp, "router", None)
            if router is None:
                continue
            # Megatron counts layers from 1, over all pipeline stages.
            number = layer.layer_number - 1
            if number in self._shape.dense_layers:
                raise ValueError(f"Expected a dense layer {number}, as in the routes, got one with a router.")
            replay = LayerReplay(number, self._shape, is_recomputed=is_recomputed, counts=self._counts)
            # Megatron's class methods set all instances of this list at once, and with virtual pipeline stages several
            # chunks are in flight: here every router is set by the hooks of its own chunk.
            if router.router_replay in RouterReplay.global_router_replay_instances:
                RouterReplay.global_router_replay_instances.remove(router.router_replay)
            router.router_replay = replay
            if self._shape.weights:
                router.register_forward_hook(replay.replay_weights)
            replays.append(replay)
        return replays

    @contextmanager
    def run(
        self, batches: Sequence[MicroBatch], mode: ReplayMode, *, by_token: bool = False
    ) -> Iterator[Sequence[MicroBatch]]:
        """Replay routes during one run of Megatron's schedule over ``batches``.

        Yields the micro-batches without their routes, which stay in host memory until their chunk runs. ``by_token``
        keeps which tokens' live experts differ, for ``live_differences``.
        """
        # Counts start anew: ``metrics`` reports the last run of the schedule.
        self._counts.clear()
        self._num_rows = self._num_missing = 0
        for router in self._routers:
            router.num_recomputed = 0
        self._next_batch = [0] * len(self._models)
        self._recorded = [{} for _ in batches]
        self._differences = [{} for _ in batches]
        self._counts.keeps_tokens = by_token
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

    def _begin(self, chunk: int, batches: Sequence[MicroBatch], mode: ReplayMode, *_: object) -> None:
        routers = self._chunks[chunk]
        action = RouterReplayAction.REPLAY_FORWARD if mode == "replay" else RouterReplayAction.RECORD
        if mode != "record" and routers:
            batch = batches[self._next_batch[chunk]]
            layers = [router.layer for router in routers]
            if batch.routed_experts is None:
                raise ValueError(f"Router replay in mode {mode!r} needs routed_experts in every micro-batch.")
            # Samples have the routes of all layers, or of the layers of this pipeline stage only.
            has_all = batch.routed_experts.shape[1] == self._shape.num_layers
            routes = batch.routed_experts[:, layers if has_all else [self.layers.index(i) for i in layers]]
            self._count_missing(batch, routes)
            local_routes = self._local(batch, routes)
            for router, layer_routes in zip(routers, local_routes, strict=True):
                router.set_routes(layer_routes)
        for router in routers:
            router.set_router_replay_action(action)

    def _end(self, chunk: int, mode: ReplayMode, *_: object) -> None:
        for router in self._chunks[chunk]:
            if mode == "record":
                self._recorded[self._next_batch[chunk]][router.layer] = router.recorded_routes()
            elif router.differences is not None:
                self._differences[self._next_batch[chunk]][router.layer] = router.differences
            # From here on this router only runs again when the backward pass recomputes activations.
            router.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
        self._next_batch[chunk] += 1

    def _count_missing(self, batch: MicroBatch, routes: Tensor) -> None:
        """Count routes and missing routes, without padding; the same on all tensor- and context-parallel ranks."""
        # A route is missing as a whole, so its first expert shows it. Padding has no routes and is not counted.
        layers = routes.shape[1]
        self._num_missing += int((routes[..., 0] == self._missing).sum()) - batch.num_padding * layers
        self._num_rows += (len(batch.tokens) - batch.num_padding) * layers

    def _local(self, batch: MicroBatch, routes: Tensor) -> Tensor:
        """Return this rank's part of routes ``[T, num_layers, width]`` as ``[num_layers, num_local_tokens, width]``."""
        if self._cp_group is not None:
            routes = ContextShard.of(batch.cu_seqlens, self._cp_group).split(routes)
        if self._tp_group is not None:
            routes = routes.chunk(self._tp_group.size())[self._tp_group.rank()]
        # Layer by layer, since each router gets the routes of one layer.
        return routes.transpose(0, 1).contiguous().to(self._device, non_blocking=True)

    def _check_all_used(self, num_batches: int) -> None:
        for chunk, count in enumerate(self._next_batch):
            if count != num_batches:
                raise RuntimeError(
                    f"Expected model chunk {chunk} to run {num_batches} micro-batches under router replay, got {count}."
                )
        for router in self._routers:
            # 0: nothing is recomputed, or the schedule ran forward only.
            if router.num_recomputed not in (0, num_batches):
                raise RuntimeError(
                    f"Expected the router of layer {router.layer} to recompute all or none of {num_batches} "
                    f"micro-batches, got {router.num_recomputed}."
                )

    def recorded_routes(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return the routes ``[T, L, width]`` of each micro-batch of the last run in mode ``record``.

        A collective over tensor and context parallelism. Layers of other pipeline stages have missing routes.
        """
        missing = torch.full((self._shape.num_layers, self._shape.width), self._missing, dtype=self._shape.dtype)
        return self._join_layers(batches, self._recorded, missing)

    def live_differences(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return the tokens with a route, and those whose live experts differ, of the last run with ``by_token``.

        A collective over tensor and context parallelism. Booleans ``[T, L, 2]`` of each micro-batch, in host memory;
        False in layers of other pipeline stages.
        """
        missing = torch.zeros(self._shape.num_layers, 2, dtype=torch.bool)
        return self._join_layers(batches, self._differences, missing)

    def _join_layers(
        self, batches: Sequence[MicroBatch], by_batch: Sequence[dict[int, Tensor]], missing: Tensor
    ) -> list[Tensor]:
        """Return the values of all layers of each micro-batch; those without values have the rows of ``missing``."""
        result = []
        for batch, by_layer in zip(batches, by_batch, strict=True):
            values = missing.expand(len(batch.tokens), *missing.shape).clone()
            if by_layer:
                layers = sorted(by_layer)
                values[:, layers] = self._gather(torch.stack([by_layer[i] for i in layers], 1), batch).cpu()
            result.append(values)
        return result

    def _gather(self, routes: Tensor, batch: MicroBatch) -> Tensor:
        # As bytes, because NCCL has no int16.
        raw = routes.view(torch.uint8)
        if self._tp_group is not None:
            raw = torch.cat(all_gather(raw, self._tp_group))
        if self._cp_group is not None:
            raw = ContextShard.of(batch.cu_seqlens, self._cp_group).to(raw.device).gather(raw)
        return raw.view(routes.dtype)

    def metrics(self, *, is_first: bool) -> dict[str, Metric]:
        """Return the counts of the last run on this rank, as shares of tokens times layers, and by layer.

        Missing routes are counted for the whole row on every rank, so only the first one of tensor and context
        parallelism (``is_first``) reports them.
        """
        rows = self._counts.rows.tolist()
        known, live, used = (sum(column) for column in zip(*rows, strict=True))
        difference, num_weights = self._counts.weights.tolist()
        by_layer = {f"{BY_LAYER}{layer}": Metric(rows[layer][1], rows[layer][0]) for layer in self.layers}
        return by_layer | {
            "router_disagreement": Metric(used, known),
            "router_live_disagreement": Metric(live, known),
            "router_missing": Metric(self._num_missing * is_first, self._num_rows * is_first),
            **({"router_weight_diff": Metric(difference, num_weights)} if self._shape.weights else {}),
        }


BY_LAYER = "router_live_disagreement/"


def with_worst_layer(metrics: Mapping[str, float]) -> dict[str, float]:
    """Replace the metrics of single layers by the largest one: a wrong layer hardly shows in the mean of many."""
    by_layer = [value for name, value in metrics.items() if name.startswith(BY_LAYER)]
    totals = {name: value for name, value in metrics.items() if not name.startswith(BY_LAYER)}
    return totals | ({"router_live_disagreement_max": max(by_layer)} if by_layer else {})


_INCOMPATIBLE_FIELDS = {
    "moe_router_fusion": (True, "the fused kernel chooses the experts by itself"),
    "moe_router_load_balancing_type": (
        {"sinkhorn", "quantile_balancing"},
        "this balancing chooses the experts by itself",
    ),
    "moe_router_force_load_balancing": (True, "it replaces the logits by random ones"),
    "moe_router_force_biased": (None, "it adds a random bias to the logits"),
    "moe_expert_capacity_factor": (None, "it drops tokens from the experts that were replayed"),
    "overlap_moe_expert_parallel_comm": (True, "it runs forward and backward passes of micro-batches interleaved"),
    "enable_cuda_graph": (True, "a captured router does not read the replayed experts"),
    "external_cuda_graph": (True, "a captured router does not read the replayed experts"),
    "cuda_graph_impl": ({"local", "transformer_engine"}, "a captured router does not read the replayed experts"),
}
"""TransformerConfig fields with the values under which Megatron ignores or undoes replay (None means any value)."""


def check_router_replay_support(overrides: Mapping[str, object]) -> None:
    """Check that no TransformerConfig field that the user sets makes Megatron ignore replay; the defaults do not."""
    for name, (values, reason) in _INCOMPATIBLE_FIELDS.items():
        value = overrides.get(name)
        # A list names auxiliary losses. Megatron balances by the choice of experts only if the value itself is that
        # name.
        if value is None or isinstance(value, list):
            continue
        if values is None or value in (values if isinstance(values, set) else {values}):
            raise ConfigError(
                f"model.transformer.{name} = {value!r} cannot be combined with train.router_replay: {reason}; remove "
                "one of them"
            )
