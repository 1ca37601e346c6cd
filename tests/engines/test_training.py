"""Whole training runs against real servers, and what becomes of them when something is killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from megatron_dppo.config.servers import WeightSyncConfig
from megatron_dppo.hf.folder import build_hf_model, read_hf_config, stream_model
from megatron_dppo.weights.sync import WeightSync
from megatron_dppo_engines.server import ServerInfo
from megatron_dppo_engines.servers.fields import parse_policy_version
from megatron_dppo_engines.servers.http import Deadlines
from megatron_dppo_engines.sglang import SGLangServer
from tests.e2e.bases import chain_sum_base
from tests.e2e.runs import CONFIG, command, environment, records, step_records, train
from tests.engines.lies import generation_lie, nan_logprobs, shifted_topk
from tests.engines.proxy import Proxy
from tests.engines.runs import arguments
from tests.engines.servers import Engine, start_sglang, stop_engine, wait_ready
from tests.reference_run import assert_trains

MODEL = CONFIG.parent / "model"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
    """Two servers with weights that nobody trained; the last test kills one of them."""
    options = ("--load-format", "dummy", "--enable-return-routed-experts", "--context-length", "256")
    logs = tmp_path_factory.mktemp("servers")
    engines = [start_sglang(MODEL, logs / f"{i}.log", *options) for i in range(2)]
    try:
        yield [wait_ready(engine) for engine in engines]
    finally:
        for engine in engines:
            stop_engine(engine)


def query_server(engine: Engine) -> tuple[ServerInfo, str]:
    """Return the server info and the digest of its weights."""

    async def both() -> tuple[ServerInfo, str]:
        server = SGLangServer(engine.url)
        try:
            return await server.info(), await server.weight_digests()
        finally:
            await server.close()

    return asyncio.run(both())


# Runs that send by "disk" are in test_answers.py and tests/launch too.
@pytest.mark.parametrize("method", ["distributed", pytest.param("disk", marks=pytest.mark.long)])
def test_server_and_trainer_agree_on_every_token_and_every_expert(
    pair: list[Engine], tmp_path: Path, method: str
) -> None:
    more = {"loss__name": "dppo_topk_tv", "loss__topk": 4, "rollout__temperature": 0.7, "train__mini_batches": 1}
    folder = tmp_path / method
    result = train(arguments(pair, folder, rollout__weight_sync__method=method, **more), processes=2)
    assert result.returncode == 0, result.stdout + result.stderr
    assert_trains(folder, evaluation_may_stay=True)
    steps = step_records(folder)
    assert len(steps) == 4
    for step in steps:
        # One update a step: the policy is the one that sampled, and only the two programs differ.
        assert step["train/abs_prob_diff"] < 1e-5
        assert step["train/router_disagreement"] == 0 == step["train/router_missing"]
        assert step["rollout/policy_age"] == 0
    assert all(query_server(engine)[0].policy_version == 4 for engine in pair)
    assert query_server(pair[0])[1] == query_server(pair[1])[1]


def test_stopped_responses_continue_in_the_next_step_with_new_weights(pair: list[Engine], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    more = {
        "run__num_steps": 4,
        # That the evaluation changes in so few steps, whichever responses are the first.
        "optimizer__lr": 3e-3,
        "optimizer__lr_warmup_steps": 0,
        "eval__max_prompts": 32,
        "rollout__oversample": 2.0,
        "rollout__abort_slowest": "true",
        "rollout__partial_rollouts": 2,
        "rollout__max_new_tokens": 100,
    }
    result = train(arguments(pair, folder, **more), processes=2)
    assert result.returncode == 0, result.stdout + result.stderr
    assert_trains(folder)
    steps = step_records(folder)
    assert len(steps) == 4
    assert sum(step["rollout/carried_groups"] for step in steps) > 0
    assert steps[0]["rollout/policy_age_max"] == 0 < max(step["rollout/policy_age_max"] for step in steps) <= 2
    assert all(step["train/router_missing"] == 0 == step["train/router_disagreement"] for step in steps)
    assert steps[0]["train/abs_prob_diff_first"] < 1e-5


# Both orders are combined with everything else in test_stream.py.
@pytest.mark.parametrize("order", ["stream", pytest.param("completed", marks=pytest.mark.long)])
def test_rollouts_continue_with_new_weights_while_the_policy_trains_and_is_evaluated(
    pair: list[Engine], tmp_path: Path, order: str
) -> None:
    more = {
        "run__num_steps": 5,
        "train__max_staleness": 2,
        "rollout__order": order,
        "rollout__dynamic_sampling": str(order == "stream").lower(),  # refills are of the current weights
        "rollout__servers__max_in_flight": 24,
        "eval__every": 2,
        "checkpoint__save_every": 2,
    }
    folder = tmp_path / "run"
    result = train(arguments(pair, folder, **more), processes=2)
    assert result.returncode == 0, result.stdout + result.stderr
    assert_trains(folder)
    steps = step_records(folder)
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5]
    assert 0 < max(step["rollout/policy_age_max"] for step in steps) <= 2
    assert all(step["train/router_missing"] == 0 == step["rollout/retried_requests"] for step in steps)
    # On-policy tokens differ by the two programs alone; older ones by at most two updates.
    assert steps[0]["train/abs_prob_diff_first"] < 1e-5
    evaluated = [record["step"] for record in records(folder) if "eval/accuracy" in record]
    assert evaluated == [0, 2, 4, 5]
    assert [record["step"] for record in records(folder)] == sorted(record["step"] for record in records(folder))
    resumed = train(
        arguments(pair, folder, **(more | {"run__num_steps": 7, "checkpoint__accept_changes": "true"})), processes=2
    )
    assert resumed.returncode == 0 and "resumed" in resumed.stdout, resumed.stdout + resumed.stderr
    assert [step["step"] for step in step_records(folder)] == list(range(1, 8))


def test_a_run_continues_without_a_server_that_becomes_corrupt_and_reports_it(
    pair: list[Engine], tmp_path: Path
) -> None:
    more = {"run__num_steps": 3, "loss__name": "dppo_topk_tv", "loss__topk": 4}
    with Proxy(pair[0].url, lie=generation_lie(shifted_topk, after=12, but="probe")) as liar:
        result = train(arguments([liar, pair[1]], tmp_path / "run", **more), processes=2)
        output = result.stdout + result.stderr
        assert result.returncode == 0, output
        assert_trains(tmp_path / "run")
        steps = step_records(tmp_path / "run")
        assert len(steps) == 3 and sum(step["rollout/invalid_responses"] for step in steps) >= 2, output
        assert all(step["train/abs_prob_diff_first"] < 1e-5 for step in steps)
        assert f"servers  {liar.url}" in output and f"{pair[1].url}: the answer" not in output
        assert f"{liar.url} is not used any more: it violated the contract 2 times since the last sync" in output


@pytest.mark.long  # test_sglang_lies.py has another contract that is violated after the probe
def test_a_run_with_only_a_corrupt_server_stops_before_it_trains_on_its_responses(
    pair: list[Engine], tmp_path: Path
) -> None:
    with Proxy(pair[0].url, lie=generation_lie(nan_logprobs, after=12, but="probe")) as liar:
        more = {"model__path": chain_sum_base(5), "parallel__expert_model_parallel_size": 1}
        result = train(arguments([liar], tmp_path / "run", **more))
        output = result.stdout + result.stderr
        assert result.returncode == 2 and "Traceback" not in output, output
        assert f"{liar.url}: it violated the contract 2 times" in output and "log-probability 0 is nan" in output
        file = tmp_path / "run" / "metrics.jsonl"
        assert not file.is_file() or len(records(tmp_path / "run")) < 2


def test_a_trainer_killed_during_a_sync_leaves_no_partial_version_and_can_be_restarted(
    pair: list[Engine], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    more = {"run__num_steps": 30, "checkpoint__save_every": 1, "rollout__weight_sync__method": "ipc"}
    memory = shared_memory()
    run = subprocess.Popen(
        command(arguments(pair, folder, **more), processes=2),
        env=environment(),
        stdout=(tmp_path / "out").open("w"),
        stderr=subprocess.STDOUT,
    )
    wait_for(lambda: (folder / "metrics.jsonl").is_file() and len(records(folder)) > 3, run, tmp_path / "out")
    killed_in_sync(run, pair)
    assert -1 in {query_server(engine)[0].policy_version for engine in pair}
    time.sleep(1)
    assert shared_memory() <= memory
    done = len(step_records(folder))
    longer = {**more, "run__num_steps": done + 2, "checkpoint__accept_changes": "true"}
    resumed = train(arguments(pair, folder, **longer), processes=2)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "resumed" in resumed.stdout
    assert_trains(folder)
    assert [step["step"] for step in step_records(folder)] == list(range(1, done + 3))
    assert all(step["train/abs_prob_diff_first"] < 1e-5 for step in step_records(folder))
    (first, one), (second, other) = map(query_server, pair)
    assert first.policy_version == second.policy_version > 0 and one == other
    assert shared_memory() <= memory


def test_a_server_killed_during_a_broadcast_does_not_block_the_run(pair: list[Engine], tmp_path: Path) -> None:
    third = wait_ready(start_sglang(MODEL, tmp_path / "third.log", "--load-format", "dummy", "--context-length", "256"))

    class Dying(SGLangServer):
        async def begin_update(self) -> None:
            await super().begin_update()
            kill(third.process)

    deadlines = Deadlines(update=100)
    servers = [Dying(third.url, deadlines=deadlines), SGLangServer(pair[1].url, deadlines=deadlines)]
    config = WeightSyncConfig(method="distributed", timeout_seconds=100)
    sync = WeightSync(
        servers,
        config,
        model_folder=MODEL,
        weights_folder=tmp_path,
        dtype=torch.float32,
        device=torch.device("cpu"),
        tied=True,
    )
    model = build_hf_model(read_hf_config(MODEL), torch.float32, seed=0)
    try:
        first = sync.send(iter(stream_model(model)), 1)
        assert first.failed.keys() == {third.url, pair[1].url} and "no response within" not in str(first.failed)
        second = sync.send(iter(stream_model(model)), 1)
        assert list(second.good) == [pair[1].url] and list(second.absent) == [third.url]
        assert version(pair[1]) == 1
    finally:
        sync.close()
        stop_engine(third)


def test_a_server_killed_during_a_rollout_loses_no_sample(pair: list[Engine], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    # With a training this short all sums are wrong, and a run without a gradient shows nothing.
    (tmp_path / "reward.py").write_text("def score(completion, label):\n    return len(set(completion)) / 8\n")
    reward = f"{tmp_path}/reward.py:score"
    settings: dict[str, Any] = {"run__num_steps": 8, "rollout__max_new_tokens": 100, "model__path": chain_sum_base(5)}
    settings["reward__function"] = reward
    run = subprocess.Popen(
        command(arguments(pair, folder, **settings), processes=2),
        env=environment(),
        stdout=(tmp_path / "out").open("w"),
        stderr=subprocess.STDOUT,
    )
    wait_for(lambda: (folder / "metrics.jsonl").is_file() and len(records(folder)) > 2, run, tmp_path / "out")
    wait_for(lambda: num_running(pair[0]) >= 4, run, tmp_path / "out")  # the probe is one
    kill(pair[0].process)
    assert run.wait(300) == 0, (tmp_path / "out").read_text()
    assert_trains(folder, evaluation_may_stay=True)
    steps = step_records(folder)
    assert len(steps) == 8
    for step in steps:
        assert step["rollout/policy_age_max"] == 0
        assert step["train/abs_prob_diff_first"] < 1e-5
        assert step["train/router_missing"] == 0
    assert query_server(pair[1])[0].policy_version == 16
    # Requests of both ranks were under way there, and all of them were asked for again.
    assert sum(step["rollout/evicted_servers"] for step in steps) == 1
    assert sum(step["rollout/retried_requests"] for step in steps) > 0
    assert pair[0].url in (tmp_path / "out").read_text()


def killed_in_sync(run: subprocess.Popen, pair: list[Engine]) -> None:
    """Kill the trainer while a server has half of the weights.

    The sync may end between the server's response and the signal. So the trainer is stopped first, and the servers are
    queried again after pending data has arrived.
    """
    end = time.monotonic() + 120
    while time.monotonic() < end and run.poll() is None:
        if -1 in map(version, pair):
            signal_all(run, signal.SIGSTOP)
            time.sleep(2)
            if -1 in map(version, pair):
                kill(run)
                run.wait(30)
                return
            signal_all(run, signal.SIGCONT)
    pytest.fail("no sync was seen")


def kill(process: subprocess.Popen | psutil.Process) -> None:
    """Send SIGKILL to a process and its descendants."""
    signal_all(process, signal.SIGKILL)


def signal_all(process: subprocess.Popen | psutil.Process, number: signal.Signals) -> None:
    """Send a signal to a process and its descendants, except torch's shared memory manager.

    The manager outlives the other processes to remove their shared memory.
    """
    program = psutil.Process(process.pid)
    for member in [program, *program.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            if not member.name().startswith("torch_shm_man"):
                member.send_signal(number)


def shared_memory() -> set[str]:
    """Return the names of the shared memory files of torch on this machine."""
    return {file.name for file in Path("/dev/shm").glob("torch_*")}


def version(engine: Engine) -> int:
    """Return the policy version that a server reports."""
    with urllib.request.urlopen(engine.url + "/model_info", timeout=30) as answer:
        return parse_policy_version(json.load(answer)["weight_version"])


def num_running(engine: Engine) -> int:
    """Return the number of running requests of a server."""
    with urllib.request.urlopen(engine.url + "/v1/loads", timeout=30) as answer:
        return sum(load["num_running_reqs"] for load in json.load(answer)["loads"])


def wait_for(condition: Any, run: subprocess.Popen, out: Path) -> None:
    """Wait until the condition holds; the run must keep running."""
    end = time.monotonic() + 240
    while not condition():
        assert run.poll() is None and time.monotonic() < end, out.read_text()
        time.sleep(0.05)
