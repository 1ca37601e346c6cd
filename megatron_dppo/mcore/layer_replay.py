"""Replay of one router: the experts of each token, and optionally their combine weights.

Megatron's router calls ``RouterReplay.get_replay_topk`` for the experts, before it computes combine weights from their
logits. A forward hook on the router sees those weights after all normalization and scaling, and replaces them.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor

from megatron_dppo.types import MISSING_EXPERT, RoutingShape, select_experts, select_weights, with_weights

_Topk = tuple[Tensor, Tensor]
"""Scores and indices of a router's experts, both ``[num_local_tokens, top_k]``."""
_Routed = tuple[Tensor, Tensor]
"""Probabilities and routing map of a router, both ``[num_local_tokens, num_experts]``."""


class ReplayCounts:
    """Counts of all routers of a rank in one run of the schedule; on the device, so that counting does not wait."""

    def __init__(self, num_layers: int, device: torch.device) -> None:
        self.rows = torch.zeros(num_layers, 3, dtype=torch.int64, device=device)
        """Of each layer: tokens with a route; tokens whose live choice differs from it; tokens whose used choice
        differs. Shape [L, 3]."""
        self.weights = torch.zeros(2, dtype=torch.float64, device=device)
        """Sum of ``|replayed - live|`` over all weights of the routes, and the number of these weights."""
        self.keeps_tokens = False
        """True keeps the counts of each token, too, in ``LayerReplay.differences``."""

    def clear(self) -> None:
        """Set all counts to 0."""
        self.rows.zero_()
        self.weights.zero_()


