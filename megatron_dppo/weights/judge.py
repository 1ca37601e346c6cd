"""Verification that a server holds the weights that it was sent, by digests of its tensors.

Each tensor gets the strongest result that its server allows:

1. *as sent*: its digest is the one computed from the bytes that were sent. Or, for a tensor whose form the server
   changed afterwards, the digest at loading is that one, and the changed form is not the old one.
2. *changed*: the server keeps the tensor in a form of its own (packed, reordered, quantized), whose digest cannot be
   predicted. It differs from before the sync if what was sent differs, and it equals that of other servers of its kind.
3. *unproved*: neither, and ``Proof`` says so.

A server whose tensors all have unknown forms (quantized by itself, expert parallel) is verified by the second rule with
all tensors together.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from megatron_dppo.weights.digests import ExpectedDigest
from megatron_dppo_engines.weight_digests import RankDigests, WeightLayout

_MAX_NAMES = 4
"""Number of tensors that a message names; the others are counted."""
_ALL = "all weights"
_SCALES = ".weight_scale_inv", "w13_weight_scale_inv", "w2_weight_scale_inv"
_SHORTEST_DIGEST = 16
TensorKey = tuple[int, str]
"""Rank of the server and its name of a tensor."""
_Verdict = Literal["as_sent", "changed", "unproved", "wrong"]
"""Field of ``Proof`` that a tensor belongs to."""


@dataclass
class Proof:
    """Results for one server's tensors after a sync, by the names that they are sent under."""

    as_sent: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    unproved: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def describe_mismatch(self) -> str | None:
        """Return what is wrong, for the user, or None."""
        if not self.wrong:
            return None
        return (
            f"{_join_names(self.wrong)}: not what was sent, by the server's own checksum of its weights "
            f"({len(self.as_sent)} others are)"
        )

    def describe_unproved(self) -> str | None:
        """Return what is not proved byte by byte, for the user, or None."""
        parts = []
        if self.changed:
            parts.append(
                f"{_join_names(self.changed)}: kept by the server in a form of its own; checked is only that the "
                "checksum changes with what is sent and equals that of the other servers"
            )
        if self.unproved:
            parts.append(f"{_join_names(self.unproved)}: not checked in this sync, only by the probe")
        return "; ".join(parts) or None


def _join_names(names: Sequence[str]) -> str:
    unique = list(dict.fromkeys(names))
    more = f" and {len(unique) - _MAX_NAMES} more" if len(unique) > _MAX_NAMES else ""
    return ", ".join(unique[:_MAX_NAMES]) + more


