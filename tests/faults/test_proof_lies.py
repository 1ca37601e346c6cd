"""Servers that confirm new weights and hold different ones: the proof of that sync names them, whatever the fault."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_dppo.weights.attempt import SyncResult
from megatron_dppo.weights.ipc import MemorySharing
from megatron_dppo.weights.sync import WeightSync
from megatron_dppo_engines.server import ServerInfo
from megatron_dppo_engines.shared_memory import Handle
from megatron_dppo_engines.weight_digests import RankDigests, WeightLayout
from tests.unit.weight_server import FakeServer, make
from tests.unit.weights.test_weight_digests import EXPERTS, KV_HEADS, layer, on_server, sha

RANKS = 2
EMBEDDING, ROUTER = "model.embed_tokens.weight", "model.layers.0.mlp.gate.weight"
EXPERT = "model.layers.0.mlp.experts.{}.{}_proj.weight"
Weights = dict[str, Tensor]


class Server(FakeServer):
    """Two ranks that hold fused and divided tensors; ``lie`` changes what arrives, ``ranks_lie`` what they hold."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.lie: Callable[[Server, Weights], Weights] = lambda server, tensors: tensors
        self.ranks_lie: Callable[[Server, list[Weights]], list[Weights]] = lambda server, ranks: ranks
        self.bucket = 0
        self.old: list[Weights] = []
        """Tensors of the ranks before this update."""
        self.before: Weights = {}
        self.ranks: list[Weights] = []

    async def info(self) -> ServerInfo:
        return ServerInfo(
            engine="sglang", engine_version="1", model="m", policy_version=self.version, max_context=0, world_size=RANKS
        )

    async def begin_update(self) -> None:
        await super().begin_update()
        self.bucket, self.old, self.before = 0, self.ranks, dict(self.weights)

    async def receive_handles(
        self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], handles: Sequence[Handle]
    ) -> None:
        # Each rank has a handle of the same bytes; one is enough here.
        await super().receive_handles(names, dtypes, shapes, handles[:1])

    def _load(self, tensors: Weights) -> None:
        super()._load(self.lie(self, dict(tensors)))
        self.bucket += 1

    async def end_update(self, version: int) -> None:
        await super().end_update(version)
        self.ranks = self.ranks_lie(self, [on_server(self.weights, rank, RANKS) for rank in range(RANKS)])

    async def weight_layout(self) -> WeightLayout:
        return WeightLayout(algorithm="sha256", tp_size=RANKS, plain=True)

    async def weight_digests(self) -> tuple[RankDigests, ...]:
        digests = [{name: sha(tensor) for name, tensor in rank.items()} for rank in self.ranks]
        return tuple(RankDigests(tp_rank=i, digests=digest) for i, digest in enumerate(digests))


def weights(version: int) -> Weights:
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(tensor.shape, generator=generator) for name, tensor in layer().items()}


def without(names: set[str]) -> Callable[[Server, Weights], Weights]:
    return lambda server, tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


def skips_a_bucket(server: Server, tensors: Weights) -> Weights:
    return {} if server.bucket == 3 else tensors


def skips_all(server: Server, tensors: Weights) -> Weights:
    return {}


def swaps(one: str, other: str) -> Callable[[Server, Weights], Weights]:
    """Two tensors of one shape change places, in whatever buckets they are."""
    places = {one: other, other: one}
    return lambda server, tensors: {places.get(name, name): tensor for name, tensor in tensors.items()}


def rounds(server: Server, tensors: Weights) -> Weights:
    return {name: tensor.bfloat16().float() for name, tensor in tensors.items()}


def rounds_one(server: Server, tensors: Weights) -> Weights:
    return {name: tensor.bfloat16().float() if name == ROUTER else tensor for name, tensor in tensors.items()}


def flips_a_bit(server: Server, tensors: Weights) -> Weights:
    if EMBEDDING in tensors:
        tensors[EMBEDDING] = tensors[EMBEDDING].clone()
        tensors[EMBEDDING].view(torch.int32)[-1, -1] ^= 1
    return tensors


def averages(server: Server, tensors: Weights) -> Weights:
    """A running mean of old and new weights."""
    return {name: (tensor + server.before[name]) / 2 for name, tensor in tensors.items()}


def applies_twice(server: Server, tensors: Weights) -> Weights:
    """A difference that is added to weights which have it already."""
    return {name: 2 * tensor - server.before[name] for name, tensor in tensors.items()}


def one_rank_only(server: Server, ranks: list[Weights]) -> list[Weights]:
    return [ranks[0], server.old[1]]


def ranks_change_places(server: Server, ranks: list[Weights]) -> list[Weights]:
    return ranks[::-1]


def one_tensor_on_one_rank(server: Server, ranks: list[Weights]) -> list[Weights]:
    name = "model.layers.0.mlp.experts.w2_weight"
    return [ranks[0], ranks[1] | {name: server.old[1][name]}]


