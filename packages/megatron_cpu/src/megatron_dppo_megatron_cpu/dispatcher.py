"""Release of what Megatron's token dispatchers keep of a layer after its forward pass."""

import functools
from collections.abc import Callable
from typing import Any

_ROUTES = (
    *("probs", "local_probs", "token_probs", "dispatched_probs"),
    *("routing_map", "dispatched_routing_map", "local_map"),
    *("reversed_local_input_permutation_mapping", "reversed_mapping_for_combine"),
)
"""Attributes that a forward pass sets anew, with values for each token."""


def release_routes() -> None:
    """Let every dispatcher drop the routes of a layer at the end of its last method.

    The probabilities have a gradient function. Under full recomputation it leads to the layer's detached input and the
    gradient of that input, so each layer would hold both until its next forward pass.
    """
    from megatron.core.transformer.moe import token_dispatcher

    for name in ("MoEAllGatherTokenDispatcher", "MoEAlltoAllTokenDispatcher", "MoEFlexTokenDispatcher"):
        dispatcher = getattr(token_dispatcher, name)
        dispatcher.combine_postprocess = _releasing(dispatcher.combine_postprocess)


def _releasing(combine_postprocess: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(combine_postprocess)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = combine_postprocess(self, *args, **kwargs)
        # The flex dispatcher keeps the routes in its communication manager.
        for holder in (self, getattr(self, "_comm_manager", None)):
            for attribute in _ROUTES:
                if hasattr(holder, attribute):
                    setattr(holder, attribute, None)
        return output

    return call
