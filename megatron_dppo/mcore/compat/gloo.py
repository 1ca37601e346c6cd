"""Collectives that gloo lacks, and Megatron's warnings that nobody can act on."""

from __future__ import annotations

import functools
import logging
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist


def support_uneven_splits() -> None:
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


def skip_single_rank_collectives() -> None:
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


_NOISE = (
    # Optional packages that are not installed (the doctor tells), and Megatron's own deprecated settings.
    ("", UserWarning, r"megatron\."),
    ("", DeprecationWarning, r"megatron\."),
    ("", FutureWarning, r"megatron\."),
    # Megatron's calls of collectives that torch has renamed.
    (r".*torch\.distributed\.\w+. is deprecated", FutureWarning, r"torch\.distributed\."),
    # torch's planners of checkpoints about their own use of ShardedTensor.
    ("", FutureWarning, r"torch\.distributed\.checkpoint\."),
)


_NOISY_LOGS = {
    # Megatron Core 0.19.2 about its own classes.
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",
    "megatron.core.transformer.transformer_layer": "Rewrapping ModuleSpec",
    "megatron.core.distributed.distributed_data_parallel": "DistributedDataParallel: full_param_layout not provided",
    # Megatron Core 0.17 and newer imports it, also where nothing is compiled for CUDA.
    "torch.utils.cpp_extension": "No CUDA runtime is found",
}
"""Logger -> start of the message."""


def silence_megatron() -> None:
    """Filter log records, and Python's warnings unless the user asks for those by ``-W`` or PYTHONWARNINGS."""
    for name, start in _NOISY_LOGS.items():
        logging.getLogger(name).addFilter(partial(_is_other, start))
    if sys.warnoptions:
        return
    for message, category, module in _NOISE:
        warnings.filterwarnings("ignore", message=message, category=category, module=module)


def _is_other(start: str, record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(start)
