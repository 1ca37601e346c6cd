"""Routed experts of a mixture-of-experts model: compact integers and checks.

Routes are ``[N, L, k]``: for each of N input tokens and L layers (dense ones included) the k experts that its router
chose. A row, the k numbers of one token and layer, is either k different experts or wholly missing. A router's choice
belongs to an *input* token, so the routes of a sequence of S tokens have T = S - 1 rows: the last token is never read.
Rows with combine weights (``types.router_weights``) are wider; experts stand first in them.
"""

from dataclasses import replace
from itertools import combinations

import torch
from torch import Tensor

from megatron_dppo_engines.routes import MISSING_EXPERT, RoutingShape, select_experts, select_weights

_SLACK = 0.01
"""Tolerance of the sum of a row's weights. Eight weights in bf16 are at most 0.004 off."""


def missing_rows(count: int, shape: RoutingShape) -> Tensor:
    """Return routes ``[count, L, k]`` of unknown experts; with weights ``[count, L, width]``."""
    return torch.full((count, shape.num_layers, shape.width), MISSING_EXPERT[shape.dtype], dtype=shape.dtype)


def is_missing(routes: Tensor) -> Tensor:
    """Return a mask ``[N, L]``: True where the experts of that token and layer are unknown."""
    return routes[..., 0] == MISSING_EXPERT[routes.dtype]


def compact_routes(values: Tensor, shape: RoutingShape, *, tokens: int, request: str) -> Tensor:
    """Return an engine's routes as ``[tokens, L, k]`` of the smallest dtype, with dense layers marked missing.

    The values are ``[tokens, L, k]``, or without the dense layers; -1 = missing. Engines write anything for dense
    layers, so what stands there is not looked at. Only shape and range are checked, else ``ValueError``;
    ``check_routes`` checks the contents.
    """
    if values.dtype != shape.dtype:
        values = _narrowed(values, shape, request)
    # An engine reports all layers, or only those with routers. Both become all layers.
    routers = [layer for layer in range(shape.num_layers) if layer not in shape.dense_layers]
    if shape.dense_layers and values.dim() == 3:
        if values.shape[1] == shape.num_layers:
            values = values[:, routers]
        if values.shape[1] == len(routers):
            spread = missing_rows(values.shape[0], replace(shape, topk=values.shape[2]))
            spread[:, routers] = values
            values = spread
    check_form(values, shape, tokens, request)
    return values


def _narrowed(values: Tensor, shape: RoutingShape, request: str) -> Tensor:
    """Return wide integers in the dtype of the routes; a value that would wrap around is an error."""
    if values.dtype.is_floating_point or values.dtype == torch.bool:
        raise ValueError(f"{request}: routed experts of type {values.dtype}, expected integers")
    lowest, highest = (int(edge) for edge in values.aminmax()) if values.numel() else (0, 0)
    if lowest >= 0 and highest < shape.num_experts:  # the usual case
        return values.to(shape.dtype)
    values = values.long()
    outside = (values < -1) | (values >= shape.num_experts)
    if shape.dense_layers and values.dim() == 3 and values.shape[1] == shape.num_layers:
        outside[:, sorted(shape.dense_layers)] = False
    if bool(outside.any()):
        raise ValueError(_at(values, outside, shape, request, "an expert that does not exist"))
    missing = MISSING_EXPERT[shape.dtype]
    return torch.where(outside | (values == -1), missing, values).to(shape.dtype)


def check_routes(routes: Tensor, shape: RoutingShape, *, tokens: int, request: str) -> None:
    """Check that routes ``[tokens, L, k]``, or with weights ``[tokens, L, width]``, can be replayed on a model.

    Raises:
        ValueError: Another dtype, number of rows, layers or experts a token; an expert that does not exist; an expert
            that stands twice in a row; a row that is missing in part; with the place and the value. Weights that
            cannot be those of a router (``_check_weights``).
    """
    check_form(routes, shape, tokens, request)
    experts = select_experts(routes, shape)
    if not _rows_are_valid(experts, shape):
        raise ValueError(_first_problem(experts, shape, request))
    for layer in sorted(shape.dense_layers):
        if not bool((absent := is_missing(experts[:, [layer]])).all()):
            raise ValueError(_at(experts[:, [layer]], ~absent[..., None], shape, request, "dense layer", layer))
    if shape.weights:
        _check_weights(routes, shape, request)


