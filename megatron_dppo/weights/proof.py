"""Proof of a weight sync: the servers' digests before and after it, compared with what was sent.

A full proof computes the digest of every tensor that is sent. Between two of them a check may compare a random sample
of the tensors, if the last full proof showed that each server uses all tensors exactly as they were sent. Both compare
the digests of all tensors between servers.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

from megatron_dppo.weights.attempt import Attempt
from megatron_dppo.weights.digests import StreamDigests
from megatron_dppo.weights.judge import ServerRecord
from megatron_dppo_engines.server import InferenceServer, ServerInfo
from megatron_dppo_engines.weight_digests import RankDigests, WeightLayout

_Digests = dict[str, tuple[RankDigests, ...]]
_SAMPLE_EVERY = 8
"""Tensors of a server from which a check between two full proofs takes one."""


def read_num_kv_heads(model_folder: Path) -> int:
    """Return the number of key and value heads of a Hugging Face model; 1 if its configuration does not name it."""
    try:
        config = json.loads((model_folder / "config.json").read_text())
    except OSError:
        return 1
    return int(config.get("num_key_value_heads") or config.get("num_attention_heads") or 1)


class WeightProofs:
    """Records of all servers of a run, by URL."""

    def __init__(self, num_kv_heads: int) -> None:
        self._num_kv_heads = num_kv_heads
        self._records: dict[str, ServerRecord] = {}
        self._versions: dict[str, int] = {}
        self._digests: _Digests = {}
        # From the system's entropy, so that no fault meets the same sample in every run.
        self._random = Random()
        self._names: list[str] = []
        """Server tensors of the last full proof, in the order in which they are sent."""

    async def begin(
        self,
        servers: Sequence[InferenceServer],
        attempt: Attempt,
        *,
        is_full: bool,
        is_retry: bool = False,
        sends: bool = True,
    ) -> SyncProof:
        """Start the proof of a sync, before anything is sent to the paused servers.

        After a failed attempt to send the same weights (``is_retry``), a server that failed is compared with its
        digests from before that attempt. Without ``sends`` a server has no digests of tensors as they were loaded.
        """
        layouts: dict[str, WeightLayout] = {}

        async def read_state(server: InferenceServer) -> None:
            layout = await server.weight_layout()
            layouts[server.url] = replace(layout, complete=layout.complete and sends)
            record = self._records.setdefault(server.url, ServerRecord())
            # Another version means that the server restarted or was updated by someone else.
            is_unchanged = self._versions.get(server.url) == attempt.infos[server.url].policy_version
            if not record.has_digests or not (is_unchanged or is_retry):
                record.begin(await server.weight_digests())

        await attempt.call_each(servers, read_state)
        synced = {url: self._digests[url] for url in attempt.synced if url in self._digests}
        # A server that came back, or that changes the form of its tensors, gets a full proof, and so do the others.
        can_sample = all(self._records[url].is_exact for url in layouts)
        sample = None if is_full or not can_sample else self.draw_sample()
        stream = StreamDigests(layouts.values(), self._num_kv_heads, sample)
        return SyncProof(self._records, layouts, stream, synced, is_full=sample is None)

    def draw_sample(self) -> set[str]:
        """Return one of each few tensors that follow each other, so that a part of the stream is not left out."""
        groups = (self._names[i : i + _SAMPLE_EVERY] for i in range(0, len(self._names), _SAMPLE_EVERY))
        return {self._random.choice(group) for group in groups}

    def record(self, good: Sequence[str], version: int, proof: SyncProof | None) -> None:
        """Record the servers that have a version. A server that later reports another one got it elsewhere."""
        self._versions |= dict.fromkeys(good, version)
        self._digests = {} if proof is None else proof.digests
        if proof is not None and proof.is_full:
            self._names = proof.stream.names


class SyncProof:
    """Proof of one attempt."""

    def __init__(
        self,
        records: dict[str, ServerRecord],
        layouts: dict[str, WeightLayout],
        stream: StreamDigests,
        synced: Mapping[str, tuple[RankDigests, ...]],
        *,
        is_full: bool = True,
    ) -> None:
        self.is_full = is_full
        """True if every tensor is checked, and not a sample of them."""
        self._records = records
        self._layouts = layouts
        self.stream = stream
        self.digests = dict(synced)
        """Digests of the servers that were verified in this attempt or an earlier one at the same weights, by URL."""
        self.exact = set[str]()
        """URLs of the servers that hold all tensors as sent, byte by byte."""

    async def verify(self, servers: Sequence[InferenceServer], attempt: Attempt) -> None:
        """Compare the servers' digests with what was sent; ``attempt`` gets mismatches and what is not proved."""
        digests: _Digests = {}

        async def read_digests(server: InferenceServer) -> None:
            digests[server.url] = await server.weight_digests()

        await attempt.call_each(servers, read_digests)
        combined = {layout: self.stream.combined_digest(layout) for layout in set(self._layouts.values())}
        for url, ranks in digests.items():
            layout = self._layouts[url]
            record = self._records[url]
            expected = {rank: self.stream.expected(layout, rank) for rank in range(layout.tp_size)}
            reported = {rank.tp_rank for rank in ranks}
            if layout.plain and not reported >= expected.keys():
                attempt.failed[url] = f"reports weights of ranks {sorted(reported)}, expected all of {layout.tp_size}"
                continue
            if self.is_full:
                proof = record.verify(layout, ranks, expected, combined[layout])
            else:
                proof = record.verify_sample(ranks, expected)
            record.is_exact = not proof.wrong and record.is_exact and self.stream.predicts_all(layout)
            if mismatch := proof.describe_mismatch():
                attempt.failed[url] = mismatch
            elif unproved := proof.describe_unproved():
                attempt.notes[url] = unproved
            elif self.is_full and self.stream.predicts_all(layout):
                self.exact.add(url)
        self.digests |= digests
        _compare_servers({url: d for url, d in self.digests.items() if url not in attempt.failed}, attempt, self.exact)


def _compare_servers(digests: _Digests, attempt: Attempt, exact: set[str]) -> None:
    """Fail servers whose bytes differ from those of the other servers of the same kind.

    A server in ``exact`` is right even if the others differ. Of two servers that differ, neither is known to be right,
    so both fail.
    """
    for kind in {_kind(attempt.infos[url]) for url in digests}:
        same_kind = {url: ranks for url, ranks in digests.items() if _kind(attempt.infos[url]) == kind}
        # With three or more servers, the most common bytes count as right.
        (common, _), *different = Counter(map(_fingerprint, same_kind.values())).most_common()
        for url, ranks in same_kind.items():
            if different and url not in exact and (_fingerprint(ranks) != common or len(same_kind) == 2):
                text = f"its weights differ from those of the other servers: {_differing_names(same_kind)}"
                attempt.failed.setdefault(url, text)


def _fingerprint(ranks: Sequence[RankDigests]) -> frozenset[tuple[int, str, str]]:
    return frozenset((i, name, digest) for i, rank in enumerate(ranks) for name, digest in rank.digests.items())


def _differing_names(digests: _Digests) -> str:
    """Return some of the tensors that differ between servers, for a message."""
    fingerprints = [_fingerprint(ranks) for ranks in digests.values()]
    names = sorted({name for _, name, _ in frozenset.union(*fingerprints) - frozenset.intersection(*fingerprints)})
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _kind(info: ServerInfo) -> tuple[str, str, int]:
    return info.engine, info.engine_version, info.world_size
