"""Requests of all ranks at the start of a step: how many each server gets."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_dppo.config.schema import Config
from megatron_dppo.engines import server_engine
from megatron_dppo.engines.server_engine import ServerEngine
from megatron_dppo.errors import ServerError
from megatron_dppo.rollout.engine import GroupRequest
from megatron_dppo.setup.engines import build_sampling_engine, rollout_sampling_params
from megatron_dppo.types import Prompt
from megatron_dppo_engines.servers.spread import spread_requests
from tests.unit.configs import config
from tests.unit.engines.test_server_engine import FakeTokenizer

HF = SimpleNamespace(vocab_size=300, eos_token_id=2)


@pytest.fixture(autouse=True)
def dense_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_engine, "routing_shape", lambda hf_config: None)


class Servers:
    """Servers that hold every request, shared by the engines of all ranks."""

    def __init__(self, count: int) -> None:
        self.urls = [f"http://s{i}:80" for i in range(count)]
        self.prompts: dict[str, Counter[int]] = {url: Counter() for url in self.urls}
        self._lock = threading.Lock()

    @property
    def loads(self) -> list[int]:
        with self._lock:
            return [sum(prompts.values()) for prompts in self.prompts.values()]

    def clients(self) -> list[Any]:
        return [SimpleNamespace(url=url, generate=self._holder(url), close=self._nothing) for url in self.urls]

    def _holder(self, url: str) -> Any:
        async def hold(request: Any) -> Any:
            with self._lock:
                self.prompts[url][request.token_ids[0]] += 1
            await asyncio.Event().wait()
            raise ServerError(url, "held")

        return hold

    async def _nothing(self) -> None:
        pass


def config_of(servers: Servers, prompts: int, siblings: int, **options: Any) -> Config:
    section = {"urls": servers.urls, "client_processes": 0, "health_seconds": 600.0, **options}
    rollout = {"engine": "sglang", "prompts_per_step": prompts, "samples_per_prompt": siblings, "servers": section}
    return config(rollout=rollout)


def begin_step(ranks: int, servers: int, prompts: int, siblings: int, **options: Any) -> Servers:
    """Submit a step on all ranks, and wait until the servers have its requests."""
    pool = Servers(servers)
    settings = config_of(pool, prompts, siblings, **options)
    params = rollout_sampling_params(settings)
    share = prompts // ranks
    engines: list[ServerEngine] = []
    try:
        for rank in range(ranks):
            engine = build_sampling_engine(
                settings.rollout, HF, FakeTokenizer(), torch.device("cpu"), pool.clients(), None, ranks=(rank, ranks)
            )
            assert isinstance(engine, ServerEngine)
            engines.append(engine)
            engine.use_version(1, pool.urls)
            positions = range(rank * share, (rank + 1) * share)
            groups = [
                GroupRequest(i, Prompt(prompt_id=str(i), text="", token_ids=(1000 + i,), label=""), siblings)
                for i in positions
            ]
            engine.submit(groups, params, share)
        limit = options.get("max_in_flight")
        expected = prompts * siblings if limit is None else ranks * limit
        end = time.monotonic() + 30
        while sum(pool.loads) < expected and time.monotonic() < end:
            time.sleep(0.005)
        assert sum(pool.loads) == expected
    finally:
        for engine in engines:
            engine.close()
    return pool


@pytest.mark.parametrize(
    ("ranks", "servers", "prompts", "siblings"),
    [
        # Combinations of the audit (gpu3.md, finding 6), with fewer siblings.
        (16, 16, 256, 4),
        (32, 32, 256, 4),
        (16, 32, 256, 4),
        (16, 64, 256, 4),
        (32, 128, 512, 2),
        (8, 64, 256, 4),
        (1, 8, 8, 2),
        (2, 7, 14, 4),
        (12, 8, 24, 4),
        (5, 3, 30, 2),
        # A group has more siblings than MAX_IMBALANCE.
        (4, 8, 8, 64),
        (4, 16, 16, 24),
        # Prompts that the servers do not divide, but samples do: siblings are parted.
        (4, 64, 96, 4),
        (8, 32, 16, 4),
        (2, 16, 4, 16),
        (4, 12, 16, 6),
    ],
)
def test_the_requests_of_a_step_load_all_servers_evenly(ranks: int, servers: int, prompts: int, siblings: int) -> None:
    loads = begin_step(ranks, servers, prompts, siblings).loads
    assert max(loads) <= 1.1 * sum(loads) / servers, loads
    assert min(loads) > 0


@pytest.mark.parametrize(("ranks", "servers", "limit"), [(16, 64, 16), (8, 64, 24), (4, 6, 12), (6, 4, 8)])
def test_servers_are_evenly_loaded_when_a_limit_holds_requests_back(ranks: int, servers: int, limit: int) -> None:
    loads = begin_step(ranks, servers, 192, 4, max_in_flight=limit).loads
    assert max(loads) - min(loads) <= 4, loads  # one group


def test_siblings_stay_together_where_groups_load_the_servers_evenly() -> None:
    pool = begin_step(4, 8, 16, 8)
    assert all(set(prompts.values()) == {8} for prompts in pool.prompts.values())


def test_siblings_are_parted_no_more_than_even_loads_need() -> None:
    pool = begin_step(4, 16, 8, 8)
    assert all(set(prompts.values()) == {4} for prompts in pool.prompts.values())


@pytest.mark.parametrize("servers", [1, 3, 16, 128])
@pytest.mark.parametrize("ranks", [1, 4, 6, 32])
def test_all_samples_of_a_step_are_in_flight_whatever_the_number_of_ranks(ranks: int, servers: int) -> None:
    spread = [
        spread_requests(rank=rank, ranks=ranks, servers=servers, prompts=192, siblings=16) for rank in range(ranks)
    ]
    assert {each.max_in_flight for each in spread} == {
        max(3072 // ranks, -(-64 * servers // ranks)) if servers > 6 else min(3072 // ranks, 512 * servers)
    }
    chosen = spread_requests(rank=0, ranks=ranks, servers=servers, prompts=192, siblings=16, max_in_flight=7)
    assert chosen.max_in_flight == 7
