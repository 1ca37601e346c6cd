"""Tensors that hold one projection of all experts of a layer, and the weights of one expert in them.

transformers keeps experts so in memory, and some published folders on disk. Everywhere else a weight has the name of
its expert (``mlp.experts.3.up_proj.weight``) and the shape ``[out, in]``.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_FUSED = re.compile(r"(.*\.mlp\.experts)\.((?:gate_up_proj|down_proj)(?:_bias)?)")
_ONE_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.(weight|bias)")
_GATE = "gate_proj"
_UP = "up_proj"
_DOWN = "down_proj"


def match_fused(name: str) -> tuple[str, str] | None:
    """Return the module and the kind (``gate_up_proj``) of a tensor of all experts. None for another tensor."""
    match = _FUSED.fullmatch(name)
    return None if match is None else (match[1], match[2])


def match_expert(name: str) -> tuple[str, str, int, str] | None:
    """Return module, kind, expert and local name (``up_proj.weight``) of one expert's weight, or None."""
    match = _ONE_EXPERT.fullmatch(name)
    if match is None:
        return None
    kind = _DOWN if match[3] == _DOWN else "gate_up_proj"
    return match[1], kind + ("_bias" if match[4] == "bias" else ""), int(match[2]), f"{match[3]}.{match[4]}"


@dataclass(frozen=True)
class FusedExperts:
    """Layout of the tensors of all experts.

    ``is_interleaved`` is for gpt-oss: gate and up alternate, matrices are ``[in, out]``, and there are biases. Else all
    rows of the gate come first, then all rows of up, and matrices are ``[out, in]``.
    """

    is_interleaved: bool = False

    def names(self, kind: str) -> tuple[str, ...]:
        """Return the local names (``up_proj.weight``) of the weights in one expert's part of a tensor."""
        suffix = "bias" if kind.endswith("_bias") else "weight"
        projections = (_DOWN,) if kind.startswith(_DOWN) else (_GATE, _UP)
        return tuple(f"{projection}.{suffix}" for projection in projections)

    def rows(self, local_name: str) -> slice:
        """Return the rows of a weight in one expert's part of an interleaved tensor ``[out, in]``."""
        return {_GATE: slice(0, None, 2), _UP: slice(1, None, 2), _DOWN: slice(None)}[local_name.partition(".")[0]]

    def parts(self, kind: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return views of one expert's part of a tensor, by local name."""
        names = self.names(kind)
        if not self.is_interleaved:
            return dict(zip(names, tensor.chunk(len(names), 0), strict=True))
        rows = tensor if tensor.dim() == 1 else tensor.transpose(0, 1)
        return {local_name: rows[self.rows(local_name)] for local_name in names}

    def shape(self, kind: str, weight: Tensor) -> tuple[int, ...]:
        """Return the shape of one expert's part of a tensor, from one of its weights."""
        is_joined = not kind.startswith(_DOWN)
        rows = (weight.shape[0] * (2 if is_joined else 1), *weight.shape[1:])
        return rows[::-1] if self.is_interleaved else rows

    def split(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights in a tensor by their usual names: itself, or those of each expert."""
        fused = match_fused(name)
        if fused is None:
            yield name, tensor
            return
        module, kind = fused
        for expert, part in enumerate(tensor):
            for local_name, weight in self.parts(kind, part).items():
                yield f"{module}.{expert}.{local_name}", weight

    def find(self, targets: Mapping[str, Tensor], name: str) -> tuple[Tensor, str] | None:
        """Return the view of one expert's weight in a tensor of ``targets``, and the tensor's name. None: no such."""
        match = match_expert(name)
        if match is None or (key := f"{match[0]}.{match[1]}") not in targets:
            return None
        _, kind, expert, local_name = match
        return self.parts(kind, targets[key][expert])[local_name], key

    def join(self, weights: Iterable[tuple[str, Tensor]], num_experts: int) -> Iterator[tuple[str, Tensor]]:
        """Stream weights with those of all experts joined in one tensor, as soon as it is full; undoes ``split``."""
        tensors: dict[str, Tensor] = {}
        left: dict[str, int] = {}
        for name, weight in weights:
            match = match_expert(name)
            if match is None:
                yield name, weight
                continue
            module, kind, expert, local_name = match
            key = f"{module}.{kind}"
            if key not in tensors:
                tensors[key] = torch.empty(
                    num_experts, *self.shape(kind, weight), dtype=weight.dtype, device=weight.device
                )
                left[key] = tensors[key].numel()
            self.parts(kind, tensors[key][expert])[local_name].copy_(weight)
            left[key] -= weight.numel()
            if not left[key]:
                yield key, tensors.pop(key)
        if tensors:
            raise ValueError(f"Expected the weights of {num_experts} experts of {sorted(tensors)[0]}, got fewer.")


CHUNKED = FusedExperts()
INTERLEAVED = FusedExperts(is_interleaved=True)
