"""Digests that a server's tensors must have, computed from the stream of weights that it is sent.

Servers fuse the tensors that are sent and shard them by tensor parallelism: q, k and v in one, gate and up in one, all
experts of a layer in one, the vocabulary padded. Each tensor of the stream is added once to the digests of the server
tensor that it belongs to, with its division between the ranks. On a GPU one launch hashes the tensors of some 128 MiB,
which are held until then, and all results are read at once. On a CPU none is held longer than the stream's bucket,
except for a layer's experts (``PartsDigest``).
"""

import hashlib
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torch import Tensor

from megatron_dppo.export.quantization import is_never_quantized, is_quantized
from megatron_dppo_engines.serving.vllm_extension.megatron_dppo_digest import Cut, TensorDigests
from megatron_dppo_engines.weight_digests import WeightLayout

_VOCABULARY_MULTIPLE = 64
"""Multiple that SGLang and vLLM pad the vocabulary to."""
_Shard = Literal["replicated", "rows", "heads", "columns", "vocabulary", "sections"]
"""Way in which tensor parallelism shards a tensor. *sections* are unknown with more than one rank."""


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
    sent_as: str
    slot: int = 0
    """Index of the part in the target."""
    slots: int | None = 1
    """Number of parts of the target. None: as many as are sent (experts), all of one size."""
    shard: _Shard = "replicated"


_QKV = re.compile(r"(?P<prefix>.*\.self_attn)\.(?P<part>[qkv])_proj\.(?P<kind>weight|bias|weight_scale_inv)")
_EXPERT = re.compile(
    r"(?P<prefix>.*\.experts)\.(?P<index>\d+)\.(?P<part>gate_proj|up_proj|down_proj|w1|w3|w2)"
    r"\.(?P<kind>weight|weight_scale_inv|weight_packed|weight_scale)"
)
_LINEAR = re.compile(r"(?P<prefix>.*\.linear_attn\.in_proj)_(?P<part>qkv|z|b|a)\.(?P<kind>weight|weight_scale_inv)")
"""Input projections of Qwen3.5's linear attention; those of Qwen3-Next are fused on disk."""
_LATENT = re.compile(r"(?P<prefix>.*\.self_attn)\.(?P<part>q_a_proj|kv_a_proj_with_mqa)\.(?P<kind>weight)")
_MLP = re.compile(r"(?P<prefix>.*)\.(?P<part>gate|up)_proj\.(?P<kind>weight|weight_scale_inv)")
_COLUMNS = re.compile(r".*\.(o|down)_proj\.(weight|weight_scale_inv)")
_HELD_IN_FP32 = ".linear_attn.A_log"
"""End of the names that servers hold in fp32, whatever the dtype of the model."""
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
        slot = "qkv".index(match["part"])
        return _TargetSlot(f"{prefix}.qkv_proj.{kind}", f"{prefix}.{{q,k,v}}_proj.{kind}", slot, 3, shard)
    if match := _EXPERT.fullmatch(name):
        prefix = match["prefix"]
        index = int(match["index"])
        kind = match["kind"]
        part = match["part"]
        if part in ("down_proj", "w2"):
            return _TargetSlot(f"{prefix}.w2_{kind}", f"{prefix}.*.{part}.{kind}", index, None, "columns")
        # gate and up alternate in w13: slot 0 is the gate of expert 0, slot 1 its up, slot 2 the gate of expert 1.
        slot = 2 * index + (part in ("up_proj", "w3"))
        both = "{gate,up}_proj" if part.endswith("_proj") else "{w1,w3}"
        return _TargetSlot(f"{prefix}.w13_{kind}", f"{prefix}.*.{both}.{kind}", slot, None, "rows")
    if match := _LINEAR.fullmatch(name):
        prefix = match["prefix"]
        parts = ("qkv", "z") if match["part"] in ("qkv", "z") else ("b", "a")
        target = f"{prefix}_{'qkvz' if parts[0] == 'qkv' else 'ba'}.{match['kind']}"
        sent_as = f"{prefix}_{{{','.join(parts)}}}.{match['kind']}"
        return _TargetSlot(target, sent_as, parts.index(match["part"]), 2, "sections")
    if match := _LATENT.fullmatch(name):
        prefix = match["prefix"]
        slot = int(match["part"] != "q_a_proj")
        sent_as = f"{prefix}.{{q_a_proj,kv_a_proj_with_mqa}}.{match['kind']}"
        return _TargetSlot(f"{prefix}.fused_qkv_a_proj.{match['kind']}", sent_as, slot, 2)
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
    """Server tensor whose parts arrive one by one."""

    sent_as: str
    slots: int | None
    is_vector: bool = False
    is_impossible: bool = False
    """True if a part cannot be divided between the ranks."""
    added: set[int] = field(default_factory=set)
    waiting: dict[int, tuple[Tensor, Cut]] = field(default_factory=dict)
    end: int = 0

    def locate(self, slot: int, tensor: Tensor, cut: Cut) -> Iterator[tuple[int, Tensor, Cut]]:
        """Yield the parts whose start in the target is known now, each with its start in bytes."""
        self.is_vector = tensor.dim() < 2
        if self.slots is None:
            self.added.add(slot)
            yield slot * cut.nbytes, tensor, cut
            return
        # The offset of a part is known only when all parts before it have arrived.
        self.waiting[slot] = tensor, cut
        while len(self.added) in self.waiting:
            ready, ready_cut = self.waiting.pop(len(self.added))
            yield self.end, ready, ready_cut
            self.added.add(len(self.added))
            self.end += ready_cut.nbytes

    @property
    def is_complete(self) -> bool:
        """True if no part is missing."""
        return len(self.added) == (max(self.added, default=-1) + 1 if self.slots is None else self.slots)


