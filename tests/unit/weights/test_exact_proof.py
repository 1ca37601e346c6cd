"""Which servers count as exact, and which servers are compared with each other."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_dppo.export.quantization import Quantization, quantize_stream
from megatron_dppo.weights.attempt import Attempt
from megatron_dppo.weights.digests import StreamDigests
from megatron_dppo.weights.proof import SyncProof, WeightProofs
from megatron_dppo_engines.server import ServerInfo
from megatron_dppo_engines.serving.vllm_extension.megatron_dppo_digest import TensorDigests
from megatron_dppo_engines.weight_digests import RankDigests, WeightLayout
from tests.unit.weights.test_weight_digests import HIDDEN, KV_HEADS, layer, on_server, sha

Held = list[dict[str, str]]
"""Digests of each rank of a server."""


class Server:
    """A server that reports digests, first those from before the sync."""

    def __init__(self, layout: WeightLayout, after: Held, *, engine: str = "sglang", world_size: int = 0) -> None:
        self.layout = layout
        self.before = [{name: sha(torch.zeros(3)) for name in rank} for rank in after]
        self.after = after
        size = world_size or layout.tp_size
        self.info = ServerInfo(
            engine=engine,  # type: ignore[arg-type]
            engine_version="1",
            model="m",
            policy_version=3,
            max_context=99,
            world_size=size,
        )
        self.is_synced = False
        self.only: set[int] | None = None
        """Ranks that it reports. None: all."""

    async def weight_layout(self) -> WeightLayout:
        return self.layout

    async def weight_digests(self) -> tuple[RankDigests, ...]:
        held = self.after if self.is_synced else self.before
        ranks = tuple(RankDigests(tp_rank=rank, digests=digests) for rank, digests in enumerate(held))
        return tuple(rank for rank in ranks if self.only is None or rank.tp_rank in self.only)


def sync(
    servers: Mapping[str, Server], weights: Mapping[str, Tensor], *, sends: bool = True
) -> tuple[SyncProof, Attempt]:
    """Send weights to all servers and compare their digests."""

    async def run() -> tuple[SyncProof, Attempt]:
        attempt = Attempt(4, {})
        attempt.infos = {url: server.info for url, server in servers.items()}
        named: list[Any] = [SimpleNamespace(url=url, **methods(server)) for url, server in servers.items()]
        proof = await WeightProofs(KV_HEADS).begin(named, attempt, is_full=True, sends=sends)
        list(proof.stream.watch(iter(weights.items())))
        for server in servers.values():
            server.is_synced = True
        await proof.verify(named, attempt)
        return proof, attempt

    return asyncio.run(run())


def methods(server: Server) -> dict[str, Any]:
    return {"weight_layout": server.weight_layout, "weight_digests": server.weight_digests}


def plain(tp_size: int, **more: Any) -> WeightLayout:
    return WeightLayout(algorithm="sha256", tp_size=tp_size, plain=True, **more)


def held(weights: dict[str, Tensor], tp_size: int) -> Held:
    ranks = [on_server(weights, rank, tp_size) for rank in range(tp_size)]
    return [{name: sha(tensor) for name, tensor in rank.items()} for rank in ranks]


def test_a_server_is_exact_only_if_every_tensor_that_was_sent_is_proved() -> None:
    weights = layer()
    digests = held(weights, 2)
    nameless = [{name: digest for name, digest in rank.items() if name != "lm_head.weight"} for rank in digests]
    proof, attempt = sync({"all": Server(plain(2), digests), "nameless": Server(plain(2), nameless)}, weights)
    assert proof.exact == {"all"}
    assert "lm_head.weight" in attempt.notes["nameless"] and "all" not in attempt.notes

    # Without k the server's joined q, k and v cannot be predicted; all that can be is right.
    incomplete = {name: w for name, w in weights.items() if "k_proj" not in name}
    proof, attempt = sync({"s": Server(plain(2), digests)}, incomplete)
    assert not proof.exact and not attempt.failed and not attempt.notes

    # Three ranks cannot share 16 columns.
    norm, columns = torch.randn(HIDDEN), torch.randn(HIDDEN, 16)
    sent = {"model.norm.weight": norm, "model.layers.0.self_attn.o_proj.weight": columns}
    replicated: Held = [{"model.norm.weight": sha(norm)} for _ in range(3)]
    proof, attempt = sync({"s": Server(plain(3), replicated)}, sent)
    assert not proof.exact and not attempt.failed and not attempt.notes

    proof, attempt = sync({"s": Server(plain(1), [{"model.norm.weight": sha(norm)}])}, {})
    assert not proof.exact, "nothing was sent, so nothing is proved"


@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize("neighbors", [0, 1, 2])
def test_a_server_that_reports_a_part_of_its_ranks_fails(missing: int, neighbors: int) -> None:
    """A tensor that a rank does not report is not proved, however right the other one is or its peers."""
    weights = layer()
    digests = held(weights, 2)
    partial = Server(plain(2), digests)
    partial.only = {0, 1} - {missing}
    honest = {f"honest {i}": Server(plain(2), digests) for i in range(neighbors)}
    proof, attempt = sync({"partial": partial, **honest}, weights)
    assert attempt.failed == {"partial": f"reports weights of ranks [{1 - missing}], expected all of 2"}
    assert proof.exact == set(honest)


@pytest.mark.parametrize("size", [1, 2])
def test_quantized_weights_without_any_scale_are_wrong_and_not_merely_unproved(size: int) -> None:
    """A tensor without a name of its own in the server may be unproved. A scale without one is not in use."""
    weights = {
        "model.norm.weight": torch.randn(128).bfloat16(),
        "model.layers.0.self_attn.o_proj.weight": torch.randn(128, 256).bfloat16(),
        "model.layers.0.mlp.down_proj.weight": torch.randn(128, 256).bfloat16(),
    }
    sent = dict(quantize_stream(iter(weights.items()), Quantization("fp8")))
    scales = {name for name in sent if name.endswith("_scale_inv")}
    stream = StreamDigests([plain(size)], KV_HEADS)
    list(stream.watch(iter(sent.items())))
    digests = [{name: e.digest for name, e in stream.expected(plain(size), rank).items()} for rank in range(size)]
    without = [{name: d for name, d in rank.items() if not name.endswith("_scale_inv")} for rank in digests]
    assert scales and all(len(a) > len(b) for a, b in zip(digests, without, strict=True))
    proof, attempt = sync({"all": Server(plain(size), digests), "none": Server(plain(size), without)}, sent)
    assert "all" in proof.exact and "none" not in proof.exact
    assert "_scale_inv" in attempt.failed["none"] and "not what was sent" in attempt.failed["none"]


def test_digests_that_cover_everything_are_those_of_a_plain_layout_without_an_impossible_part() -> None:
    layouts = [plain(1), WeightLayout(algorithm="sha256", tp_size=1, plain=False), plain(3)]
    stream = StreamDigests(layouts, KV_HEADS)
    list(stream.watch(layer().items()))
    assert [stream.predicts_all(layout) for layout in layouts] == [True, False, False]
    # Two experts of a layer, of which three ranks can share one: the joined tensor is not predicted from that one.
    name = "model.layers.0.mlp.experts.{}.gate_proj.weight"
    stream = StreamDigests([plain(3)], KV_HEADS)
    stream.add(name.format(0), torch.randn(6, 4))
    assert stream.expected(plain(3), 0).keys() == {"model.layers.0.mlp.experts.w13_weight"}
    stream.add(name.format(1), torch.randn(4, 4))
    assert not stream.expected(plain(3), 0) and not stream.predicts_all(plain(3))


def test_expected_digests_are_read_once_for_all_servers_of_a_layout() -> None:
    weights = layer()
    servers = {f"s{i}": Server(plain(2), held(weights, 2)) for i in range(3)}
    servers["larger"] = Server(plain(4), held(weights, 4), world_size=4)
    with mock.patch.object(TensorDigests, "hexdigests", autospec=True, side_effect=TensorDigests.hexdigests) as reads:
        proof, _ = sync(servers, weights)
    assert reads.call_count == 2 and proof.exact == servers.keys()
    # Once, too, for all servers whose digests cannot be predicted.
    quantized = WeightLayout(algorithm="sha256", tp_size=2, plain=False)
    servers = {f"s{i}": Server(quantized, held(weights, 2)) for i in range(3)}
    with mock.patch.object(TensorDigests, "hexdigests", autospec=True, side_effect=TensorDigests.hexdigests) as reads:
        sync(servers, weights)
    assert reads.call_count == 1


def test_samples_have_one_of_eight_neighbors_and_any_of_them() -> None:
    proofs = WeightProofs(KV_HEADS)
    names = [f"w{i}" for i in range(20)]
    proofs.record([], 0, SimpleNamespace(digests={}, is_full=True, stream=SimpleNamespace(names=names)))  # type: ignore[arg-type]
    samples = [proofs.draw_sample() for _ in range(500)]
    for sample in samples:
        assert sorted(int(name[1:]) // 8 for name in sample) == [0, 1, 2]
    assert set.union(*samples) == set(names)


def test_servers_are_compared_rank_by_rank_with_those_of_their_own_kind() -> None:
    layout = WeightLayout(algorithm="sha256", tp_size=2, plain=False)
    one, two = sha(torch.ones(2)), sha(torch.ones(3))
    name = "model.layers.0.mlp.experts.w13_weight"
    servers = {
        "a": Server(layout, [{name: one}, {name: two}]),
        "b": Server(layout, [{name: one}, {name: two}]),
        # The parts of the ranks have changed places.
        "swapped": Server(layout, [{name: two}, {name: one}]),
        # Other engines and sizes have other tensors, so they differ from all others.
        "larger": Server(layout, [{name: two}, {name: two}], world_size=4),
        "vllm": Server(layout, [{name: one}, {name: one}], engine="vllm"),
    }
    _, attempt = sync(servers, {"model.norm.weight": torch.ones(HIDDEN)})
    assert attempt.failed == {"swapped": f"its weights differ from those of the other servers: {name}"}


def test_loaded_digests_are_expected_only_of_a_server_that_loads_something() -> None:
    """Both o_proj are packed after loading; no load happens where the tensors are shared."""
    packed = {f"model.layers.{i}.self_attn.o_proj.weight": torch.randn(4, 4) for i in range(2)}
    embedding = torch.randn(64, HIDDEN)
    after = {"model.embed_tokens.weight": sha(embedding)} | dict.fromkeys(packed, "a" * 64)
    for sends in (True, False):
        server = Server(plain(1, complete=True), [after])
        server.before = [dict(after)]
        _, attempt = sync({"s": server}, packed | {"model.embed_tokens.weight": embedding}, sends=sends)
        assert bool(attempt.failed) == sends
