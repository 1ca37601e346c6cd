"""Collectives that gloo lacks or runs slowly, and filters for Megatron's warnings."""

import functools
import logging
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def support_uneven_splits() -> None:
    """Support all-gather and reduce-scatter with uneven splits on gloo."""
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
        # A clone, because the all-reduce writes in place.
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return torch.split(x, [int(n) for n in input_split_sizes], 0)[group.rank()].clone()

    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = gather, reduce_scatter


def skip_single_rank_collectives() -> None:
    """Skip the distributed optimizer's collectives in groups of one rank."""
    from megatron.core.distributed import param_and_grad_buffer

    def unless_single_rank(collective: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(collective)
        def call(output: Any, source: Any, *args: Any, group: Any = None, **kwargs: Any) -> Any:
            # The only shard of a buffer is the buffer itself, so the result is in place already.
            if group is not None and group.size() == 1 and output.data_ptr() == source.data_ptr():
                return None
            return collective(output, source, *args, group=group, **kwargs)

        return call

    for name in ("dist_all_gather_func", "dist_reduce_scatter_func"):
        setattr(param_and_grad_buffer, name, unless_single_rank(getattr(param_and_grad_buffer, name)))


_IGNORED_WARNINGS = (
    # Optional packages that are not installed (``doctor`` lists them), and Megatron's own deprecated settings.
    ("", UserWarning, r"megatron\."),
    ("", DeprecationWarning, r"megatron\."),
    ("", FutureWarning, r"megatron\."),
    # Megatron's calls of collectives that torch renamed.
    (r".*torch\.distributed\.\w+. is deprecated", FutureWarning, r"torch\.distributed\."),
    # torch's checkpoint planners on their own use of ShardedTensor.
    ("", FutureWarning, r"torch\.distributed\.checkpoint\."),
)
NOISY_LOGS = {
    # Megatron Core 0.19.2 on its own classes.
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",
    "megatron.core.transformer.transformer_layer": "Rewrapping ModuleSpec",
    "megatron.core.distributed.distributed_data_parallel": "DistributedDataParallel: full_param_layout not provided",
    # Megatron Core 0.17 and newer imports this module also if nothing is compiled for CUDA.
    "torch.utils.cpp_extension": "No CUDA runtime is found",
}
"""Beginning of the ignored message, by logger."""


def silence_megatron() -> None:
    """Filter Megatron's log records, and its Python warnings unless the user sets ``-W`` or PYTHONWARNINGS."""
    for name, start in NOISY_LOGS.items():
        logging.getLogger(name).addFilter(functools.partial(_is_other, start))
    if sys.warnoptions:
        return
    for message, category, module in _IGNORED_WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=category, module=module)


def _is_other(start: str, record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(start)