class LayerReplay(RouterReplay):
    """Megatron's ``RouterReplay`` for one router, with a fallback to the live choice for tokens without a route.

    ``layer`` is the index in the whole model, from 0. ``is_recomputed``: the backward pass may run this router again.

    Attributes:
        experts: Experts ``[num_local_tokens, top_k]`` of the current micro-batch's routes. None without routes.
        num_recomputed: Backward recomputations during the current run of the schedule.
        differences: Tokens of the current micro-batch with a route, and those whose live choice differs from it, as
            booleans ``[num_local_tokens, 2]``. None if they are not kept.
    """

    def __init__(self, layer: int, shape: RoutingShape, *, is_recomputed: bool, counts: ReplayCounts) -> None:
        super().__init__()
        # RouterReplay.__init__ adds every instance to a global list that Megatron sets as a whole.
        RouterReplay.global_router_replay_instances.remove(self)
        self.layer = layer
        self.experts: Tensor | None = None
        self.num_recomputed = 0
        self.differences: Tensor | None = None
        self._shape = shape
        self._missing = MISSING_EXPERT[shape.dtype]
        self._is_recomputed = is_recomputed
        self._counts = counts
        self._replayed_weights: Tensor | None = None
        self._used: Tensor | None = None
        self._live_weights: Tensor | None = None
        self._weights_backward: list[Tensor] = []

    def set_routes(self, routes: Tensor) -> None:
        """Set the routes ``[num_local_tokens, width]`` of the micro-batch that runs next."""
        self.experts = select_experts(routes, self._shape)
        self._replayed_weights = select_weights(routes, self._shape) if self._shape.weights else None

    def recorded_routes(self) -> Tensor:
        """Return the routes of the micro-batch that ran last, in mode ``record``."""
        experts = self.get_recorded_indices()
        assert experts is not None
        experts = experts.to(self._shape.dtype)
        return experts if self._live_weights is None else with_weights(experts, self._live_weights)

    def clear(self) -> None:
        """Drop all routes and stop replaying."""
        self.experts = self._replayed_weights = self._used = self._live_weights = self.differences = None
        self._weights_backward = []
        self.clear_indices()
        self.clear_router_replay_action()

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., _Topk] | None = None,
    ) -> _Topk:
        """Return scores and indices ``[num_local_tokens, top_k]`` of the experts to use, for Megatron's router."""
        assert default_compute_topk is not None
        action = self.router_replay_action
        routed = self.experts
        # In the backward pass ``experts`` belongs to a later micro-batch already.
        if routed is not None and len(routed) != len(scores) and action != RouterReplayAction.REPLAY_BACKWARD:
            raise ValueError(
                f"Expected {len(scores)} rows of experts for the router of layer {self.layer}, got {len(routed)}."
            )

        # Choose the experts: the routes', the live router's where a route is missing, or the recorded ones in backward.
        live = None
        if action == RouterReplayAction.REPLAY_FORWARD and routed is not None:
            _, live = default_compute_topk(scores.detach(), topk, num_groups=num_groups, group_topk=group_topk)
            self.target_topk_idx = torch.where(routed == self._missing, live, routed.long())
        elif action == RouterReplayAction.REPLAY_BACKWARD:
            if not self.replay_backward_list:
                raise RuntimeError(f"Router of layer {self.layer} ran in a backward pass without recorded experts.")
            # Megatron pops this entry and indexes with it; it waits in the narrow dtype of the routes.
            self.replay_backward_list[0] = self.replay_backward_list[0].long()
            self.num_recomputed += 1
        # Megatron's method reads ``target_topk_idx``, or the backward list, as ``action`` says.
        probs, used = super().get_replay_topk(scores, topk, num_groups, group_topk, default_compute_topk)
        self._used = used

        # Remember the choice for recomputation, and count differences.
        if action in (RouterReplayAction.REPLAY_FORWARD, RouterReplayAction.RECORD):
            if self._is_recomputed:
                self.replay_backward_list.append(used.to(self._shape.dtype))
            if routed is not None:
                self._count(routed, used if live is None else live, used)
        return probs, used

    def _count(self, routed: Tensor, live: Tensor, used: Tensor) -> None:
        known = routed[:, 0] != self._missing
        routed = routed.long()
        differs = [known & ~_equal_sets(routed, chosen) for chosen in (live, used)]
        self._counts.rows[self.layer] += torch.stack([known, *differs]).sum(1)
        if self._counts.keeps_tokens:
            self.differences = torch.stack([known, differs[0]], 1)

    def replay_weights(self, _router: object, _inputs: object, output: _Routed) -> _Routed | None:
        """Replace the router's probabilities by the weights of the routes, and count differences; a forward hook."""
        live = output[0]
        used = self._used
        action = self.router_replay_action
        if used is None or action is None:
            return None
        if action == RouterReplayAction.REPLAY_BACKWARD:
            # First in, first out: the backward passes of a chunk follow in the order of its forward passes.
            weights = self._weights_backward.pop(0) if self._weights_backward else None
            return None if weights is None else (_replace_weights(live, used, weights), output[1])
        if self.experts is None or self._replayed_weights is None:
            self._live_weights = live.detach().gather(1, used).float()
            return None
        self._count_weights(live.detach(), self.experts, self._replayed_weights)
        if action == RouterReplayAction.RECORD:
            return None
        if self._is_recomputed:
            self._weights_backward.append(self._replayed_weights)
        return _replace_weights(live, used, self._replayed_weights), output[1]

    def _count_weights(self, live: Tensor, experts: Tensor, weights: Tensor) -> None:
        known = experts != self._missing
        live_weights = live.gather(1, torch.where(known, experts, 0).long())
        differences = torch.where(known, live_weights.double() - weights, 0.0).abs()
        self._counts.weights += torch.stack([differences.sum(), known.sum()])


class _StraightThrough(torch.autograd.Function):
    """Replayed values with the gradient of the live ones.

    The usual ``live + (values - live).detach()`` would round: its value is not bitwise ``values``.
    """

    @staticmethod
    def forward(_ctx: Any, _live: Tensor, values: Tensor) -> Tensor:
        return values

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def _replace_weights(live: Tensor, used: Tensor, weights: Tensor) -> Tensor:
    """Return the probabilities ``live [N, num_experts]`` with other weights of the experts that are used.

    ``used`` and ``weights`` are ``[N, top_k]``. NaN weights are missing and keep the live value.
    """
    detached = live.detach()
    values = torch.where(weights.isnan(), detached.gather(1, used), weights.to(live.dtype))
    result: Tensor = _StraightThrough.apply(live, detached.scatter(1, used, values))
    return result


def _equal_sets(left: Tensor, right: Tensor) -> Tensor:
    """Return True for each row in which two tensors ``[N, k]`` of distinct numbers hold the same set, ``[N]``."""
    return (left[:, :, None] == right[:, None, :]).any(-1).all(-1)
