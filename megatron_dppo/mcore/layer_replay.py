"""One router under replay: which experts a token visits, and what their outputs are multiplied by.

Megatron's router asks a ``RouterReplay`` for the experts, before it makes weights of their logits; a hook on the router
sees those weights as they leave it, after every normalisation and scaling, and puts the given ones in their place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor

from megatron_dppo.types import MISSING_EXPERT, RoutingShape, experts_of, weights_of, with_weights

_Topk = tuple[Tensor, Tensor]
_Routed = tuple[Tensor, Tensor]
"""the probabilities and the map ``[local tokens, experts]`` that a router returns"""


class Counts:
    """What the routers of a rank count during one run of the schedule."""

    def __init__(self, device: torch.device) -> None:
        self.rows = torch.zeros(3, dtype=torch.int64, device=device)
        """rows given, where the live choice differs, where the used one does"""
        self.weights = torch.zeros(2, dtype=torch.float64, device=device)
        """the sum of ``|given - live|`` over all given weights, and how many these are"""

    def clear(self) -> None:
        """Start again."""
        self.rows.zero_()
        self.weights.zero_()


class LayerReplay(RouterReplay):
    """Megatron's object for one router, which can also fall back to the live choice row by row, and counts.

    Args:
        layer: number in the whole model, from 0.
        shape: of the routes.
        remembers: whether the backward pass may run this router again.
        counts: shared by all routers.
    """

    def __init__(self, layer: int, shape: RoutingShape, *, remembers: bool, counts: Counts) -> None:
        super().__init__()
        RouterReplay.global_router_replay_instances.remove(self)  # ours are found through the model
        self.layer = layer
        self.given: Tensor | None = None
        """``[local tokens, k]``, the experts of the current micro-batch"""
        self.num_recomputed = 0
        self._shape, self._dtype, self._missing = shape, shape.dtype, MISSING_EXPERT[shape.dtype]
        self._remembers, self._counts = remembers, counts
        self._given_weights: Tensor | None = None
        self._used: Tensor | None = None
        self._live_weights: Tensor | None = None
        self._weights_backward: list[Tensor] = []

    def give(self, routes: Tensor) -> None:
        """The rows ``[local tokens, k]`` of the current micro-batch, with weights ``[local tokens, width]``."""
        self.given = experts_of(routes, self._shape)
        self._given_weights = weights_of(routes, self._shape) if self._shape.weights else None

    def recorded_routes(self) -> Tensor:
        """The rows of the micro-batch that ran last, which was told to record."""
        experts = self.get_recorded_indices()
        assert experts is not None
        experts = experts.to(self._dtype)
        return experts if self._live_weights is None else with_weights(experts, self._live_weights)

    def clear(self) -> None:
        """Forget what was given, recorded and remembered, and leave the router alone from here on."""
        self.given = self._given_weights = self._used = self._live_weights = None
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
        """What Megatron's router asks for: the scores and indices ``[local tokens, k]`` of the experts to use."""
        assert default_compute_topk is not None
        action, given = self.router_replay_action, self.given
        if given is not None and len(given) != len(scores) and action != RouterReplayAction.REPLAY_BACKWARD:
            raise ValueError(f"router of layer {self.layer}: {len(scores)} tokens, but {len(given)} rows of experts")
        live = None
        if action == RouterReplayAction.REPLAY_FORWARD and given is not None:
            _, live = default_compute_topk(scores.detach(), topk, num_groups=num_groups, group_topk=group_topk)
            self.target_topk_idx = torch.where(given == self._missing, live, given.long())
        elif action == RouterReplayAction.REPLAY_BACKWARD:
            if not self.replay_backward_list:
                raise RuntimeError(
                    f"router of layer {self.layer} ran again in a backward pass that was not expected to"
                )
            self.replay_backward_list[0] = self.replay_backward_list[0].long()
            self.num_recomputed += 1
        probs, used = super().get_replay_topk(scores, topk, num_groups, group_topk, default_compute_topk)
        self._used = used
        if action in (RouterReplayAction.REPLAY_FORWARD, RouterReplayAction.RECORD):
            if self._remembers:
                self.replay_backward_list.append(used.to(self._dtype))
            if given is not None:
                self._count(given, used if live is None else live, used)
        return probs, used

    def _count(self, given: Tensor, live: Tensor, used: Tensor) -> None:
        known = given[:, 0] != self._missing
        given = given.long()
        differs = [known & ~_same_sets(given, chosen) for chosen in (live, used)]
        self._counts.rows += torch.stack([known, *differs]).sum(1)

    def weigh(self, _router: Any, _inputs: Any, output: _Routed) -> _Routed | None:
        """Forward hook of the router: puts the given weights into its probabilities ``[local tokens, experts]``, and
        counts how far the live ones are from them."""
        live, used, action = output[0], self._used, self.router_replay_action
        if used is None or action is None:
            return None
        if action == RouterReplayAction.REPLAY_BACKWARD:
            weights = self._weights_backward.pop(0) if self._weights_backward else None
            return None if weights is None else (_replaced(live, used, weights), output[1])
        if self.given is None or self._given_weights is None:
            self._live_weights = live.detach().gather(1, used).float()
            return None
        self._count_weights(live.detach(), self.given, self._given_weights)
        if action == RouterReplayAction.RECORD:
            return None
        if self._remembers:
            self._weights_backward.append(self._given_weights)
        return _replaced(live, used, self._given_weights), output[1]

    def _count_weights(self, live: Tensor, given: Tensor, weights: Tensor) -> None:
        known = given != self._missing
        found = live.gather(1, torch.where(known, given, 0).long())
        apart = torch.where(known, found.double() - weights, 0.0).abs()
        self._counts.weights += torch.stack([apart.sum(), known.sum()])


class _StraightThrough(torch.autograd.Function):
    """Other values with the gradient of the live ones, which no sum of the two gives to the bit."""

    @staticmethod
    def forward(_ctx: Any, _live: Tensor, values: Tensor) -> Tensor:
        return values

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def _replaced(live: Tensor, used: Tensor, weights: Tensor) -> Tensor:
    """The probabilities ``live [N, experts]`` with ``weights [N, k]`` at the experts ``used [N, k]``, where they are
    not missing."""
    own = live.detach()
    values = torch.where(weights.isnan(), own.gather(1, used), weights.to(live.dtype))
    result: Tensor = _StraightThrough.apply(live, own.scatter(1, used, values))
    return result


def _same_sets(left: Tensor, right: Tensor) -> Tensor:
    """``[N]`` bool: whether two ``[N, k]`` of distinct numbers have the same ones in each row."""
    return (left[:, :, None] == right[:, None, :]).any(-1).all(-1)
