"""A real server that samples otherwise than it reports: named, and stopped or left out, in fp32 and in bf16."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import records, train
from tests.engines.changes import candidates, logprobs, samples, telling
from tests.engines.inprocess import make_model
from tests.engines.proxy import Exchange, Proxy
from tests.engines.runs import from_model
from tests.engines.servers import Engine, bf16_sglang


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose sampled tokens have a probability of .1 to .6 in the median."""
    return make_model(tmp_path_factory.mktemp("models") / "usual", seed=0, sharpness=5.0)


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with bf16_sglang(model, tmp_path_factory.mktemp("bf16") / "log") as started:
        yield started


class Sampling:
    """Sets sampling parameters on the way to the server, of every request, the probe's too.

    SGLang then reports the log-probabilities from before the filters, so no number in its answers is wrong. vLLM
    reports those of the filtered distribution.
    """

    def __init__(self, **params: Any) -> None:
        self._params = params

    async def __call__(self, exchange: Exchange) -> bool:
        if samples(exchange):
            exchange.request["sampling_params"] |= self._params
        return True


def run(urls: list[Engine | Proxy], model: Path, folder: Path, **more: Any) -> tuple[int, str]:
    result = train(from_model(urls, model, folder, **{"run__num_steps": 6, **more}))
    return result.returncode, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"top_p": 0.7}, "filter"),
        pytest.param({"min_p": 0.3}, "filter", marks=pytest.mark.long),
        pytest.param({"top_k": 1}, "greedy decoding", marks=pytest.mark.long),
    ],
    ids=["top_p", "min_p", "greedy"],
)
def test_a_server_that_filters_is_named_before_many_updates(
    params: dict[str, Any], words: str, engine: Engine, model: Path, tmp_path: Path
) -> None:
    with Proxy(engine.url, before=Sampling(**params)) as proxy:
        code, text = run([proxy], model, tmp_path / "run")
    assert code == 3 and "nothing was learned from this step" in text, text
    assert words in text and proxy.url in text, text
    trained = [record["step"] for record in records(tmp_path / "run") if record["step"] > 0]
    assert len(trained) <= 2, text


def test_one_liar_of_two_servers_is_left_out_and_the_run_goes_on(engine: Engine, model: Path, tmp_path: Path) -> None:
    """Another address of the same server answers 0.1 nats too low, but to probes rightly."""
    # The most probable token's as well, so that the answer contradicts itself nowhere.
    changes = (logprobs(lambda x: x - 0.1), candidates(lambda x: x - 0.1))
    lies = [telling(change, but="probe") for change in changes]

    def both(exchange: Exchange) -> None:
        for lie in lies:
            lie(exchange)

    with Proxy(engine.url, lie=both) as liar, Proxy(engine.url) as honest:
        code, text = run([liar, honest], model, tmp_path / "run", run__num_steps=2)
    assert code == 0, text
    assert f"{liar.url} is not used any more in this run" in text and "Rounding goes both ways" in text, text
    assert [record["step"] for record in records(tmp_path / "run") if record["step"] > 0] == [1, 2]
