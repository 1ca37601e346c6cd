"""The probe lets a right server pass and names what is wrong with a wrong one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_dppo.errors import ServerError
from megatron_dppo.weights.probe_requests import ProbeError
from tests.e2e.runs import records, train
from tests.engines.calls import call
from tests.engines.probes import TEXT, expectation, run
from tests.engines.runs import arguments
from tests.engines.servers import Engine, start_sglang, stop_engine, wait_ready
from tests.engines.tiny import ROUTING, SPECIAL, Reference, byte_tokenizer


@pytest.fixture(scope="module")
def wrong(old_model: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Raw log-probabilities, no routed experts, a top-p of its own."""
    engine = start_sglang(
        old_model.folder,
        tmp_path_factory.mktemp("wrong") / "log",
        "--preferred-sampling-params",
        '{"top_p": 0.3, "repetition_penalty": 1.5}',
        env={"SGLANG_RETURN_ORIGINAL_LOGPROB": "1"},
    )
    try:
        yield wait_ready(engine)
    finally:
        stop_engine(engine)


@pytest.fixture
def sglang(sglang_server: Engine, old_model: Reference) -> Engine:
    """The server with the old weights as version 0."""
    call(sglang_server, lambda server: server.update_from_disk(str(old_model.folder), 0))
    return sglang_server


def test_a_right_server_passes(sglang: Engine, old_model: Reference) -> None:
    result = run(sglang, expectation(routing=ROUTING, policy_version=0), old_model)
    assert result.logprobs.largest < 1e-5 and result.routes == 0


def test_other_weights_are_reported(sglang: Engine, new_model: Reference) -> None:
    with pytest.raises(ProbeError, match=r"wrong weights: .*model\.path"):
        run(sglang, expectation(), new_model)


def test_another_version_is_reported(sglang: Engine, old_model: Reference) -> None:
    with pytest.raises(ProbeError, match=r"from version \[0\], expected 3"):
        run(sglang, expectation(policy_version=3), old_model)


def test_another_tokenizer_is_reported(sglang: Engine, old_model: Reference) -> None:
    other = tuple(byte_tokenizer([*SPECIAL, "<extra>"]).encode(TEXT))
    with pytest.raises(ProbeError, match=r"wrong tokenizer: .*--tokenizer-path"):
        run(sglang, expectation(prompt_token_ids=other), old_model)


def test_a_larger_vocabulary_is_reported(sglang: Engine, old_model: Reference) -> None:
    with pytest.raises(ProbeError, match="trainer's vocabulary has 259"):
        run(sglang, expectation(vocab_size=259), old_model)


def test_raw_logprobs_are_reported_with_the_setting_and_server_sampling_defaults_are_overridden(
    wrong: Engine, old_model: Reference
) -> None:
    with pytest.raises(ProbeError, match=r"raw log-probabilities: .*SGLANG_RETURN_ORIGINAL_LOGPROB"):
        run(wrong, expectation(), old_model)
    # At temperature 1 both mean the same; top-p and penalties of the server are overruled by the request.
    assert run(wrong, expectation(temperature=1.0, max_new_tokens=200), old_model).logprobs.largest < 1e-4


def test_a_server_without_routed_experts_is_reported_with_its_flag(wrong: Engine, old_model: Reference) -> None:
    with pytest.raises(ServerError, match=r"routed_experts.*--enable-return-routed-experts"):
        run(wrong, expectation(routing=ROUTING), old_model)


def test_a_model_with_other_layers_is_reported(sglang: Engine, old_model: Reference) -> None:
    with pytest.raises(ServerError, match="x 3 layers x 2"):
        run(sglang, expectation(routing=replace(ROUTING, num_layers=3)), old_model)


@pytest.mark.long  # test_sglang_lies.py has another run that a failed probe stops
def test_a_run_with_a_wrong_server_stops_before_it_trains(wrong: Engine, old_model: Reference, tmp_path: Path) -> None:
    more = {
        "parallel__expert_model_parallel_size": 1,
        "model__path": old_model.folder,
        "train__router_replay": "off",
        "rollout__temperature": 0.7,
        "rollout__weight_sync__attempts": 1,
    }
    result = train(arguments([wrong], tmp_path / "run", **more))
    assert result.returncode == 2, result.stdout + result.stderr
    assert f"{wrong.url}: raw log-probabilities" in result.stderr
    assert "start the server without SGLANG_RETURN_ORIGINAL_LOGPROB=1" in result.stderr
    assert not records(tmp_path / "run")
