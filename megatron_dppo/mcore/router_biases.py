"""The biases by which routers choose experts: buffers in fp32, and weights of the model all the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor
from torch.nn import Module

_BIAS = "expert_bias"


def router_biases(model: Module) -> Iterator[tuple[str, Tensor]]:
    """The biases by which routers choose, by name: buffers in fp32, weights of the model all the same."""
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name.endswith(f".router.{_BIAS}"))


@contextmanager
def router_biases_kept(models: Sequence[Module]) -> Iterator[None]:
    """Around a conversion of models to another dtype: the same tensors are the biases afterwards, not rounded.

    So are the counts of tokens that they may follow: in bf16 a count would end at 256.
    """
    routers = [m for model in models for m in model.modules() if isinstance(getattr(m, _BIAS, None), Tensor)]
    kept = [(router, name, getattr(router, name)) for router in routers for name in (_BIAS, "local_tokens_per_expert")]
    yield
    for router, name, buffer in kept:
        setattr(router, name, buffer)
