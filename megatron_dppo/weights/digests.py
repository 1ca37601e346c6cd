"""The digests that a server's tensors must have, computed from the stream of weights that it is sent.

Servers keep fusions of our tensors, cut by tensor parallelism: q, k and v in one, gate and up in one, all experts of a
layer in one, the vocabulary padded. Each of our tensors is added to the digests of the ranks' tensors that it belongs
to while it passes; none is kept longer than the stream's bucket, but for a layer's experts on a CPU (``PartsDigest``).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megatron_dppo.engines.serving.vllm_extension.megatron_dppo_digest import PartsDigest
from megatron_dppo.rollout.weight_digests import WeightLayout
from megatron_dppo.weights.quantization import is_quantized, never_rounded

_VOCABULARY_MULTIPLE = 64
"""What SGLang and vLLM pad the vocabulary to."""
_Cut = Literal["whole", "rows", "heads", "columns", "vocabulary"]


class Expected(NamedTuple):
    """One tensor of a server's rank."""

    digest: str
    sent_as: str
    """by Hugging Face name; of a fusion ``...{q,k,v}_proj.weight``"""
    is_vector: bool
    own_form: bool = False
    """whether servers bring it into a form of their own in any case, so that the digest only tells when it changes"""


class _Place(NamedTuple):
    """Where a tensor goes."""

    target: str
    """the server's name"""
    sent_as: str
    slot: int = 0
    """which part of the target it is"""
    slots: int | None = 1
    """parts of the target; None = as many as come (experts), all of one size"""
    cut: _Cut = "whole"


_QKV = re.compile(r"(?P<prefix>.*\.self_attn)\.(?P<part>[qkv])_proj\.(?P<kind>weight|bias|weight_scale_inv)")
_EXPERT = re.compile(
    r"(?P<prefix>.*\.experts)\.(?P<index>\d+)\.(?P<part>gate|up|down)_proj"
    r"\.(?P<kind>weight|weight_scale_inv|weight_packed|weight_scale)"
)
_MLP = re.compile(r"(?P<prefix>.*)\.(?P<part>gate|up)_proj\.(?P<kind>weight|weight_scale_inv)")
_COLUMNS = re.compile(r".*\.(o|down)_proj\.(weight|weight_scale_inv)")
_PACKED = ("weight_packed", "weight_scale")
"""Of INT4 experts: servers lay them out for their kernels."""
_SHAPE = ".weight_shape"


def _place(name: str) -> _Place:
    if match := _QKV.fullmatch(name):
        prefix, kind = match["prefix"], match["kind"]
        cut: _Cut = "rows" if match["part"] == "q" else "heads"
        part = "qkv".index(match["part"])
        return _Place(f"{prefix}.qkv_proj.{kind}", f"{prefix}.{{q,k,v}}_proj.{kind}", part, 3, cut)
    if match := _EXPERT.fullmatch(name):
        prefix, index, kind = match["prefix"], int(match["index"]), match["kind"]
        if match["part"] == "down":
            return _Place(f"{prefix}.w2_{kind}", f"{prefix}.*.down_proj.{kind}", index, None, "columns")
        slot = 2 * index + (match["part"] == "up")
        return _Place(f"{prefix}.w13_{kind}", f"{prefix}.*.{{gate,up}}_proj.{kind}", slot, None, "rows")
    if match := _MLP.fullmatch(name):
        prefix, kind = match["prefix"], match["kind"]
        slot = int(match["part"] == "up")
        return _Place(f"{prefix}.gate_up_proj.{kind}", f"{prefix}.{{gate,up}}_proj.{kind}", slot, 2, "rows")
    if _COLUMNS.fullmatch(name):
        return _Place(name, name, cut="columns")
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        return _Place(name, name, cut="vocabulary")
    return _Place(name, name)


@dataclass
class _Target:
    """A server's tensor that is not complete yet."""

    parts: PartsDigest
    sent_as: str
    slots: int | None
    is_vector: bool = False
    seen: set[int] = field(default_factory=set)
    waiting: dict[int, Tensor] = field(default_factory=dict)
    end: int = 0

    def add(self, slot: int, part: Tensor) -> None:
        self.is_vector = part.dim() < 2
        if self.slots is None:
            self.seen.add(slot)
            self.parts.add(slot * part.nbytes, part)
            return
        # Where a part starts is known only when all before it have come.
        self.waiting[slot] = part
        while len(self.seen) in self.waiting:
            ready = self.waiting.pop(len(self.seen))
            self.parts.add(self.end, ready)
            self.seen.add(len(self.seen))
            self.end += ready.nbytes

    @property
    def complete(self) -> bool:
        return len(self.seen) == (max(self.seen, default=-1) + 1 if self.slots is None else self.slots)


