"""What gloo lacks of the collectives that Megatron calls, and what it need not do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def uneven_collectives() -> None:
    """A shim: gather and scatter parts of unequal size."""
    from megatron.core.tensor_parallel import mappings

    even_gather, even_reduce_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather(x: Any, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return even_gather(x, group, None, use_global_buffer)
        sizes = [int(n) for n in output_split_sizes]
        padded = x.new_zeros([max(sizes), *x.shape[1:]])
        padded[: x.shape[0]] = x
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:n] for part, n in zip(parts, sizes, strict=True)], 0)

    def reduce_scatter(x: Any, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return even_reduce_scatter(x, group, None, use_global_buffer)
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return torch.split(x, [int(n) for n in input_split_sizes], 0)[group.rank()].clone()

    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = gather, reduce_scatter


def collectives_of_one() -> None:
    """A shim: leave out collectives of a group of one rank."""
    from megatron.core.distributed import param_and_grad_buffer

    def unless_alone(collective: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(collective)
        def call(output: Any, source: Any, *args: Any, group: Any = None, **more: Any) -> Any:
            # The only shard of a buffer is the buffer: what should arrive is there.
            if group is not None and group.size() == 1 and output.data_ptr() == source.data_ptr():
                return None
            return collective(output, source, *args, group=group, **more)

        return call

    for name in ("dist_all_gather_func", "dist_reduce_scatter_func"):
        setattr(param_and_grad_buffer, name, unless_alone(getattr(param_and_grad_buffer, name)))
