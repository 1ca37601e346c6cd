"""Digests that a server's tensors must have, computed from the stream of weights that it is sent.

Servers fuse the tensors that are sent and shard them by tensor parallelism: q, k and v in one, gate and up in one, all
experts of a layer in one, the vocabulary padded. Each tensor of the stream is added to the digests of the server
tensors that it belongs to. None is held longer than the stream's bucket, except for a layer's experts on a CPU
(``PartsDigest``).
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
from megatron_dppo.weights.quantization import is_never_quantized, is_quantized

_VOCABULARY_MULTIPLE = 64
"""Multiple that SGLang and vLLM pad the vocabulary to."""
_Shard = Literal["replicated", "rows", "heads", "columns", "vocabulary"]
"""Way in which tensor parallelism shards a tensor."""


class ExpectedDigest(NamedTuple):
    """Expected digest of one tensor on one rank of a server."""

    digest: str
    sent_as: str
    """Hugging Face name; for a fusion ``...{q,k,v}_proj.weight``."""
    is_vector: bool
    is_reordered: bool = False
    """True if servers always reorder the tensor, so that its digest shows changes only."""


class _TargetSlot(NamedTuple):
    """Server tensor that a sent tensor becomes a part of."""

    target: str
    """Name in the server."""
    sent_as: str
    slot: int = 0
    """Index of the part in the target."""
    slots: int | None = 1
    """Number of parts of the target. None: as many as are sent (experts), all of one size."""
    shard: _Shard = "replicated"


_QKV = re.compile(r"(?P<prefix>.*\.self_attn)\.(?P<part>[qkv])_proj\.(?P<kind>weight|bias|weight_scale_inv)")
_EXPERT = re.compile(
    r"(?P<prefix>.*\.experts)\.(?P<index>\d+)\.(?P<part>gate|up|down)_proj"
    r"\.(?P<kind>weight|weight_scale_inv|weight_packed|weight_scale)"
)
_MLP = re.compile(r"(?P<prefix>.*)\.(?P<part>gate|up)_proj\.(?P<kind>weight|weight_scale_inv)")
_COLUMNS = re.compile(r".*\.(o|down)_proj\.(weight|weight_scale_inv)")
_PACKED = ("weight_packed", "weight_scale")
"""Suffixes of INT4 experts, which servers reorder for their kernels."""
_SHAPE = ".weight_shape"


def _target_slot(name: str) -> _TargetSlot:
    """Return the server tensor that a Hugging Face tensor belongs to."""
    if match := _QKV.fullmatch(name):
        prefix = match["prefix"]
        kind = match["kind"]
        # k and v are replicated on servers with more ranks than key and value heads.
        shard: _Shard = "rows" if match["part"] == "q" else "heads"
        part = "qkv".index(match["part"])
        return _TargetSlot(f"{prefix}.qkv_proj.{kind}", f"{prefix}.{{q,k,v}}_proj.{kind}", part, 3, shard)
    if match := _EXPERT.fullmatch(name):
        prefix = match["prefix"]
        index = int(match["index"])
        kind = match["kind"]
        if match["part"] == "down":
            return _TargetSlot(f"{prefix}.w2_{kind}", f"{prefix}.*.down_proj.{kind}", index, None, "columns")
        # gate and up alternate in w13: slot 0 is the gate of expert 0, slot 1 its up, slot 2 the gate of expert 1.
        slot = 2 * index + (match["part"] == "up")
        return _TargetSlot(f"{prefix}.w13_{kind}", f"{prefix}.*.{{gate,up}}_proj.{kind}", slot, None, "rows")
    if match := _MLP.fullmatch(name):
        prefix = match["prefix"]
        kind = match["kind"]
        slot = int(match["part"] == "up")
        return _TargetSlot(f"{prefix}.gate_up_proj.{kind}", f"{prefix}.{{gate,up}}_proj.{kind}", slot, 2, "rows")
    if _COLUMNS.fullmatch(name):
        return _TargetSlot(name, name, shard="columns")
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        return _TargetSlot(name, name, shard="vocabulary")
    return _TargetSlot(name, name)


@dataclass
class _Target:
    """Digest of a server tensor whose parts arrive one by one."""

    parts: PartsDigest
    sent_as: str
    slots: int | None
    is_vector: bool = False
    added: set[int] = field(default_factory=set)
    waiting: dict[int, Tensor] = field(default_factory=dict)
    end: int = 0

    def add(self, slot: int, part: Tensor) -> None:
        """Add a part; parts may arrive in any order."""
        self.is_vector = part.dim() < 2
        if self.slots is None:
            self.added.add(slot)
            self.parts.add(slot * part.nbytes, part)
            return
        # The offset of a part is known only when all parts before it have arrived.
        self.waiting[slot] = part
        while len(self.added) in self.waiting:
            ready = self.waiting.pop(len(self.added))
            self.parts.add(self.end, ready)
            self.added.add(len(self.added))
            self.end += ready.nbytes

    @property
    def is_complete(self) -> bool:
        """True if no part is missing."""
        return len(self.added) == (max(self.added, default=-1) + 1 if self.slots is None else self.slots)


class StreamDigests:
    """Digests that servers of some layouts must have after a stream of weights.

    Args:
        layouts: Layouts of the servers; equal ones are computed once.
        kv_heads: Number of key and value heads of the model; a server with more ranks replicates them.
    """

    def __init__(self, layouts: Iterable[WeightLayout], kv_heads: int) -> None:
        self._kv_heads = kv_heads
        layouts = list(layouts)
        self._kinds = sorted({(layout.algorithm, layout.tp_size) for layout in layouts if layout.plain})
        self._combined = {layout.algorithm: hashlib.sha256() for layout in layouts if not layout.plain}
        self._num_combined = 0
        self._targets: dict[tuple[str, int, int], dict[str, _Target]] = {}
        self._impossible: set[tuple[str, int, str]] = set()

    def watch(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Pass the stream through and add its tensors."""
        for name, tensor in weights:
            self.add(name, tensor)
            yield name, tensor

    def add(self, name: str, tensor: Tensor) -> None:
        """Add one tensor in the dtype that is sent."""
        if name.endswith(_SHAPE):
            return  # metadata of INT4 experts that never changes
        # The tensors that no server can round away; see ``combined_digest``.
        if is_quantized(tensor) or tensor.dim() < 2 or is_never_quantized(name):
            self._num_combined += 1
            for algorithm, combined in self._combined.items():
                parts = PartsDigest(algorithm)
                parts.add(0, tensor.detach())
                combined.update(f"{name} {parts.hexdigest()} ".encode())
        slot = _target_slot(name)
        # A rank of a server reports its own shard, so each rank of each layout has a digest of its own.
        for algorithm, tp_size in self._kinds:
            for rank in range(tp_size):
                part = self._part(tensor.detach(), slot.shard, rank, tp_size)
                if part is None:
                    self._impossible.add((algorithm, tp_size, slot.target))
                    continue
                targets = self._targets.setdefault((algorithm, tp_size, rank), {})
                if slot.target not in targets:
                    targets[slot.target] = _Target(PartsDigest(algorithm), slot.sent_as, slot.slots)
                targets[slot.target].add(slot.slot, part)

    def expected(self, layout: WeightLayout, rank: int) -> dict[str, ExpectedDigest]:
        """Return the digests that can be predicted for one rank of a server, by the server's name."""
        if not layout.plain:
            return {}
        return {
            name: ExpectedDigest(
                target.parts.hexdigest(), target.sent_as, target.is_vector, is_reordered=_is_reordered(target.sent_as)
            )
            for name, target in self._targets.get((layout.algorithm, layout.tp_size, rank), {}).items()
            if target.is_complete and (layout.algorithm, layout.tp_size, name) not in self._impossible
        }

    def combined_digest(self, layout: WeightLayout) -> str | None:
        """Return one digest of everything that was sent, for a layout that is not plain.

        Covers only weights that such a server cannot round away: those sent quantized, vectors, embedding, output layer
        and routers. None if there are none.
        """
        combined = self._combined.get(layout.algorithm)
        return combined.hexdigest() if combined is not None and self._num_combined else None

    def predicts_all(self, layout: WeightLayout) -> bool:
        """Return True if ``expected`` covers everything that was sent."""
        kind = (layout.algorithm, layout.tp_size)
        targets = [t for rank in range(layout.tp_size) for t in self._targets.get((*kind, rank), {}).values()]
        all_complete = bool(targets) and all(target.is_complete for target in targets)
        return layout.plain and all_complete and not any(entry[:2] == kind for entry in self._impossible)

    def _part(self, tensor: Tensor, shard: _Shard, rank: int, size: int) -> Tensor | None:
        """Return a rank's part of a tensor, or None if it cannot be sharded so."""
        if shard == "vocabulary":
            return _vocabulary_part(tensor, rank, size)
        if shard == "heads" and size > self._kv_heads:
            if size % self._kv_heads:
                return None
            # Consecutive ranks share a head.
            rank = rank // (size // self._kv_heads)
            size = self._kv_heads
        if shard == "replicated" or size == 1:
            return tensor
        dim = 1 if shard == "columns" else 0
        if tensor.dim() <= dim or tensor.shape[dim] % size:
            return None
        return tensor.chunk(size, dim)[rank]


def _is_reordered(sent_as: str) -> bool:
    return ".experts." in sent_as and sent_as.rpartition(".")[2] in _PACKED


def _vocabulary_part(tensor: Tensor, rank: int, size: int) -> Tensor:
    """Return the vocabulary rows of one rank, with zeros as padding."""
    # Below, -(-a // b) is a / b rounded up.
    multiple = _VOCABULARY_MULTIPLE
    # Servers pad to a multiple of the ranks as well, if the usual padding cannot be split evenly.
    if -(-len(tensor) // multiple) * multiple % size:
        multiple *= size
    each = -(-len(tensor) // multiple) * multiple // size
    rows = tensor[rank * each : (rank + 1) * each]
    if len(rows) == each:
        return rows
    return torch.cat([rows, tensor.new_zeros(each - len(rows), *tensor.shape[1:])])