class StreamDigests:
    """Takes the stream of weights, and says what servers of some layouts must have then.

    Args:
        layouts: of the servers; those of one kind are computed once.
        kv_heads: key and value heads of the model, which a server with more ranks than that repeats.
    """

    def __init__(self, layouts: Iterable[WeightLayout], kv_heads: int) -> None:
        self._kv_heads = kv_heads
        layouts = list(layouts)
        self._kinds = sorted({(layout.algorithm, layout.tp_size) for layout in layouts if layout.plain})
        self._wholes = {layout.algorithm: hashlib.sha256() for layout in layouts if not layout.plain}
        self._counted = 0
        self._targets: dict[tuple[str, int, int], dict[str, _Target]] = {}
        self._impossible: set[tuple[str, int, str]] = set()

    def watch(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same stream, looked at while it passes."""
        for name, tensor in weights:
            self.add(name, tensor)
            yield name, tensor

    def add(self, name: str, tensor: Tensor) -> None:
        """One tensor, in the type that it is sent in."""
        if name.endswith(_SHAPE):
            return  # never changes, and is no weight
        if is_quantized(tensor) or tensor.dim() < 2 or never_rounded(name):
            self._counted += 1
            for algorithm, whole in self._wholes.items():
                parts = PartsDigest(algorithm)
                parts.add(0, tensor.detach())
                whole.update(f"{name} {parts.hexdigest()} ".encode())
        place = _place(name)
        for algorithm, tp_size in self._kinds:
            for rank in range(tp_size):
                part = self._part(tensor.detach(), place.cut, rank, tp_size)
                if part is None:
                    self._impossible.add((algorithm, tp_size, place.target))
                    continue
                targets = self._targets.setdefault((algorithm, tp_size, rank), {})
                if place.target not in targets:
                    targets[place.target] = _Target(PartsDigest(algorithm), place.sent_as, place.slots)
                targets[place.target].add(place.slot, part)

    def expected(self, layout: WeightLayout, rank: int) -> dict[str, Expected]:
        """By the server's name, for one of its ranks; without what cannot be foretold."""
        if not layout.plain:
            return {}
        return {
            name: Expected(
                target.parts.hexdigest(), target.sent_as, target.is_vector, own_form=_in_own_form(target.sent_as)
            )
            for name, target in self._targets.get((layout.algorithm, layout.tp_size, rank), {}).items()
            if target.complete and (layout.algorithm, layout.tp_size, name) not in self._impossible
        }

    def whole(self, layout: WeightLayout) -> str | None:
        """Of a layout that is not plain: a digest of all that came and that such a server cannot round away, which is
        what came quantised, vectors, embedding, output layer and routers; None = nothing like that."""
        whole = self._wholes.get(layout.algorithm)
        return whole.hexdigest() if whole is not None and self._counted else None

    def foretells_all(self, layout: WeightLayout) -> bool:
        """Whether ``expected`` leaves out nothing that came."""
        kind = (layout.algorithm, layout.tp_size)
        targets = [t for rank in range(layout.tp_size) for t in self._targets.get((*kind, rank), {}).values()]
        every = bool(targets) and all(target.complete for target in targets)
        return layout.plain and every and not any(found[:2] == kind for found in self._impossible)

    def _part(self, tensor: Tensor, cut: _Cut, rank: int, size: int) -> Tensor | None:
        """A rank's part of a tensor; None = it cannot be cut so."""
        if cut == "vocabulary":
            return _vocabulary_part(tensor, rank, size)
        if cut == "heads" and size > self._kv_heads:
            if size % self._kv_heads:
                return None
            rank, size = rank // (size // self._kv_heads), self._kv_heads
        if cut == "whole" or size == 1:
            return tensor
        dim = 1 if cut == "columns" else 0
        if tensor.dim() <= dim or tensor.shape[dim] % size:
            return None
        return tensor.chunk(size, dim)[rank]


def _in_own_form(sent_as: str) -> bool:
    return ".experts." in sent_as and sent_as.rpartition(".")[2] in _PACKED


def _vocabulary_part(tensor: Tensor, rank: int, size: int) -> Tensor:
    """Rows of one rank, with zeros where no token is."""
    multiple = _VOCABULARY_MULTIPLE
    if -(-len(tensor) // multiple) * multiple % size:
        multiple *= size
    each = -(-len(tensor) // multiple) * multiple // size
    rows = tensor[rank * each : (rank + 1) * each]
    if len(rows) == each:
        return rows
    return torch.cat([rows, tensor.new_zeros(each - len(rows), *tensor.shape[1:])])
