"""Lies about right answers of a real server: the probe names each, and the guard stops what comes between probes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_dppo.errors import ServerError
from megatron_dppo.weights.probe_requests import ProbeExpectation, send_probe
from megatron_dppo_engines.sglang import SGLangServer
from tests.distributed.spawn import run_distributed
from tests.e2e.runs import records, train
from tests.engines.changes import logprobs, next_one, routes, telling, topk
from tests.engines.inprocess import build_trainer, make_model, prepare
from tests.engines.probes import expectation
from tests.engines.proxy import Lie, Proxy
from tests.engines.runs import from_model
from tests.engines.servers import Engine, bf16_sglang
from tests.engines.tiny import ROUTING

K, TEMPERATURE = 4, 0.7
LIES: list[tuple[str, Lie, str]] = [
    ("one decimal", telling(logprobs(lambda x: np.round(x, 1))), "rounded log-probabilities: .*1 decimals"),
    ("two decimals", telling(logprobs(lambda x: np.round(x, 2))), "rounded log-probabilities: .*2 decimals"),
    ("shifted", telling(logprobs(next_one)), "shifted log-probabilities: .*of the next token"),
    ("scaled", telling(logprobs(lambda x: 0.7 * x)), "scaled log-probabilities: "),
    ("top-k scaled", telling(topk(lambda x: 0.7 * x, "values")), "scaled Top-K: .*0.7 times"),
    ("top-k shifted", telling(topk(next_one, "values", "ids")), "shifted Top-K: .*of the next token"),
    ("top-k values shifted", telling(topk(next_one, "values")), "shifted Top-K: .*of the next token"),
    ("top-k other ids", telling(topk(lambda x: (x + 7) % 512, "ids")), "wrong Top-K: "),
    ("routes shifted", telling(routes(next_one)), "shifted routed experts: "),
    ("routes of other layers", telling(routes(lambda x: x[:, ::-1])), "wrong routed experts: "),
    ("routes of other experts", telling(routes(lambda x: (x + 1) % 8)), "wrong routed experts: "),
]


@pytest.fixture(scope="module")
def confident(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose sampled tokens have a probability of .97 in the median."""
    return make_model(tmp_path_factory.mktemp("models") / "confident", seed=0, sharpness=15.0)


@pytest.fixture(scope="module")
def bf16(confident: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with bf16_sglang(confident, tmp_path_factory.mktemp("bf16") / "log") as engine:
        yield engine


def _judge_all(rank: int, world_size: int, url: str, folder: Path) -> None:
    """Every lie to a trainer in bf16; the truth too, before and after."""
    prepare()
    from megatron_dppo.weights.probe import compute_readings
    from megatron_dppo.weights.verdict import verify_response

    trainer = build_trainer(folder, "bf16", TEMPERATURE, K)
    expected = expectation(dtype="bf16", topk_logprobs=K, routing=ROUTING, temperature=TEMPERATURE)

    def verdict(lie: Lie | None, expected: ProbeExpectation = expected, asked: ProbeExpectation = expected) -> str:
        with Proxy(url, lie=lie) as proxy:

            async def use() -> Any:
                server = SGLangServer(proxy.url)
                try:
                    return await send_probe(server, asked)
                finally:
                    await server.close()

            try:
                answer = asyncio.run(use())
                verify_response(answer, expected, compute_readings(trainer, [answer], expected, 4096)[0])
            except ServerError as error:
                return str(error)
            return "right"

    assert verdict(None) == "right"
    for name, lie, match in LIES:
        with pytest.raises(ServerError, match=match):
            raise ServerError(name, verdict(lie))
    # The server samples at temperature 1 where 0.7 is expected: what it reports is raw to this trainer.
    assert "raw log-probabilities: " in verdict(None, asked=replace(expected, temperature=1.0))
    assert verdict(None) == "right"


def test_corruptions_of_a_confident_bf16_server_are_reported(bf16: Engine, confident: Path) -> None:
    run_distributed(_judge_all, 1, bf16.url, confident)


def run_with(lie: Lie, engine: Engine, model: Path, folder: Path, **more: Any) -> tuple[int, str]:
    """A whole run against the lie; exit code and output."""
    values: dict[str, Any] = dict(
        rollout__temperature=TEMPERATURE,
        rollout__max_new_tokens=16,
        rollout__prompts_per_step=4,
        rollout__samples_per_prompt=4,
        rollout__weight_sync__attempts=1,
    )
    with Proxy(engine.url, lie=lie) as proxy:
        result = train(from_model([proxy], model, folder, **{**values, **more}))
    return result.returncode, result.stdout + result.stderr


def test_a_run_with_a_corrupt_server_stops_before_it_trains(bf16: Engine, confident: Path, tmp_path: Path) -> None:
    lie = telling(topk(lambda x: 0.7 * x, "values"))
    code, text = run_with(lie, bf16, confident, tmp_path / "run", loss__name="dppo_topk_tv", loss__topk=K)
    assert code == 2 and "scaled Top-K: the server reports 0.7 times" in text, text
    assert not records(tmp_path / "run")


GUARDED = "nothing was learned from them", "in one layer the routers choose other experts", "bf16 allows 50%"


@pytest.mark.parametrize(
    ("change", "code", "told"),
    [
        # The most probable token comes with two log-probabilities, of which the lie changes one.
        (logprobs(next_one), 2, ("violates the contract", "of the sampled token")),
        (routes(next_one), 3, GUARDED),
    ],
)
def test_a_corruption_after_the_probe_stops_the_run_before_the_update(
    change: Callable[[dict[str, Any]], None],
    code: int,
    told: tuple[str, ...],
    bf16: Engine,
    confident: Path,
    tmp_path: Path,
) -> None:
    result, text = run_with(telling(change, but="probe"), bf16, confident, tmp_path / "run")
    assert result == code, text
    assert all(part in text for part in told), text
    assert not [r for r in records(tmp_path / "run") if r["step"] > 0]
    assert not list((tmp_path / "run").glob("checkpoints/*"))
