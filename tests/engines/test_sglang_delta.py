"""Real SGLang servers that are sent only what changed hold, byte by byte, what those hold that were sent everything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_dppo.config.servers import WeightSyncConfig
from megatron_dppo.rollout.attempt import SyncResult
from megatron_dppo.rollout.server import Generation, InferenceServer
from megatron_dppo.rollout.sglang import SGLangServer
from megatron_dppo.rollout.weight_sums import RankSums
from megatron_dppo.serving.sglang_extension.megatron_dppo_delta import packed, patch_of
from megatron_dppo.weights.sync import WeightSync
from tests.engines.calls import LONG, ask
from tests.engines.proxy import Exchange, Proxy
from tests.engines.servers import Engine
from tests.engines.tiny import Reference
from tests.engines.updates import off

ONE = torch.tensor([1])
PATCH = "megatron_dppo_delta.load"
WHOLE, PARTS = {None}, {PATCH}


class Sent:
    """What goes by value to a server: by which loader, and how many bytes."""

    def __init__(self) -> None:
        self.loaders, self.bytes, self.swallow = set[str | None](), 0, False

    async def __call__(self, exchange: Exchange) -> bool:
        if exchange.path == "/update_weights_from_tensor":
            self.loaders.add(exchange.request["load_format"])
            self.bytes += len(exchange.request["serialized_named_tensors"][0]) * 3 // 4
            if self.swallow:
                exchange.answer = {"success": True, "message": "Success"}
                return False
        return True

    def taken(self) -> tuple[set[str | None], int]:
        """Since the last call of this."""
        found = self.loaders, self.bytes
        self.loaders, self.bytes = set(), 0
        return found


class Run:
    """One life of a trainer with one server behind a proxy."""

    def __init__(self, proxy: Proxy, model: Reference, place: Path, dtype: torch.dtype) -> None:
        self.sent = Sent()
        proxy.before = self.sent
        config = WeightSyncConfig(method="tensor", delta=True, timeout_seconds=60)
        servers: list[InferenceServer] = [SGLangServer(proxy.url)]
        device = torch.device("cpu")
        self.sync = WeightSync(
            servers, config, model_folder=model.folder, weights_folder=place, dtype=dtype, device=device
        )
        self.version = -1

    def send(self, model: Reference, *, again: bool = False) -> SyncResult:
        self.version += not again
        return self.sync.send(iter(list(model.weights())), self.version)

    def sums(self) -> tuple[RankSums, ...]:
        async def ask_sums(servers: list[InferenceServer]) -> tuple[RankSums, ...]:
            return await servers[0].weight_sums()

        return self.sync.run(ask_sums)

    def answer(self) -> Generation:
        async def generate(servers: list[InferenceServer]) -> Generation:
            return await servers[0].generate(ask(LONG, 20))

        return self.sync.run(generate)


def change(model: Reference, share: float, how: Callable[[Tensor], Tensor], seed: int) -> None:
    """A share of the elements of each parameter, at random places."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.model.parameters():
            chosen = torch.rand(weight.shape, generator=generator) < share
            weight[chosen] = how(weight)[chosen]


@pytest.fixture
def steps(old_model: Reference) -> Iterator[Reference]:
    """A model that the test may change."""
    yield Reference(old_model.folder)


def check_life(run: Run, model: Reference, *, exact: bool) -> None:
    """Full, changed twice, not changed, changed everywhere, and numbers that are none; each against a full sync."""
    assert run.send(model).good
    loaders, full = run.sent.taken()
    assert loaders == WHOLE
    for seed, share in enumerate((0.01, 0.03)):
        change(model, share, lambda weight: weight * 1.5 + 0.01, seed)
        result = run.send(model)
        assert result.good and not result.notes and not result.failed
        loaders, size = run.sent.taken()
        assert loaders == PARTS and size < full * share * 6, (size, full)
        answer = run.answer()
        assert answer.versions[0].policy_version == run.version
        if exact:
            assert off(model, answer, LONG) < 1e-5
    assert run.send(model).good and run.sent.taken() == (set(), 0) and run.answer().versions[0].policy_version == 3
    change(model, 0.02, lambda weight: torch.full_like(weight, -0.0), 7)
    change(model, 0.02, lambda weight: torch.full_like(weight, torch.inf), 8)
    with torch.no_grad():
        model.model.model.layers[0].self_attn.q_proj.weight[3, 5] = torch.nan
        model.model.model.norm.weight.mul_(1.25)
    assert run.send(model).good and run.sent.taken()[0] == PARTS
    patched = run.sums()
    # The same by an attempt that sends everything.
    assert run.send(model, again=True).good and run.sent.taken()[0] == WHOLE
    assert run.sums() == patched


def test_each_version_of_sglang_takes_patches(sglang: Engine, steps: Reference, tmp_path: Path) -> None:
    with Proxy(sglang.url) as proxy:
        run = Run(proxy, steps, tmp_path, torch.float32)
        check_life(run, steps, exact=True)
        # The weights of a server that answers must be numbers.
        change(steps, 1.0, lambda weight: weight.nan_to_num(0.0, 0.1), 9)
        assert run.send(steps).good
        run.sent.taken()
        check_lost(run, steps)
        run.sync.close()


def check_lost(run: Run, model: Reference) -> None:
    """A patch that was confirmed and never taken is found, and the next attempt sends everything."""
    change(model, 0.02, lambda weight: weight + 0.02, 10)
    run.sent.swallow = True
    (complaint,) = run.send(model).failed.values()
    assert "not what was sent" in complaint and run.sent.taken()[0] == PARTS
    run.sent.swallow = False
    assert run.send(model, again=True).good and run.sent.taken()[0] == WHOLE
    assert off(model, run.answer(), LONG) < 1e-5
    change(model, 0.02, lambda weight: weight - 0.03, 11)
    assert run.send(model).good and run.sent.taken()[0] == PARTS
    assert off(model, run.answer(), LONG) < 1e-5


async def begun_and_never_ended(servers: list[InferenceServer]) -> None:
    """A trainer that is killed in mid-update."""
    await servers[0].pause()
    await servers[0].begin_update()
    patch = patch_of(
        "model.norm.weight", torch.zeros(64).bfloat16(), torch.zeros(64).bfloat16().index_fill(0, ONE, 9.0)
    )
    assert patch is not None
    await servers[0].receive_patches(packed([patch]))
    assert (await servers[0].info()).policy_version == -1


def test_sglang_in_bf16_takes_patches_and_another_life_of_the_trainer_sends_everything(
    sglang_bf16: Engine, steps: Reference, tmp_path: Path
) -> None:
    with Proxy(sglang_bf16.url) as proxy:
        run = Run(proxy, steps, tmp_path, torch.bfloat16)
        check_life(run, steps, exact=False)
        run.sync.run(begun_and_never_ended)
        run.sync.close()
        again = Run(proxy, steps, tmp_path, torch.bfloat16)
        again.version = run.version - 1
        before = again.sums()
        assert again.send(steps).good and again.sent.taken()[0] == WHOLE
        assert again.sums() != before
        again.sync.close()
        third = Run(proxy, steps, tmp_path, torch.bfloat16)
        third.version = run.version  # the server says that it has the version before the one that comes
        assert third.send(steps).good and third.sent.taken()[0] == WHOLE
        third.sync.close()
