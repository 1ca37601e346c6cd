"""Sharded state of Megatron's distributed optimizer, written and read by the rank that holds it, for any layout.

A rank of the distributed optimizer holds a flat range of each parameter. Megatron Core has two checkpoint formats for
it: ``fully_reshardable`` gathers whole gradient buffers on every rank, and ``dp_reshardable`` cannot be loaded with
another tensor, pipeline or expert parallelism. Here a flat range is split into boxes of the parameter (part of a row,
whole rows, part of a row), each a ``ShardedTensor``. On disk this is the ``fully_reshardable`` format, key by key, with
other chunk boundaries: each reads what the other wrote.

Reason: no format of Megatron's is both parallel and free of the layout since it dropped ``flattened_range`` (0.14).
Affected: Megatron Core 0.16.1 to 0.19.2.
Delete when: Megatron has such a format.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from megatron_dppo.mcore.offload import is_offloaded

_NOT_SHARDED = "step"
"""Megatron keeps the number of updates in the parameter groups."""


class Box(NamedTuple):
    """Axis-aligned block of a tensor, by offset and size in each dimension."""

    offset: tuple[int, ...]
    size: tuple[int, ...]


def split_range(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes that cover elements ``start`` to ``stop`` of a row-major tensor, in order.

    Example:
        >>> [tuple(box) for box in split_range((4, 10), 7, 33)]
        [((0, 7), (1, 3)), ((1, 0), (2, 10)), ((3, 0), (1, 3))]
    """
    if start == stop:
        return
    if len(shape) < 2:
        yield Box((start,) * len(shape), (stop - start,) * len(shape))
        return
    row = prod(shape[1:])
    # Rows ``first`` to ``last - 1`` are covered completely, parts of the rows before and after them.
    first, last = -(-start // row), stop // row
    # The whole range is in one row.
    if first > last:
        yield from _within(shape, last, start, stop)
        return
    yield from _within(shape, first - 1, start, first * row)
    if first < last:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    yield from _within(shape, last, last * row, stop)


def _within(shape: tuple[int, ...], index: int, start: int, stop: int) -> Iterator[Box]:
    base = index * prod(shape[1:])
    for box in split_range(shape[1:], start - base, stop - base):
        yield Box((index, *box.offset), (1, *box.size))


def use_box_sharding(optimizer: DistributedOptimizer) -> None:
    """Make the optimizer save and load its ``fully_reshardable`` state box by box."""
    optimizer.sharded_param_state_fully_reshardable = partial(_sharded_state, optimizer)
    optimizer.load_parameter_state_from_fully_reshardable = partial(_load_state, optimizer)


def correct_group_order(optimizer: DistributedOptimizer) -> None:
    """Correct the index of each parameter in its group.

    Reason: in a bf16 or fp16 model Megatron moves the parameters in fp32 to the front of their group, after it has
        numbered them. Each parameter then saves and loads the state of another one.
    Affected: Megatron Core 0.16.1 to 0.19.2.
    Delete when: ``_build_model_and_main_param_groups`` keeps the order of a group.
    """
    groups = zip(optimizer.model_fp32_groups, optimizer.model_float16_groups, strict=True)
    for group, (fp32, half) in enumerate(groups):
        for order, parameter in enumerate((*fp32, *half)):
            optimizer.model_param_group_index_map[parameter] = (group, order)


def _ranges(optimizer: DistributedOptimizer) -> Iterator[tuple[Tensor, int, int]]:
    """Yield each parameter of which this rank holds a range, with the start and end of the range."""
    for buffer in optimizer.gbuf_ranges:
        for buckets in buffer.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    yield parameter, ranges["param"].start, ranges["param"].end


@torch.no_grad()
def _sharded_state(
    optimizer: DistributedOptimizer,
    model_state: dict[str, Any],
    is_loading: bool = False,
    metadata: dict[str, Any] | None = None,
) -> dict[int, dict[str, list[ShardedTensor]]]:
    """Return the boxes, views of the state, for each parameter (by its index in ``_ranges``) and kind of state."""
    entries, _ = extract_sharded_tensors_and_factories(model_state)
    # Tensors hash by identity, so a parameter finds its entry.
    shards = {entry.data: entry for entry in nested_values(entries)}
    state: dict[int, dict[str, list[ShardedTensor]]] = {}
    for index, (parameter, start, stop) in enumerate(_ranges(optimizer)):
        tensors = optimizer._get_main_param_and_optimizer_states(parameter)
        state[index] = {
            name: list(_sharded_boxes(shards[parameter], f"optimizer.state.{name}", values, start, stop, optimizer))
            for name, values in tensors.items()
            if name != _NOT_SHARDED
        }
    return state


def _sharded_boxes(
    entry: ShardedTensor | ShardedTensorFactory,
    prefix: str,
    values: Tensor,
    start: int,
    stop: int,
    optimizer: DistributedOptimizer,
) -> Iterator[ShardedTensor]:
    """Yield ``values``, elements ``start`` to ``stop`` of the parameter of ``entry``, as boxes."""
    for begin, sharded in _parts(entry):
        first, last = max(start, begin), min(stop, begin + prod(sharded.local_shape))
        if first >= last:
            continue
        at = first - start
        for box in split_range(sharded.local_shape, first - begin, last - begin):
            data = values[at : at + prod(box.size)].view((1,) * sharded.prepend_axis_num + box.size)
            at += data.numel()
            offset = (0,) * sharded.prepend_axis_num + box.offset
            yield replace(
                sharded,
                key=f"{prefix}.{sharded.key}",
                data=data,
                dtype=data.dtype,
                local_shape=tuple(data.shape),
                global_offset=tuple(a + b for a, b in zip(sharded.global_offset, offset, strict=True)),
                axis_fragmentations=None,  # boxes form no regular grid
                prepend_axis_num=0,
                # Ranks of one data-parallel group hold different elements, each of them once.
                replica_id=(*sharded.replica_id[:2], optimizer.distributed_optimizer_instance_id),
            )


def _parts(entry: ShardedTensor | ShardedTensorFactory) -> Iterator[tuple[int, ShardedTensor]]:
    """Yield a parameter's tensors in a checkpoint (gate and up for SwiGLU), each with its first element's index."""
    if isinstance(entry, ShardedTensor):
        yield 0, entry
        return
    for part in nested_values(entry.build()):
        if not part.data.is_contiguous() or _storage(part.data) != _storage(entry.data):
            raise TypeError(
                f"Expected {part.key} to be a view of whole rows of its parameter, got another arrangement."
            )
        yield part.data.storage_offset() - entry.data.storage_offset(), part


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@torch.no_grad()
def _load_state(optimizer: DistributedOptimizer, state: dict[int, dict[str, list[Tensor]]]) -> None:
    """Copy loaded boxes into the state from which ``_sharded_state`` took them."""
    for index, (parameter, _, _) in enumerate(_ranges(optimizer)):
        tensors = {name: torch.cat([box.flatten() for box in boxes]) for name, boxes in state[index].items()}
        if is_offloaded(optimizer):
            # In place: the optimizers of host and GPU would not see tensors that Megatron replaces.
            state_tensors = optimizer._get_main_param_and_optimizer_states(parameter)
            for name, values in tensors.items():
                state_tensors[name].copy_(values)
        else:
            optimizer._set_main_param_and_optimizer_states(parameter, tensors)