def garbage_in_padding(server: Server, ranks: list[Weights]) -> list[Weights]:
    ranks[1][EMBEDDING][-1, -1] = 1
    return ranks


def one_rank_is_silent(server: Server, ranks: list[Weights]) -> list[Weights]:
    return ranks[:1]


ARRIVING = {
    "skips all": skips_all,
    "skips a bucket": skips_a_bucket,
    "lacks a vector": without({"model.norm.weight"}),
    "lacks an expert's matrix": without({EXPERT.format(EXPERTS - 1, "down")}),
    "lacks a third of a fusion": without({"model.layers.0.self_attn.k_proj.weight"}),
    "swaps two experts": swaps(EXPERT.format(0, "up"), EXPERT.format(1, "up")),
    "swaps gate and up": swaps(EXPERT.format(2, "gate"), EXPERT.format(2, "up")),
    "swaps k and v": swaps("model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.v_proj.weight"),
    "swaps embedding and output": swaps(EMBEDDING, "lm_head.weight"),
    "rounds": rounds,
    "rounds the router": rounds_one,
    "flips a bit": flips_a_bit,
    "averages": averages,
    "applies twice": applies_twice,
}
HELD = {
    "one rank only": one_rank_only,
    "ranks change places": ranks_change_places,
    "one tensor on one rank": one_tensor_on_one_rank,
    "garbage in the padding": garbage_in_padding,
    "one rank is silent": one_rank_is_silent,
}
OF_ALL = {"skips all", "rounds", "averages", "applies twice", "one rank only", "one rank is silent"}
"""Lies in all or most tensors, which any sample has some of."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"num_key_value_heads": KV_HEADS}))
    return path


def start_to_lie(server: Server, name: str) -> None:
    if name in ARRIVING:
        server.lie = ARRIVING[name]
    else:
        server.ranks_lie = HELD[name]


def run(servers: list[Server], folder: Path, every: int) -> Iterator[SyncResult]:
    """Syncs without end, several buckets each."""
    owners = {server.url: [0] * RANKS for server in servers}
    sharing = MemorySharing(owners, 600, torch.float32, tied=False, group=None)
    sync: WeightSync = make(servers, folder, sharing=sharing, checksum_every=every)  # type: ignore[arg-type]
    for version in range(10**9):
        yield sync.send(iter(weights(version).items()), version)


def servers_of(*names: str) -> list[Server]:
    return [Server(f"{name}:1") for name in names]


@pytest.mark.parametrize("name", [*ARRIVING, *HELD])
def test_a_lie_is_found_in_its_sync_by_the_full_proof_and_by_the_comparison_of_servers(name: str, folder: Path) -> None:
    for every in (1, 4):
        for count in (1, 3):
            servers = servers_of(*"abc"[:count])
            syncs = run(servers, folder, every)
            # With 4, the next sync checks a sample.
            for _ in range(2 if every == 1 else 1):
                result = next(syncs)
                assert len(result.good) == count and not result.notes
            start_to_lie(servers[0], name)
            result = next(syncs)
            if every == 1 or count == 3 or name in OF_ALL:
                assert result.failed.keys() == {servers[0].url}, (every, count)
                assert result.good.keys() == {server.url for server in servers[1:]}


@pytest.mark.parametrize("name", [*ARRIVING, *HELD])
def test_between_full_proofs_a_lie_of_a_single_server_lasts_until_the_next_one(name: str, folder: Path) -> None:
    (server,) = servers_of("a")
    syncs = run([server], folder, 4)
    for _ in range(5):
        assert next(syncs).good
    start_to_lie(server, name)
    has_failed = [bool(next(syncs).failed) for _ in range(4)]
    assert any(has_failed)


def test_a_server_that_a_sample_shows_to_be_wrong_says_nothing_about_the_other_one(folder: Path) -> None:
    servers = servers_of("a", "b")
    syncs = run(servers, folder, 9)
    assert len(next(syncs).good) == 2
    start_to_lie(servers[1], "skips all")
    result = next(syncs)
    assert result.good.keys() == {servers[0].url} and result.failed.keys() == {servers[1].url}


def test_of_two_servers_that_differ_in_a_sample_a_retry_keeps_the_right_one(folder: Path) -> None:
    for name in ("flips a bit", "skips a bucket", "one tensor on one rank"):
        servers = servers_of("a", "b")
        owners = {server.url: [0] * RANKS for server in servers}
        sharing = MemorySharing(owners, 600, torch.float32, tied=False, group=None)
        sync: WeightSync = make(servers, folder, sharing=sharing, checksum_every=9)  # type: ignore[arg-type]
        assert len(sync.send(iter(weights(0).items()), 0).good) == 2
        start_to_lie(servers[1], name)
        first = sync.send(iter(weights(1).items()), 1)
        assert servers[1].url in first.failed
        again = sync.send(iter(weights(1).items()), 1, first.good)
        assert again.good.keys() == {servers[0].url} and again.failed.keys() == {servers[1].url}