def _check_weights(routes: Tensor, shape: RoutingShape, request: str) -> None:
    """Check that the weights of routes ``[N, L, width]`` with valid experts can come from a router.

    Raises:
        ValueError: Weights beside a missing expert, a missing or non-finite one beside an expert, one outside of 0 to
            1, or a row with another sum than the model's (``norm_topk_prob``: one; else at most one); with the place.
            Both are multiplied by the model's scale.
    """
    absent = routes[..., 0] == MISSING_EXPERT[routes.dtype]
    weights, scale = select_weights(routes, shape), shape.weights_scale
    sums, most = f"at most {scale:g}", scale * (1 + _SLACK)
    # NaN fails every comparison, so it counts as wrong beside an expert.
    good = (weights >= 0) & (weights <= most)
    total = weights.sum(-1)
    adds = total <= most
    if shape.weights_add_to_one:
        adds, sums = adds & (total >= scale * (1 - _SLACK)), f"{scale:g} (norm_topk_prob)"
    right = torch.where(absent, weights.isnan().all(-1), good.all(-1) & adds)
    if bool(right.all()):
        return
    row, layer = (int(i) for i in (~right).nonzero()[0])
    values = [round(value, 6) for value in weights[row, layer].tolist()]
    experts = select_experts(routes, shape)[row, layer].tolist()
    raise ValueError(
        f"{request}: router weights, row {row}, layer {layer}: {values} of experts {experts}; expected "
        f"{shape.topk} numbers of 0 to {scale:g} that add up to {sums}, or none (NaN) where the experts are missing"
    )


def check_form(routes: Tensor, shape: RoutingShape, tokens: int, request: str) -> None:
    """Raise ``ValueError`` for another dtype, or other numbers of layers, experts or tokens."""
    if routes.dtype != shape.dtype:
        raise ValueError(f"{request}: routed experts of type {routes.dtype}, expected {shape.dtype}")
    if routes.dim() != 3 or tuple(routes.shape[1:]) != (shape.num_layers, shape.width):
        row = f"{shape.topk} experts a token" + f" and their weights: {shape.width}" * shape.weights
        raise ValueError(
            f"{request}: routed experts of shape {tuple(routes.shape)}, expected [{tokens}, {shape.num_layers} layers, "
            f"{row}]; is the engine serving another model?"
        )
    if routes.shape[0] != tokens:
        raise ValueError(
            f"{request}: routed experts of {routes.shape[0]} tokens for {tokens} input tokens (prompt and response "
            "without the last token); every token that was read has one row"
        )


def _rows_are_valid(routes: Tensor, shape: RoutingShape) -> bool:
    """Return True if every row is missing as a whole or has k different experts.

    Comparing columns is faster than ``_first_problem``, which locates a problem.
    """
    if not routes.numel():
        return True
    columns = routes.reshape(-1, shape.topk).t().contiguous()
    twice = torch.zeros(columns.shape[1], dtype=torch.bool, device=routes.device)
    for left, right in combinations(columns, 2):
        twice |= left == right
    lowest, highest = (int(edge) for edge in routes.aminmax())
    if lowest >= 0 and highest < shape.num_experts:  # the usual case: nothing is missing
        return not bool(twice.any())
    missing = (columns == MISSING_EXPERT[routes.dtype]).all(0)
    inside = (columns >= 0).all(0) & (columns < shape.num_experts).all(0)
    return bool((missing | (inside & ~twice)).all())


def _first_problem(routes: Tensor, shape: RoutingShape, request: str) -> str:
    absent = routes == MISSING_EXPERT[routes.dtype]
    outside = ~absent & ((routes < 0) | (routes >= shape.num_experts))
    if bool(outside.any()):
        return _at(routes, outside, shape, request, "an expert that does not exist")
    holes = absent & ~absent.all(-1, keepdim=True)
    if bool(holes.any()):
        return _at(routes, holes, shape, request, "a hole in a row")
    # Each expert equals itself once.
    twice = ((routes[..., :, None] == routes[..., None, :]).sum(-1) > 1) & ~absent
    return _at(routes, twice, shape, request, "an expert that stands twice in its row")


def _at(values: Tensor, wrong: Tensor, shape: RoutingShape, request: str, what: str, first_layer: int = 0) -> str:
    row, layer, slot = (int(i) for i in wrong.nonzero()[0])
    return (
        f"{request}: routed experts, row {row}, layer {layer + first_layer}: {what}: {int(values[row, layer, slot])} "
        f"in {values[row, layer].tolist()}; expected {shape.topk} different experts of 0 to {shape.num_experts - 1}, "
        f"or the whole row missing ({MISSING_EXPERT[shape.dtype]})"
    )


def count_differences(left: Tensor, right: Tensor) -> Tensor:
    """Count the rows of each layer in which two routes ``[N, L, k]`` of the same tokens have different experts.

    Returns int64 ``[L, 3, 2]``: rows that both know and how many of them differ, for the rows as they stand, for
    ``left`` with each row moved to the token before, and to the token after.
    """
    shifts = ((left, right), (left[1:], right[:-1]), (left[:-1], right[1:]))
    counts = []
    for one, other in shifts:
        known = ~is_missing(one) & ~is_missing(other)
        # Sorted, because the order within a row has no meaning.
        differ = (one.sort(-1).values != other.sort(-1).values).any(-1)
        counts.append(torch.stack([known.sum(0), (known & differ).sum(0)], dim=-1))
    return torch.stack(counts, dim=1)