class _LayoutDigests:
    """Digests of all ranks of servers with one algorithm and size."""

    def __init__(self, algorithm: str, tp_size: int, kv_heads: int) -> None:
        self._tp_size = tp_size
        self._kv_heads = kv_heads
        self._targets: dict[str, _Target] = {}
        self._digests = TensorDigests(algorithm)
        self._expected: list[dict[str, ExpectedDigest]] | None = None

    def add(self, slot: _TargetSlot, tensor: Tensor) -> None:
        """Add a sent tensor."""
        if slot.target not in self._targets:
            self._targets[slot.target] = _Target(slot.sent_as, slot.slots)
        target = self._targets[slot.target]
        self._expected = None
        cut = _cut(tensor, slot.shard, self._tp_size, self._kv_heads)
        if cut is None:
            target.is_impossible = True
            return
        for start, part, part_cut in target.locate(slot.slot, tensor, cut):
            self._digests.add(slot.target, start, part, part_cut)

    def expected(self, rank: int) -> dict[str, ExpectedDigest]:
        """Return the digests that can be predicted for a rank, by the server's name. They are computed once."""
        if self._expected is None:
            targets = {name: t for name, t in self._targets.items() if t.is_complete and not t.is_impossible}
            digests = self._digests.hexdigests(targets)
            self._expected = [
                {name: _expect(target, digests[name][i]) for name, target in targets.items()}
                for i in range(self._tp_size)
            ]
        return self._expected[rank]

    @property
    def names(self) -> list[str]:
        """Names of the server tensors, in the order of the stream."""
        return list(self._targets)

    @property
    def predicts_all(self) -> bool:
        """True if ``expected`` covers everything that was sent."""
        targets = self._targets.values()
        return bool(targets) and all(target.is_complete and not target.is_impossible for target in targets)