class ServerRecord:
    """Digests of a server after its last verified sync, and the kinds of tensors that it is known to hold as sent."""

    def __init__(self) -> None:
        self._plain_kinds: set[str] = set()
        self._held: dict[TensorKey, str] = {}
        self._sent: dict[TensorKey, str] = {}
        self._combined: str | None = None
        self.is_exact = False
        """True if all tensors in use were as sent in the last proof, so that a sample of them can stand for all."""

    @property
    def has_digests(self) -> bool:
        """True if there are digests to compare with."""
        return bool(self._held)

    def begin(self, before: Sequence[RankDigests]) -> None:
        """Start from the digests of a server that is new or came back, before it gets any weights."""
        self._held = _flatten(before)
        self._sent = {}
        self._combined = None
        self.is_exact = False

    def verify(
        self,
        layout: WeightLayout,
        ranks: Sequence[RankDigests],
        expected: Mapping[int, Mapping[str, ExpectedDigest]],
        combined: str | None = None,
    ) -> Proof:
        """Compare digests after a sync, and remember them if nothing is wrong.

        ``expected`` are the digests that follow from what was sent, by rank and the server's name; ``combined`` is that
        of all of it, for a layout whose digests cannot be predicted.
        """
        held = _flatten(ranks)
        self.is_exact = False
        if not layout.plain:
            return self._verify_combined(held, combined)
        wanted = {(rank, name): e for rank, names in expected.items() for name, e in names.items()}
        loaded = {(rank.tp_rank, name): digest for rank in ranks for name, digest in rank.loaded.items()}
        matches = {key for key, e in wanted.items() if _matches(e, held.get(key)) or _matches(e, loaded.get(key))}
        plain_kinds = self._plain_kinds | {_kind(name) for _, name in matches}
        proof = Proof()
        has_changed = any(held.get(key) != self._held.get(key) for key in wanted)
        # The server had these weights already, so no digest can change. A matching tensor with content shows it;
        # vectors often have equal values in different weights.
        is_same_weights = not has_changed and any(not wanted[key].is_vector for key in matches)
        strict = set(self._strict_keys(layout, wanted, plain_kinds))
        has_scales = any(name.endswith(_SCALES) for _, name in held)
        for key, e in wanted.items():
            # A quantized weight without its scale is useless.
            lacks_scale = key[1].endswith(_SCALES) and not has_scales
            verdict = "wrong" if lacks_scale else self._verify_tensor(key, e, held, matches, strict, is_same_weights)
            getattr(proof, verdict).append(e.sent_as)
        if not proof.wrong:
            self.is_exact = all(_matches(e, held.get(key)) for key, e in wanted.items())
            self._plain_kinds = plain_kinds
            self._held = held
            self._sent = {key: e.digest for key, e in wanted.items()}
        return proof

    def verify_sample(
        self, ranks: Sequence[RankDigests], expected: Mapping[int, Mapping[str, ExpectedDigest]]
    ) -> Proof:
        """Compare a sample of the tensors of a server that is exact, without a change of the record."""
        proof = Proof()
        held = _flatten(ranks)
        for rank, names in expected.items():
            for name, e in names.items():
                (proof.as_sent if _matches(e, held.get((rank, name))) else proof.wrong).append(e.sent_as)
        return proof

    def _verify_combined(self, held: dict[TensorKey, str], combined: str | None) -> Proof:
        """Verify all tensors together: they change if what is sent changes."""
        proof = Proof()
        before = self._combined
        if combined is None or (before is None and held == self._held):
            proof.unproved.append(_ALL)  # the server may have had these weights already
        elif held == self._held and combined != before:
            proof.wrong.append(_ALL)
        else:
            proof.changed.append(_ALL)
        if not proof.wrong:
            self._held = held
            self._combined = combined
        return proof

    def _verify_tensor(
        self,
        key: TensorKey,
        expected: ExpectedDigest,
        held: Mapping[TensorKey, str],
        matches: set[TensorKey],
        strict: set[TensorKey],
        is_same_weights: bool,
    ) -> _Verdict:
        digest = held.get(key)
        before = self._held.get(key)
        sent_before = self._sent.get(key)
        # A tensor without a name of its own in the server (a tied output layer) is not known to be the old one.
        is_stale = (
            digest is not None and digest == before and sent_before is not None and sent_before != expected.digest
        )
        if key in matches:
            # The loaded tensor is right; its changed form must not be the old one.
            return "wrong" if is_stale and not _matches(expected, digest) else "as_sent"
        if digest is None:
            return "unproved"
        if key in strict or is_stale:
            return "wrong"
        if digest != before or sent_before is not None:
            return "changed"
        return "unproved" if is_same_weights else "wrong"

    def _strict_keys(
        self, layout: WeightLayout, wanted: Mapping[TensorKey, ExpectedDigest], plain_kinds: set[str]
    ) -> Iterator[TensorKey]:
        """Yield the tensors that must be as sent, because nothing suggests that the server changes their form.

        These are vectors, which no kernel reorders, and kinds of tensors that were as sent elsewhere in the model or
        before. A kind with a single tensor (the embedding) is strict if all kinds with several tensors are as sent.
        """
        counts = Counter(_kind(name) for _, name in wanted)
        repeated = {kind for kind, count in counts.items() if count > 1 and ".experts." not in kind}
        for key, e in wanted.items():
            kind = _kind(key[1])
            if e.is_reordered:
                continue
            if layout.complete or e.is_vector or kind in plain_kinds or (counts[kind] == 1 and repeated <= plain_kinds):
                yield key


@lru_cache(maxsize=1 << 16)
def _kind(name: str) -> str:
    """Return a tensor's name without its layer."""
    return re.sub(r"\.\d+\.", ".N.", name)


def _flatten(ranks: Sequence[RankDigests]) -> dict[TensorKey, str]:
    return {(rank.tp_rank, name): digest for rank in ranks for name, digest in rank.digests.items()}


def _matches(expected: ExpectedDigest, digest: str | None) -> bool:
    """Return True for an equal digest; servers may truncate theirs."""
    return bool(digest) and len(digest or "") >= _SHORTEST_DIGEST and expected.digest.startswith(digest or "")
