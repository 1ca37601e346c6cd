"""Rollouts in a file, exact to the bit: safetensors for numbers, JSON for the structure. No pickle."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_dppo.errors import CheckpointError
from megatron_dppo.rollout.engine import GroupState
from megatron_dppo.rollout.response import PartialResponse
from megatron_dppo.types import (
    Completion,
    FinishReason,
    Prompt,
    Rollout,
    RolloutGroup,
    SamplingMask,
    SegmentCredit,
    ToolTime,
    VersionSpan,
)

_CLASSES: dict[str, Any] = {
    "Completion": Completion,
    "KeptSets": SamplingMask,
    "PartialResponse": PartialResponse,
    "Rollout": Rollout,
    "RolloutGroup": RolloutGroup,
}
"""Classes by their name in the file."""
_CLASS_NAMES = {cls: name for name, cls in _CLASSES.items()}
_TUPLES: dict[str, Any] = {"credit": SegmentCredit, "span": VersionSpan, "tool_time": ToolTime}
"""Named tuples by their name in the file."""
_TUPLE_NAMES = {cls: name for name, cls in _TUPLES.items()}
_STORED_FIELDS = {"sampling_mask": "kept"}
"""Names in the file of fields that were renamed."""
_FIELDS = {stored: name for name, stored in _STORED_FIELDS.items()}
_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64}
_TREE = "tree"


class StoredRollouts(NamedTuple):
    """A prompt of the stream and everything that was sampled for it."""

    position: int
    prompt: Prompt
    content: RolloutGroup | GroupState | None
    """Scored group, or the responses of an incomplete one. None: nothing was sampled."""


def save_groups(path: Path, groups: Sequence[StoredRollouts]) -> None:
    """Write groups with every field of every class, except for the prompts."""
    tensors: dict[str, Tensor] = {}
    tree = [
        {
            "position": position,
            "prompt_id": prompt.prompt_id,
            "prompt_token_ids": list(prompt.token_ids),
            "content": _encode(content, tensors),
        }
        for position, prompt, content in groups
    ]
    _unshare_memory(tensors)
    # JSON as a tensor: safetensors limits the size of its header, which would hold metadata.
    tensors[_TREE] = torch.frombuffer(bytearray(json.dumps(tree).encode()), dtype=torch.uint8)
    save_file(tensors, path)


def load_groups(path: Path, prompt_at: Callable[[int], Prompt]) -> list[StoredRollouts]:
    """Read what ``save_groups`` wrote."""
    try:
        tensors = load_file(path)
        tree = json.loads(tensors[_TREE].numpy().tobytes())
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {type(error).__name__}: {error}. Delete this checkpoint to use an older one"
        ) from error
    groups = []
    for entry in tree:
        prompt = prompt_at(entry["position"])
        # The name of a prompt has that of its file, which may be renamed.
        if entry["prompt_token_ids"] != list(prompt.token_ids):
            raise CheckpointError(
                f"{path} holds rollouts of prompt {entry['prompt_id']} where the data now has {prompt.prompt_id} or "
                "other text; put the old data.train and tokenizer back, or start again in another run.output_dir"
            )
        groups.append(StoredRollouts(entry["position"], prompt, _decode(entry["content"], tensors, prompt)))
    return groups


def _encode(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return a value as JSON and add its numbers to ``tensors``."""
    if type(value) in _CLASS_NAMES:
        names = [f.name for f in fields(value) if f.name != "prompt"]
        return {
            "class": _CLASS_NAMES[type(value)],
            "fields": {_STORED_FIELDS.get(name, name): _encode(getattr(value, name), tensors) for name in names},
        }
    if isinstance(value, Tensor):
        return {"tensor": _add_tensor(value.detach().cpu().contiguous(), tensors)}
    # Named tuples are tuples and FinishReason is a string: they must come before the general cases.
    if type(value) in _TUPLE_NAMES:
        return {_TUPLE_NAMES[type(value)]: [_encode(item, tensors) for item in value]}
    if isinstance(value, FinishReason):
        return {"finish": str(value)}
    if isinstance(value, tuple):
        numbers = _as_tensor(value)
        if numbers is not None:
            return {"tuple": _add_tensor(numbers, tensors)}
        return {"items": [_encode(item, tensors) for item in value]}
    if isinstance(value, Mapping):
        return {"mapping": {key: _encode(item, tensors) for key, item in value.items()}}
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise TypeError(f"a rollout holds a {type(value).__name__}, which cannot be saved: {value!r:.200}")


def _decode(value: Any, tensors: Mapping[str, Tensor], prompt: Prompt) -> Any:
    """Return the value that ``_encode`` wrote."""
    if not isinstance(value, dict):
        return value
    # ``_encode`` writes the key that names the kind first; a class has its fields behind it.
    ((kind, content), *_) = value.items()
    if kind == "class":
        cls = _CLASSES[content]
        prompt_field = {"prompt": prompt} if "prompt" in {f.name for f in fields(cls)} else {}
        stored = {_FIELDS.get(key, key): _decode(item, tensors, prompt) for key, item in value["fields"].items()}
        return cls(**prompt_field, **stored)
    if kind == "tensor":
        return tensors[content]
    if kind in _TUPLES:
        return _TUPLES[kind](*(_decode(item, tensors, prompt) for item in content))
    if kind == "finish":
        return FinishReason(content)
    if kind == "tuple":
        rows = tensors[content].tolist()
        return tuple(tuple(row) if isinstance(row, list) else row for row in rows)
    if kind == "items":
        return tuple(_decode(item, tensors, prompt) for item in content)
    return {key: _decode(item, tensors, prompt) for key, item in content.items()}


def _unshare_memory(tensors: dict[str, Tensor]) -> None:
    """Clone tensors that share memory with an earlier one, as columns of a response may: safetensors rejects them."""
    addresses = set()
    for name, tensor in tensors.items():
        address = tensor.untyped_storage().data_ptr()
        tensors[name] = tensor.clone() if address in addresses else tensor
        addresses.add(address)


def _add_tensor(tensor: Tensor, tensors: dict[str, Tensor]) -> str:
    """Add a tensor and return its key."""
    key = str(len(tensors))
    tensors[key] = tensor
    return key


def _as_tensor(value: tuple[Any, ...]) -> Tensor | None:
    """Return numbers of one type as ``[R]``, or rows of equal length as ``[R, K]``; None for anything else."""
    numbers = value
    if value and all(type(row) is tuple and row for row in value):
        if len({len(row) for row in value}) > 1:
            return None
        numbers = tuple(number for row in value for number in row)
    # By exact type: 1, 1.0 and True are equal, and a tuple that mixes them would not come back as it was.
    kinds = {type(number) for number in numbers}
    dtype = _DTYPES.get(next(iter(kinds))) if len(kinds) == 1 else None
    return None if dtype is None else torch.tensor(value, dtype=dtype)
