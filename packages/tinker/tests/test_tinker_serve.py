"""The server's queue, key and checks, without a model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dppo.errors import ConfigError
from megatron_dppo_tinker.bodies import CreateModel, LoadWeights, Sample, SaveWeights, read_body
from megatron_dppo_tinker.errors import RequestError, require_finite
from megatron_dppo_tinker.futures import Request, RequestQueue
from megatron_dppo_tinker.samplers import SampleJob, Sampler, read_job
from megatron_dppo_tinker.serve import check_config, read_key
from tests.unit.configs import config


class Batch:
    """A stand-in for a request for samples."""

    def __init__(self, key: object) -> None:
        self.key = key


def test_the_queue_keeps_order_joins_equal_samples_and_repeats_nothing() -> None:
    queue = RequestQueue(max_pending=5, max_results=2, max_bytes=1 << 20)
    requests = [
        Request("a", dict),
        Request("s1", None, Batch("x")),
        Request("b", dict),
        Request("s2", None, Batch("x")),
    ]
    for request in [*requests, requests[0], Request("s3", None, Batch(None))]:
        queue.add(request)
    with pytest.raises(RequestError, match="5 requests of 0 bytes") as refused:
        queue.add(Request("c", dict))
    assert refused.value.status == 429
    batches = [[each.request_id for each in queue.next(0)] for _ in range(5)]
    assert batches == [["a"], ["s1", "s2"], ["b"], ["s3"], []]
    for request in requests:
        queue.finish(request, {"of": request.request_id})
    # The two newest results are kept; a client that asks for an older one learns that it is gone.
    for name, known in (("a", False), ("s1", False), ("b", True), ("s2", True)):
        if known:
            assert queue.get(name).result == {"of": name}
        else:
            with pytest.raises(RequestError, match="no longer kept"):
                queue.get(name)


def test_waiting_requests_and_kept_results_are_limited_by_their_size() -> None:
    queue = RequestQueue(max_pending=9, max_results=9, max_bytes=100)
    queue.add(Request("huge", dict, num_bytes=1000))
    with pytest.raises(RequestError, match="1 requests of 1000 bytes"):
        queue.add(Request("next", dict, num_bytes=1))
    # One that is larger than the limit is served alone. Its result is kept until there are others.
    queue.next(0)
    requests = [queue.get("huge")]
    queue.finish(requests[0], b"x" * 200)
    assert queue.get("huge").result is not None
    for name in ("a", "b", "c"):
        requests.append(Request(name, dict))
        queue.add(requests[-1])
        queue.next(0)
    queue.finish(requests[1], b"x" * 40)
    queue.finish(requests[2], b"x" * 40)
    # The fetched one goes first, although another is older.
    requests[2].is_fetched = True
    queue.finish(requests[3], b"x" * 40)
    assert [name for name in ("huge", "a", "b", "c") if name in queue.known] == ["a", "c"]


def test_a_new_key_is_in_a_file_of_its_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    key, where = read_key("TINKER_API_KEY", tmp_path)
    file = tmp_path / "tinker_key"
    assert key not in where and str(file) in where
    assert file.read_text().strip() == key and key.startswith("tml-") and len(key) > 40
    assert file.stat().st_mode & 0o777 == 0o600
    assert read_key("TINKER_API_KEY", tmp_path)[0] != key
    for bad in ("tml-short", "sk-without-the-prefix-of-the-sdk"):
        monkeypatch.setenv("TINKER_API_KEY", bad)
        with pytest.raises(ConfigError) as error:
            read_key("TINKER_API_KEY", tmp_path)
        assert bad not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lora": {"rank": 0}}, "lora.rank = 0"),
        ({"rollout": {"engine": "sglang"}}, "local engine"),
        ({"rollout": {"temperature": 0.7}}, "rollout.temperature"),
        ({"model": {"random_init": True}}, "random_init"),
        ({"parallel": {"overlap_grad_reduce": True}}, "overlap_grad_reduce"),
        ({"model": {"transformer": {"moe_aux_loss_coeff": 0.01}}}, "moe_aux_loss_coeff"),
    ],
)
def test_configurations_that_cannot_be_served_are_refused(changes: dict[str, Any], words: str) -> None:
    good: dict[str, dict[str, Any]] = {"lora": {"rank": 4}, "rollout": {"engine": "local"}}
    check_config(config(**good))
    with pytest.raises(ConfigError, match=words):
        check_config(config(**{name: good.get(name, {}) | changes.get(name, {}) for name in good | changes}))


def test_torchrun_is_refused_by_name(tmp_path: Path) -> None:
    program = "from megatron_dppo.commands.main import main; raise SystemExit(main(['tinker', 'x.toml']))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={"WORLD_SIZE": "2", "PYTHONPATH": ":".join(sys.path)},
    )
    assert done.returncode == 2 and "one process" in done.stderr, done.stderr


LORA = {"rank": 4}
MODEL = {"session_id": "s", "model_seq_id": 0, "base_model": "m", "lora_config": LORA}
SAMPLE: dict[str, Any] = {
    "sampling_session_id": "s",
    "seq_id": 0,
    "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
    "sampling_params": {},
}


@pytest.mark.parametrize(
    ("kind", "body", "words"),
    [
        (CreateModel, MODEL | {"nonsense": 1}, "nonsense"),
        (CreateModel, MODEL | {"lora_config": {"rank": 0}}, "rank"),
        (CreateModel, MODEL | {"optimizer_config": {"type": "dimuon"}}, "adamw"),
        (SaveWeights, {"model_id": "m", "seq_id": 1, "path": "../x"}, "path"),
        (SaveWeights, {"model_id": "m", "seq_id": 1, "path": "a/b"}, "path"),
        (SaveWeights, {"model_id": "m", "seq_id": 1, "path": ".hidden"}, "path"),
        (LoadWeights, {"path": "p", "optimizer": True}, "expected session_id"),
        (
            LoadWeights,
            {"path": "p", "optimizer": True, "model_id": "m", "seq_id": 1, "weights_access_token": "t"},
            "token",
        ),
        (Sample, SAMPLE | {"topk_sample_logprobs": 3}, "topk_sample_logprobs"),
        (Sample, SAMPLE | {"record_stability_info": True}, "not served"),
        (Sample, SAMPLE | {"num_samples": 0}, "num_samples"),
        (Sample, SAMPLE | {"sampling_params": {"stop": []}}, "empty stop"),
        (Sample, SAMPLE | {"sampling_params": {"stop": ["a", ""]}}, "empty stop"),
        (Sample, SAMPLE | {"sampling_params": {"temperature": -1}}, "temperature"),
        (Sample, SAMPLE | {"sampling_params": {"top_k": 0}}, "top_k = 0 leaves no token; -1"),
        (Sample, SAMPLE | {"sampling_params": {"top_k": 2**31}}, "top_k"),
        (Sample, SAMPLE | {"sampling_params": {"stop": [1] * 129}}, "stop"),
        (Sample, SAMPLE | {"seq_id": 10**400}, "seq_id"),
        (Sample, SAMPLE | {"seq_id": -1}, "seq_id"),
        (SaveWeights, {"model_id": "m", "seq_id": 2**63, "path": "a"}, "seq_id"),
        (LoadWeights, {"path": "p", "optimizer": True, "model_id": "m", "seq_id": 2**64}, "seq_id"),
        (CreateModel, MODEL | {"model_seq_id": 10**400}, "model_seq_id"),
        (CreateModel, MODEL | {"lora_config": {"rank": 1, "seed": 10**400}}, "seed"),
        (Sample, SAMPLE | {"prompt": {"chunks": [{"type": "image", "data": "x"}]}}, "chunks"),
    ],
)
def test_bodies_are_refused_with_the_field_that_is_wrong(kind: Any, body: dict[str, Any], words: str) -> None:
    assert read_body(Sample, SAMPLE | {"topk_sample_logprobs": 0, "record_stability_info": False}).num_samples == 1
    with pytest.raises(RequestError, match=words):
        read_body(kind, body)


@pytest.mark.parametrize("stop", [[2**70], [-1], [7, 100], [2**31]])
def test_stop_ids_outside_the_vocabulary_are_refused(stop: list[int]) -> None:
    def job(ids: list[int]) -> SampleJob:
        body = read_body(Sample, SAMPLE | {"sampling_params": {"stop": ids, "max_tokens": 4}})
        return read_job(body, Sampler(None), vocab_size=100, max_tokens=10)

    assert job([0, 99]).stop_token_ids == (0, 99)
    with pytest.raises(RequestError, match="ids outside 0 to 99"):
        job(stop)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_log_probabilities_that_are_not_finite_are_no_answer(value: float) -> None:
    assert require_finite(torch.tensor([-1.0, 0.0])).tolist() == [-1.0, 0.0]
    with pytest.raises(RequestError, match="update has broken"):
        require_finite(torch.tensor([-1.0, value]))
