"""Whether a server holds the weights that it was sent, judged by digests of its tensors.

Of each tensor the strongest that its server allows:

1. *as sent*: its digest is the one computed from the bytes that were sent; or, of a tensor whose form the server
   changed afterwards, the one that it had when it was loaded, and the changed form is not the old one.
2. *changed*: the server keeps it in a form of its own (packed, reordered, quantised), whose digest nobody can foretell;
   it differs from that before the sync if what was sent differs. And it equals that of the other servers of its kind.
3. *unproved*: neither, and ``Proof`` says so.

A server of which no tensor's form is known (quantised by itself, expert parallel) is judged by the second rule as a
whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_dppo.rollout.weight_digests import RankDigests, WeightLayout
from megatron_dppo.weights.digests import Expected

_NAMED = 4
"""Tensors that a message names; the others are counted."""
_ALL = "all weights"
_SCALES = ".weight_scale_inv", "w13_weight_scale_inv", "w2_weight_scale_inv"
Key = tuple[int, str]
"""(rank of the server, its name of a tensor)"""


@dataclass
class Proof:
    """What is known of one server's tensors after a sync."""

    as_sent: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    unproved: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    """tensors, by the names that they are sent under"""

    def complaint(self) -> str | None:
        """What is wrong, for the user."""
        if not self.wrong:
            return None
        return (
            f"{_listed(self.wrong)}: not what was sent, by the server's own checksum of its weights "
            f"({len(self.as_sent)} others are)"
        )

    def note(self) -> str | None:
        """What is not proved byte by byte."""
        parts = []
        if self.changed:
            parts.append(
                f"{_listed(self.changed)}: kept by the server in a form of its own; checked is only that the checksum "
                "changes with what is sent and equals that of the other servers"
            )
        if self.unproved:
            parts.append(f"{_listed(self.unproved)}: not checked in this sync, only by the probe")
        return "; ".join(parts) or None


def _listed(names: Sequence[str]) -> str:
    different = list(dict.fromkeys(names))
    more = f" and {len(different) - _NAMED} more" if len(different) > _NAMED else ""
    return ", ".join(different[:_NAMED]) + more


class ServerRecord:
    """What a server had after its last sync that was checked, and which of its tensors are known to be plain."""

    def __init__(self) -> None:
        self._plain: set[str] = set()
        self._sums: dict[Key, str] = {}
        self._sent: dict[Key, str] = {}
        self._whole: str | None = None

    @property
    def known(self) -> bool:
        """Whether there is something to compare with."""
        return bool(self._sums)

    def begin(self, before: Sequence[RankDigests]) -> None:
        """Compare with what the server has now, before it gets anything: it is new, or came back."""
        self._sums, self._sent, self._whole = _flat(before), {}, None

    def judge(
        self,
        layout: WeightLayout,
        ranks: Sequence[RankDigests],
        expected: Mapping[int, Mapping[str, Expected]],
        whole: str | None = None,
    ) -> Proof:
        """Compare; what is found is remembered when nothing is wrong.

        Args:
            layout: of the server.
            ranks: its digests after the sync.
            expected: by its rank: the digests that follow from what was sent.
            whole: of a layout that is not plain, of which no digest can be foretold: one of all that was sent.
        """
        found = _flat(ranks)
        if not layout.plain:
            return self._judge_whole(found, whole)
        wanted = {(rank, name): e for rank, names in expected.items() for name, e in names.items()}
        loaded = {(rank.tp_rank, name): digest for rank in ranks for name, digest in rank.loaded.items()}
        matches = {key for key, e in wanted.items() if _same(e, found.get(key)) or _same(e, loaded.get(key))}
        plain = self._plain | {_kind(name) for _, name in matches}
        proof = Proof()
        moved = any(found.get(key) != self._sums.get(key) for key in wanted)
        # A server that had these weights already, and changes none of them: some larger tensor shows it.
        idle = not moved and any(not wanted[key].is_vector for key in matches)
        strict = set(self._strict(layout, wanted, plain))
        has_scales = any(name.endswith(_SCALES) for _, name in found)
        for key, e in wanted.items():
            # Without its scale a quantised weight means nothing.
            lacks = key[1].endswith(_SCALES) and not has_scales
            where = "wrong" if lacks else self._judge_one(key, e, found, matches, strict, idle)
            getattr(proof, where).append(e.sent_as)
        if not proof.wrong:
            self._plain, self._sums = plain, found
            self._sent = {key: e.digest for key, e in wanted.items()}
        return proof

    def _judge_whole(self, found: dict[Key, str], whole: str | None) -> Proof:
        """All tensors of the server together: they change when what is sent does."""
        proof, before = Proof(), self._whole
        if whole is None or (before is None and found == self._sums):
            proof.unproved.append(_ALL)  # it may have had these weights already
        elif found == self._sums and whole != before:
            proof.wrong.append(_ALL)
        else:
            proof.changed.append(_ALL)
        if not proof.wrong:
            self._sums, self._whole = found, whole
        return proof

    def _judge_one(
        self, key: Key, e: Expected, found: Mapping[Key, str], matches: set[Key], strict: set[Key], idle: bool
    ) -> str:
        digest, before, sent = found.get(key), self._sums.get(key), self._sent.get(key)
        # A tensor that the server has under no name of its own (a tied head) is not known to be the old one.
        stale = digest is not None and digest == before and sent is not None and sent != e.digest
        if key in matches:
            # What was loaded is right; its changed form must not be the old one.
            return "wrong" if stale and not _same(e, digest) else "as_sent"
        if digest is None:
            return "unproved"
        if key in strict or stale:
            return "wrong"
        if digest != before or sent is not None:
            return "changed"
        return "unproved" if idle else "wrong"

    def _strict(self, layout: WeightLayout, wanted: Mapping[Key, Expected], plain: set[str]) -> Iterator[Key]:
        """Those that must be as sent, since nothing suggests that the server keeps them in a form of its own.

        Vectors, which no kernel reorders; a kind of tensor that was as sent elsewhere in the model or before; and one
        of which there is one alone (the embedding), where all kinds of which there are several are as sent.
        """
        counts: dict[str, int] = {}
        for _, name in wanted:
            counts[_kind(name)] = counts.get(_kind(name), 0) + 1
        several = {kind for kind, count in counts.items() if count > 1 and ".experts." not in kind}
        for key, e in wanted.items():
            kind = _kind(key[1])
            if e.own_form:
                continue
            if layout.complete or e.is_vector or kind in plain or (counts[kind] == 1 and several <= plain):
                yield key


def _kind(name: str) -> str:
    """The same for all layers."""
    return re.sub(r"\.\d+\.", ".N.", name)


def _flat(ranks: Sequence[RankDigests]) -> dict[Key, str]:
    return {(rank.tp_rank, name): digest for rank in ranks for name, digest in rank.digests.items()}


def _same(expected: Expected, digest: str | None) -> bool:
    """Servers may cut a digest short."""
    return bool(digest) and len(digest or "") >= 16 and expected.digest.startswith(digest or "")