class StreamDigests:
    """Digests that servers of some layouts must have after a stream of weights.

    Equal layouts are computed once. A server with more ranks than ``kv_heads`` replicates them. ``sample`` has the
    names of the server tensors to compute; None computes all.
    """

    def __init__(self, layouts: Iterable[WeightLayout], kv_heads: int, sample: Collection[str] | None = None) -> None:
        self._sample = sample
        layouts = list(layouts)
        kinds = {(layout.algorithm, layout.tp_size) for layout in layouts if layout.plain}
        self._kinds = {kind: _LayoutDigests(*kind, kv_heads) for kind in sorted(kinds)}
        combined = {layout.algorithm for layout in layouts if not layout.plain}
        self._combined = {algorithm: TensorDigests(algorithm) for algorithm in sorted(combined)}

    def watch(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Pass the stream through and add its tensors."""
        for name, tensor in weights:
            self.add(name, tensor)
            yield name, tensor

    def add(self, name: str, tensor: Tensor) -> None:
        """Add one tensor in the dtype that is sent."""
        if name.endswith(_SHAPE):
            return  # metadata of INT4 experts that never changes
        slot = _target_slot(name)
        if self._sample is not None and slot.target not in self._sample:
            return
        # One contiguous copy for all layouts, if the tensor is not contiguous.
        tensor = tensor.detach().contiguous()
        # The tensors that no server can round away; see ``combined_digest``.
        if self._combined and (is_quantized(tensor) or tensor.dim() < 2 or is_never_quantized(name)):
            for digests in self._combined.values():
                digests.add(name, 0, tensor)
        held = tensor.float() if name.endswith(_HELD_IN_FP32) else tensor
        for layout in self._kinds.values():
            layout.add(slot, held)

    def expected(self, layout: WeightLayout, rank: int) -> dict[str, ExpectedDigest]:
        """Return the digests that can be predicted for one rank of a server, by the server's name."""
        return self._kinds[layout.algorithm, layout.tp_size].expected(rank) if layout.plain else {}

    def combined_digest(self, layout: WeightLayout) -> str | None:
        """Return one digest of everything that was sent, for a layout that is not plain.

        Covers only weights that such a server cannot round away: those sent quantized, vectors, embedding, output layer
        and routers. None if there are none.
        """
        digests = self._combined[layout.algorithm].hexdigests() if layout.algorithm in self._combined else {}
        text = "".join(f"{name} {digest} " for name, (digest,) in digests.items())
        return hashlib.sha256(text.encode()).hexdigest() if text else None

    @property
    def names(self) -> list[str]:
        """Names of the server tensors of all layouts, in the order of the stream."""
        return list(dict.fromkeys(name for layout in self._kinds.values() for name in layout.names))

    def predicts_all(self, layout: WeightLayout) -> bool:
        """Return True if ``expected`` covers everything that was sent."""
        return layout.plain and self._kinds[layout.algorithm, layout.tp_size].predicts_all


def _cut(tensor: Tensor, shard: _Shard, size: int, kv_heads: int) -> Cut | None:
    """Return the division of a tensor between the ranks of a server, or None if it cannot be sharded so."""
    item = tensor.element_size()
    if shard == "vocabulary":
        width = _rows_per_rank(len(tensor), size) * (tensor.numel() // len(tensor)) * item
        return Cut(size, 1, width, width, width)
    if shard == "replicated" or size == 1:
        return Cut(size, 1, tensor.nbytes, tensor.nbytes, 0)
    parts = size
    if shard == "sections":
        return None
    if shard == "heads" and size > kv_heads:
        if size % kv_heads:
            return None
        parts = kv_heads
    dim = 1 if shard == "columns" else 0
    if tensor.dim() <= dim or tensor.shape[dim] % parts:
        return None
    rows = len(tensor) if dim else 1
    width = tensor.nbytes // rows // parts
    # Consecutive ranks share a head.
    return Cut(size, rows, width, width * parts if dim else width, width, size // parts)


def _rows_per_rank(rows: int, size: int) -> int:
    """Return the rows of the padded vocabulary that each rank has."""
    # Below, -(-a // b) is a / b rounded up.
    multiple = _VOCABULARY_MULTIPLE
    # Servers pad to a multiple of the ranks as well, if the usual padding cannot be split evenly.
    if -(-rows // multiple) * multiple % size:
        multiple *= size
    return -(-rows // multiple) * multiple // size


def _expect(target: _Target, digest: str) -> ExpectedDigest:
    is_reordered = ".experts." in target.sent_as and target.sent_as.rpartition(".")[2] in _PACKED
    return ExpectedDigest(digest, target.sent_as, target.is_vector, is_reordered)
