"""Checks of the ids, slots and sampling masks that a head is given."""

import torch
from torch import Tensor

from megatron_dppo.head.vocab_topk import set_rows
from megatron_dppo.types import SamplingMask, TokenTargets, check_sampling_mask


def check_ids(
    rows: int, labels: Tensor, ids: Tensor | None, valid: Tensor | None, vocab_size: int, used: Tensor | None
) -> None:
    """Check that labels ``[T]`` and ids ``[T, K]`` fit T and the vocabulary, in the rows ``used`` (None: all).

    A ValueError. On CUDA a value out of range is a device-side assertion, because a check on the host would wait for
    the device.
    """
    if labels.shape != (rows,) or labels.dtype != torch.int64:
        raise ValueError(f"expected int64 labels [T] = ({rows},), got {labels.dtype} {tuple(labels.shape)}")
    if (ids is None) != (valid is None):
        raise ValueError("Expected both ids and ids_valid, or neither. Fix: pass the other one too.")
    _assert_in_vocabulary("label", labels[:, None], None, vocab_size, used)
    if ids is None or valid is None:
        return
    if ids.dim() != 2 or len(ids) != rows or ids.dtype != torch.int64:
        raise ValueError(f"expected int64 ids [T, K] with T = {rows}, got {ids.dtype} {tuple(ids.shape)}")
    if ids.shape[1] > vocab_size:
        raise ValueError(f"K = {ids.shape[1]} ids are more than the vocabulary of {vocab_size} has")
    if valid.shape != ids.shape or valid.dtype != torch.bool:
        raise ValueError(f"expected bool ids_valid {tuple(ids.shape)}, got {valid.dtype} {tuple(valid.shape)}")
    _assert_in_vocabulary("id", ids, valid, vocab_size, used)
    _assert_distinct(ids, valid, used)


def check_slots(targets: TokenTargets, used: Tensor | None) -> None:
    """Check that the label of each token of the loss mask is in exactly one slot of its Top-K set."""
    if targets.rollout_topk_ids is None:
        return
    ids = targets.rollout_topk_ids
    labels = targets.labels
    mask = targets.loss_mask
    if used is not None:
        ids, labels, mask = (column.index_select(0, used) for column in (ids, labels, mask))
    is_among = (ids[:, :-1] == labels[:, None]).any(1)
    wrong = mask & (ids[:, -1] != torch.where(is_among, -1, labels))
    if ids.is_cuda:
        torch._assert_async(~wrong.any(), "the last Top-K slot of a token does not fit its label")
    elif bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        among, last = ("", "-1 (unused)") if is_among[row] else ("not ", f"the label, {int(labels[row])}")
        raise ValueError(
            f"rollout_topk_ids has {int(ids[row, -1])} in the last slot of {_where(row, 0, used, 'label')}, its label "
            f"is {among}among the first {ids.shape[1] - 1}; expected {last}: the set is TopK(mu) and the sampled token"
        )


def _where(row: int, slot: int, used: Tensor | None, name: str) -> str:
    row = row if used is None else int(used[row])
    return f"row {row}" if name == "label" else f"row {row}, slot {slot}"


def _assert_in_vocabulary(name: str, ids: Tensor, valid: Tensor | None, vocab_size: int, used: Tensor | None) -> None:
    if used is not None:
        ids, valid = ids.index_select(0, used), None if valid is None else valid.index_select(0, used)
    outside = (ids < 0) | (ids >= vocab_size)
    if valid is not None:
        outside &= valid
    if ids.is_cuda:
        torch._assert_async(~outside.any(), f"a {name} is outside the vocabulary [0, {vocab_size})")
    elif bool(outside.any()):
        row, slot = outside.nonzero()[0].tolist()
        raise ValueError(
            f"{name} {int(ids[row, slot])} in {_where(row, slot, used, name)} "
            f"is outside the vocabulary [0, {vocab_size})"
        )


def _assert_distinct(ids: Tensor, valid: Tensor, used: Tensor | None) -> None:
    if used is not None:
        ids, valid = ids.index_select(0, used), valid.index_select(0, used)
    # Unused slots get a negative number each, so that two of them never look alike.
    unused = -1 - torch.arange(ids.shape[1], device=ids.device)
    in_order = torch.where(valid, ids, unused).sort(dim=1).values
    twice = in_order[:, 1:] == in_order[:, :-1]
    if ids.is_cuda:
        torch._assert_async(~twice.any(), "a valid id stands twice in its row")
    elif bool(twice.any()):
        row, position = twice.nonzero()[0].tolist()
        raise ValueError(f"id {int(in_order[row, position])} stands twice in {_where(row, 0, used, 'label')}")


def check_sets(sampling_mask: SamplingMask | None, labels: Tensor, vocab_size: int) -> None:
    """Check that each sampling mask holds ids of the vocabulary, and the label of its row (``labels [n]``)."""
    if sampling_mask is None:
        return
    check_sampling_mask(sampling_mask, len(labels))
    rows, has_set = set_rows(sampling_mask.ids, sampling_mask.counts)
    outside = (sampling_mask.ids < 0) | (sampling_mask.ids >= vocab_size)
    is_label = (sampling_mask.ids == labels[rows]).int()
    # 0 where none of a row's ids is its label.
    lacks_label = has_set & (
        torch.zeros_like(has_set, dtype=torch.int32).scatter_reduce_(0, rows, is_label, "amax") == 0
    )
    if sampling_mask.ids.is_cuda:
        torch._assert_async(~outside.any(), f"an allowed id is outside the vocabulary [0, {vocab_size})")
        torch._assert_async(~lacks_label.any(), "a label is outside its sampling mask")
    elif bool(outside.any()):
        raise ValueError(f"allowed id {int(sampling_mask.ids[outside][0])} is outside the vocabulary [0, {vocab_size})")
    elif bool(lacks_label.any()):
        row = int(lacks_label.nonzero()[0])
        raise ValueError(f"label {int(labels[row])} of the {row}-th row with loss is outside its sampling mask")
