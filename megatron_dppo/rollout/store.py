"""Rollouts in a file, exact to the bit: safetensors for the numbers, JSON for what holds them. Never pickle."""

from __future__ import annotations

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
from megatron_dppo.types import Completion, FinishReason, Prompt, Rollout, RolloutGroup, SamplingMask, VersionSpan

_CLASSES: dict[str, Any] = {
    "Completion": Completion,
    "KeptSets": SamplingMask,
    "PartialResponse": PartialResponse,
    "Rollout": Rollout,
    "RolloutGroup": RolloutGroup,
}
"""Classes by their name in the file."""
_CLASS_NAMES = {cls: name for name, cls in _CLASSES.items()}
_STORED_FIELDS = {"sampling_mask": "kept"}
"""Fields that have another name in the file."""
_FIELDS = {stored: name for name, stored in _STORED_FIELDS.items()}
_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64}
_TREE = "tree"


class Stored(NamedTuple):
    """A prompt of the stream with what was sampled of it."""

    position: int
    """in the stream"""
    prompt: Prompt
    content: RolloutGroup | GroupState | None
    """the scored group; the responses of one that is not complete; None = nothing"""


def save_groups(path: Path, groups: Sequence[Stored]) -> None:
    """Write groups, with every field of every class but the prompts themselves.

    Raises:
        TypeError: a field of a type that has no form here.
    """
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
    _separate(tensors)
    # Text as a tensor: the header of the format, where metadata would stand, is limited in size.
    tensors[_TREE] = torch.frombuffer(bytearray(json.dumps(tree).encode()), dtype=torch.uint8)
    save_file(tensors, path)


def load_groups(path: Path, prompt_at: Callable[[int], Prompt]) -> list[Stored]:
    """Read what ``save_groups`` wrote; ``prompt_at`` gives the prompt of a position.

    Raises:
        CheckpointError: the file is missing or damaged, or the prompts are others.
    """
    try:
        tensors = load_file(path)
        tree = json.loads(tensors[_TREE].numpy().tobytes())
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {type(error).__name__}: {error}. Delete this checkpoint to use an older one"
        ) from error
    found = []
    for entry in tree:
        prompt = prompt_at(entry["position"])
        if (entry["prompt_id"], entry["prompt_token_ids"]) != (prompt.prompt_id, list(prompt.token_ids)):
            raise CheckpointError(
                f"{path} holds rollouts of prompt {entry['prompt_id']} where the data now has {prompt.prompt_id} or "
                "other text; put the old data.train and tokenizer back, or start again in another run.output_dir"
            )
        found.append(Stored(entry["position"], prompt, _decode(entry["content"], tensors, prompt)))
    return found


def _encode(value: Any, tensors: dict[str, Tensor]) -> Any:
    if type(value) in _CLASS_NAMES:
        names = [f.name for f in fields(value) if f.name != "prompt"]
        return {
            "class": _CLASS_NAMES[type(value)],
            "fields": {_STORED_FIELDS.get(name, name): _encode(getattr(value, name), tensors) for name in names},
        }
    if isinstance(value, Tensor):
        return {"tensor": _keep(value.detach().cpu().contiguous(), tensors)}
    if isinstance(value, VersionSpan):
        return {"span": list(value)}
    if isinstance(value, FinishReason):
        return {"finish": str(value)}
    if isinstance(value, tuple):
        numbers = _as_tensor(value)
        if numbers is not None:
            return {"tuple": _keep(numbers, tensors)}
        return {"items": [_encode(item, tensors) for item in value]}
    if isinstance(value, Mapping):
        return {"mapping": {key: _encode(item, tensors) for key, item in value.items()}}
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise TypeError(f"a rollout holds a {type(value).__name__}, which cannot be saved: {value!r:.200}")


def _decode(value: Any, tensors: Mapping[str, Tensor], prompt: Prompt) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content), *_) = value.items()
    if kind == "class":
        cls = _CLASSES[content]
        known = {"prompt": prompt} if "prompt" in {f.name for f in fields(cls)} else {}
        stored = {_FIELDS.get(key, key): _decode(item, tensors, prompt) for key, item in value["fields"].items()}
        return cls(**known, **stored)
    if kind == "tensor":
        return tensors[content]
    if kind == "span":
        return VersionSpan(*content)
    if kind == "finish":
        return FinishReason(content)
    if kind == "tuple":
        rows = tensors[content].tolist()
        return tuple(tuple(row) if isinstance(row, list) else row for row in rows)
    if kind == "items":
        return tuple(_decode(item, tensors, prompt) for item in content)
    return {key: _decode(item, tensors, prompt) for key, item in content.items()}


def _separate(tensors: dict[str, Tensor]) -> None:
    """The format takes no two tensors that lie in the same memory, as columns of responses may."""
    seen = set()
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        tensors[name] = tensor.clone() if place in seen else tensor
        seen.add(place)


def _keep(tensor: Tensor, tensors: dict[str, Tensor]) -> str:
    key = str(len(tensors))
    tensors[key] = tensor
    return key


def _as_tensor(value: tuple[Any, ...]) -> Tensor | None:
    """``[R]``, or ``[R, K]`` of equally long rows, when all are numbers of one type; else None."""
    numbers = value
    if value and all(type(row) is tuple and row for row in value):
        if len({len(row) for row in value}) > 1:
            return None
        numbers = tuple(number for row in value for number in row)
    kinds = {type(number) for number in numbers}
    dtype = _DTYPES.get(next(iter(kinds))) if len(kinds) == 1 else None
    return None if dtype is None else torch.tensor(value, dtype=dtype)
