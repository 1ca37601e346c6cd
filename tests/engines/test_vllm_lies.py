"""A real vLLM server behind a proxy that lies is stopped before the first update; see also ``benchmarks/lies.py``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import records, train
from tests.engines.changes import candidates, logprobs, telling
from tests.engines.proxy import Exchange, Proxy
from tests.engines.runs import from_model
from tests.engines.servers import Engine
from tests.engines.test_sampling_lies import Sampling
from tests.engines.tiny import Reference


def run(proxy: Proxy, model: Path, folder: Path, dtype: str) -> tuple[int, str, int]:
    """Return the exit code of a run, its output, and the number of its updates."""
    more = {"rollout__engine": "vllm", "train__router_replay": "off", "run__num_steps": 2}
    result = train(from_model([proxy], model, folder, dtype, **more))
    done = [record for record in records(folder) if record["step"] > 0]
    return result.returncode, result.stdout + result.stderr, len(done)


def test_shifted_logprobs_between_probes_are_stopped(vllm: Engine, old_model: Reference, tmp_path: Path) -> None:
    """Those of all candidates are shifted alike, so that a response contradicts itself nowhere."""
    lies = [telling(change, but="probe") for change in (logprobs(lambda x: x - 0.1), candidates(lambda x: x - 0.1))]

    def both(exchange: Exchange) -> None:
        for lie in lies:
            lie(exchange)

    with Proxy(vllm.url, lie=both) as proxy:
        code, text, updates = run(proxy, old_model.folder, tmp_path / "run", "fp32")
    assert (code, updates) == (3, 0) and "nothing was learned from them" in text and proxy.url in text, text


@pytest.mark.long
def test_greedy_decoding_is_named_by_the_probe(vllm: Engine, old_model: Reference, tmp_path: Path) -> None:
    """vLLM reports the log-probabilities of the filtered distribution: all of them are 0."""
    with Proxy(vllm.url, before=Sampling(top_k=1)) as proxy:
        code, text, updates = run(proxy, old_model.folder, tmp_path / "run", "fp32")
    assert (code, updates) == (2, 0) and "as after greedy decoding" in text and proxy.url in text, text
