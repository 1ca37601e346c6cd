"""Asks servers for the digests of their weights before and after a sync, and lets them be judged."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from megatron_dppo.rollout.server import InferenceServer, ServerInfo
from megatron_dppo.rollout.weight_digests import RankDigests, WeightLayout
from megatron_dppo.weights.attempt import Attempt
from megatron_dppo.weights.digests import StreamDigests
from megatron_dppo.weights.judge import ServerRecord


def kv_heads(model_folder: Path) -> int:
    """Key and value heads of a Hugging Face model; 1 where its configuration does not say."""
    try:
        config = json.loads((model_folder / "config.json").read_text())
    except OSError:
        return 1
    return int(config.get("num_key_value_heads") or config.get("num_attention_heads") or 1)


class WeightProofs:
    """The records of all servers of a run, by URL.

    Args:
        heads: key and value heads of the model.
    """

    def __init__(self, heads: int) -> None:
        self._heads = heads
        self._records: dict[str, ServerRecord] = {}
        self._versions: dict[str, int] = {}
        self._sums: dict[str, tuple[RankDigests, ...]] = {}

    async def begin(
        self, servers: Sequence[InferenceServer], attempt: Attempt, *, again: bool, sends: bool = True
    ) -> SyncProof:
        """Before anything is sent to the paused servers.

        Args:
            servers: that get the weights.
            attempt: notes who fails.
            again: the same weights as in the attempt before: a server that failed is compared with what it had then.
            sends: whether anything will be; otherwise a server knows nothing of how its tensors were loaded.
        """
        layouts: dict[str, WeightLayout] = {}

        async def ask(server: InferenceServer) -> None:
            layout = await server.weight_layout()
            layouts[server.url] = replace(layout, complete=layout.complete and sends)
            record = self._records.setdefault(server.url, ServerRecord())
            same = self._versions.get(server.url) == attempt.infos[server.url].policy_version
            if not record.known or not (same or again):
                record.begin(await server.weight_digests())

        await attempt.each(servers, ask)
        kept = {url: self._sums[url] for url in attempt.kept if url in self._sums}
        return SyncProof(self._records, layouts, StreamDigests(layouts.values(), self._heads), kept)

    def done(self, good: Sequence[str], version: int, proof: SyncProof | None) -> None:
        """Which servers have which version; another one that they name later is not from here."""
        self._versions |= dict.fromkeys(good, version)
        self._sums = {} if proof is None else proof.sums


class SyncProof:
    """One attempt's."""

    def __init__(
        self,
        records: dict[str, ServerRecord],
        layouts: dict[str, WeightLayout],
        stream: StreamDigests,
        kept: Mapping[str, tuple[RankDigests, ...]],
    ) -> None:
        self._records, self._layouts, self._stream = records, layouts, stream
        self.sums = dict(kept)
        """by URL: of the servers that were judged, and of those that have these weights by an attempt before"""
        self.exact = set[str]()
        """URLs of the servers that hold all tensors as sent, byte by byte"""

    def watch(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The stream that is sent, in the type that it is sent in; nothing may write into its tensors later."""
        return self._stream.watch(weights)

    async def judge(self, servers: Sequence[InferenceServer], attempt: Attempt) -> None:
        """Note in ``attempt`` who does not hold what was sent, and what could not be proved of the others."""
        sums: dict[str, tuple[RankDigests, ...]] = {}

        async def note(server: InferenceServer) -> None:
            sums[server.url] = await server.weight_digests()

        await attempt.each(servers, note)
        for url, ranks in sums.items():
            layout = self._layouts[url]
            expected = {rank.tp_rank: self._stream.expected(layout, rank.tp_rank) for rank in ranks}
            proof = self._records[url].judge(layout, ranks, expected, self._stream.whole(layout))
            if complaint := proof.complaint():
                attempt.failed[url] = complaint
            elif note_text := proof.note():
                attempt.notes[url] = note_text
            elif self._stream.foretells_all(layout):
                self.exact.add(url)
        self.sums |= sums
        _compare(self.sums, attempt, self.exact)


def _compare(sums: dict[str, tuple[RankDigests, ...]], attempt: Attempt, exact: set[str]) -> None:
    """Servers of one kind and layout must have the same bytes; those that are ``exact`` have them, whoever has not."""
    for kind in {_kind(attempt.infos[url]) for url in sums}:
        alike = {url: ranks for url, ranks in sums.items() if _kind(attempt.infos[url]) == kind}
        (common, _), *others = Counter(map(_fingerprint, alike.values())).most_common()
        for url, ranks in alike.items():
            if others and url not in exact and (_fingerprint(ranks) != common or len(alike) == 2):
                attempt.failed.setdefault(url, f"its weights differ from those of the other servers: {_names(alike)}")


def _fingerprint(ranks: Sequence[RankDigests]) -> frozenset[tuple[int, str, str]]:
    return frozenset((i, name, digest) for i, rank in enumerate(ranks) for name, digest in rank.digests.items())


def _names(alike: dict[str, tuple[RankDigests, ...]]) -> str:
    """Some of the tensors that are not the same everywhere."""
    every = [_fingerprint(ranks) for ranks in alike.values()]
    names = sorted({name for _, name, _ in frozenset.union(*every) - frozenset.intersection(*every)})
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _kind(info: ServerInfo) -> tuple[str, str, int]:
    return info.engine, info.engine_version, info.world_size
