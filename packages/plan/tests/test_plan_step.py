"""A plan's rows, time of a whole step, cost and limits of a search, against numbers by hand."""

from __future__ import annotations

import os
import random
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import megatron_dppo_plan.search
from megatron_dppo.commands.main import main
from megatron_dppo.config.io import load_config
from megatron_dppo.config.layout import resolve_layout
from megatron_dppo.errors import PlanError
from megatron_dppo.hf.folder import model_shape
from megatron_dppo_plan.arithmetic import (
    KvCachePlan,
    assumed_response_lengths,
    plan_batch,
    plan_kv_cache,
    plan_token_bytes,
    plan_transfers,
)
from megatron_dppo_plan.machine import MACHINES
from megatron_dppo_plan.measurement import UpdateMeasurement
from megatron_dppo_plan.meter import Peak
from megatron_dppo_plan.models import load_model_config, sample_rows
from megatron_dppo_plan.plan import Plan, PlannedModel, dispatch_ratio, make_plan
from megatron_dppo_plan.rehearsal_pool import RehearsalPool, RehearsalTimeout
from megatron_dppo_plan.search import PlanSearch
from megatron_dppo_plan.step_time import (
    LAUNCH_SIGNAL_SECONDS,
    ServedModel,
    StepPlan,
    decode_seconds,
    plan_step,
    proof_seconds,
    served_model,
)
from megatron_dppo_plan.text import format_plan, format_step
from tests.unit.configs import ONE_RANK, config

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples/qwen3_30b_a3b/dppo.toml"
H100 = MACHINES["h100"]


def big(*overrides: str) -> Any:
    return load_config(EXAMPLE, overrides)


def tiny(budget: int) -> Any:
    """Prompts of 2 tokens, and of four responses to each 2, 6, 10 and 14 tokens (mean 8)."""
    return config(
        data={"max_prompt_tokens": 8},
        rollout={"prompts_per_step": 1, "samples_per_prompt": 4, "max_new_tokens": 20},
        train={"micro_batch_tokens": budget},
    )


@pytest.mark.parametrize(
    ("budget", "rows", "longest", "full_rows"),
    [
        (28, 2, 28, 2.0),  # 16 + 12 and 8 + 4
        (20, 2, 28, 40 / 28),  # 16 + 4 and 12 + 8
        (10, 4, 28, 40 / 28),  # each one alone: 16, 12, 8, 4
        (64, 1, 64, 1.0),
    ],
)
def test_rows_are_those_that_first_fit_makes_and_a_long_sample_has_its_own(
    budget: int, rows: int, longest: int, full_rows: float
) -> None:
    made = tiny(budget)
    planned = plan_batch(made, ONE_RANK)
    assert (planned.micro_batches, planned.row_tokens) == (rows, longest)
    assert planned.full_rows == pytest.approx(full_rows)
    hf_config, _ = load_model_config("Qwen3-8B")
    (row,) = sample_rows(made, hf_config, ONE_RANK, 1)
    assert len(row.tokens) == longest


def test_a_smaller_micro_batch_does_not_make_the_30b_example_fit() -> None:
    """The audit's case: 8 GPUs, ``micro_batch_tokens`` lowered after running out of memory."""
    hf_config, _ = load_model_config("Qwen3-30B-A3B")
    lowered = big("--train.micro_batch_tokens", "4096")
    layout = resolve_layout(lowered.parallel, lowered.batch, 8, model_shape(hf_config))
    (row,) = sample_rows(lowered, hf_config, layout, 1)
    assert len(row.tokens) == 17408


@pytest.mark.parametrize(("mean", "spread"), [(8, (0, 16)), (10, (0, 20)), (15, (10, 20)), (20, (20, 20))])
def test_assumed_lengths_have_the_mean_and_the_limit(mean: int, spread: tuple[int, int]) -> None:
    lengths = assumed_response_lengths(tiny(28), 100, mean)
    assert sum(lengths) / 100 == pytest.approx(mean, abs=0.6)
    assert min(lengths) >= spread[0] and max(lengths) <= spread[1] and len(lengths) == 100


def test_decoding_time_is_the_sum_over_iterations() -> None:
    model = ServedModel(
        num_layers=3,
        dense_bytes=10**9,
        expert_bytes=8 * 10**9,
        expert_fraction=0.25,
        cache=KvCachePlan(
            bytes_per_token=10**5,
            bytes_per_sequence=0,
            gpus_per_server=2,
            cache_bytes=None,
            tokens_in_flight=None,
            longest=13,
            weight_bytes=9 * 10**9,
        ),
    )
    lengths, prompt, capacity = [5, 2, 9, 1, 1, 7, 3], 4, 3
    seconds = 0.0
    waiting, running = list(lengths), list[list[int]]()
    while waiting or running:
        while waiting and len(running) < capacity:
            running.append([waiting.pop(0), 0])
        count = len(running)
        # The cache that an iteration reads grows while it runs: half of its own token counts.
        context = sum(prompt + done + 0.5 for _, done in running)
        read = 1e9 + (1 - 0.75**count) * 8e9 + 1e5 * context
        arithmetic = count * (1e9 + 0.25 * 8e9) / (2 * 989.4e12 * 0.5)
        seconds += max(read / (2 * 3.35e12 * 0.7), arithmetic) + 3 * 60e-6
        for sequence in running:
            sequence[1] += 1
        running = [sequence for sequence in running if sequence[1] < sequence[0]]
    planned = decode_seconds(lengths, prompt, capacity, model, 2, H100, 989.4e12)
    assert planned == pytest.approx(seconds, rel=1e-6)


def step_of(updates: float = 354.0, servers: int | None = None, *overrides: str) -> StepPlan:
    made = big(*overrides)
    model = PlannedModel.from_config(made)
    layout = resolve_layout(made.parallel, made.batch, 32, model.shape)
    batch = plan_batch(made, layout)
    cache = plan_kv_cache(made, model.hf_config, model.parameters, H100)
    return plan_step(
        made,
        layout,
        H100,
        batch,
        cache,
        plan_token_bytes(made, model.hf_config, layout, batch),
        plan_transfers(made, model.parameters, model.trained, layout, H100),
        served_model(model.hf_config, model.parameters, model.expert_parameters, cache),
        updates=updates,
        host_per_rank=0,
        shape=model.shape,
        servers=servers,
    )


def test_the_step_of_the_30b_example_by_hand() -> None:
    step = step_of(servers=16)
    assert (step.servers, step.server_gpus, step.gpus, step.is_overlapped) == (16, 32, 64, False)
    assert step.rollout is not None
    assert step.seconds == pytest.approx(step.rollout + 354.0 + step.sync)
    # 14 bytes a parameter over four nodes at 2 GB/s.
    assert step.save == pytest.approx(14 * 30_532_122_624 / 4 / 2e9)
    assert step.gpu_hours == pytest.approx(64 * 500 * step.seconds / 3600)
    # Two kept and one that is written, and bf16 weights.
    assert step.disk == 3 * 14 * 30_532_122_624 + 2 * 30_532_122_624
    # Longest response: 16,384 iterations in which at least the chosen experts of one token are read.
    assert step.rollout > 16384 * 48 * 60e-6
    assert step_of().servers == 4, "rollout.servers.count"
    assert step_of(354.0, 16, "--train.max_staleness", "1").seconds == pytest.approx(
        max(step.rollout, 354.0) + step.sync
    )


def test_a_sync_counts_its_proof() -> None:
    step = step_of(servers=16)
    # The 18,867 tensors of Qwen3-30B-A3B at 15 us, launches of 128 MiB; 432 tensors of each rank of a server at 70 us,
    # and of 16 servers of two ranks at 3 us.
    sent = 48 * (128 * 3 + 9) * 15e-6 + 2 * 30_532_122_624 / 2**27 * 60e-6
    assert step.proof == pytest.approx(sent + 432 * 70e-6 + 16 * 2 * 432 * 3e-6)
    assert step.sync == pytest.approx(2 * 30_532_122_624 / (0.7 * 50e9) + step.proof)
    assert step_of(354.0, 64).proof - step.proof == pytest.approx(48 * 2 * 432 * 3e-6)
    assert step_of(354.0, 16, "--rollout.weight_sync.checksum_every", "0").proof == 0.0
    shape = PlannedModel.from_config(big()).shape
    assert proof_seconds(big(), shape, 10**9, H100, gpus_per_server=1, servers=0) == 0.0, "the local engine"


def test_the_proof_of_few_large_tensors_takes_as_long_as_the_gpus_hash_them() -> None:
    made, shape = big(), replace(PlannedModel.from_config(big()).shape, num_experts=None, num_layers=10)
    seconds = proof_seconds(made, shape, 10**12, H100, gpus_per_server=4, servers=1)
    # 132 multiprocessors with 64 integer operations a clock, 39 operations a word, 70 % of that.
    rate = 132 * 64 * 1.755e9 / 39 * 4 * 0.7
    assert seconds == pytest.approx(10**12 / rate * 1.25 + 4 * 90 * 3e-6)


def test_fewer_servers_sample_for_longer() -> None:
    seconds = [step_of(servers=count).rollout or 0.0 for count in (4, 8, 16, 32)]
    assert seconds == sorted(seconds, reverse=True) and seconds[-1] > 0


def test_the_time_that_the_launch_script_gives_a_stop_is_the_one_that_plan_compares() -> None:
    (given,) = re.findall(r"^#SBATCH --signal=B:TERM@(\d+)$", (ROOT / "launch/qwen3_moe_dppo.sh").read_text(), re.M)
    assert int(given) == LAUNCH_SIGNAL_SECONDS


class FakePool(RehearsalPool):
    """Answers each request with one measurement; ``slow`` requests come after the time limit."""

    def __init__(self, slow_after: int = 10**9) -> None:
        super().__init__(1)
        self.left = slow_after

    def run(self, requests: Sequence[Any], *, few_layers: bool = False) -> list[Any]:
        self.left -= 1
        if self.left < 0 or time.monotonic() >= self.end:
            raise RehearsalTimeout("late")
        static = {"weights": 8 << 30, "gradients": 16 << 30, "optimizer": 10 << 30, "other": 0}
        peak = Peak(42 << 30, "backward", {"forward": 8 << 30})
        one = UpdateMeasurement(
            static=static, start_peak=peak, peaks={"backward": peak}, micro_batches=1, collectives=[]
        )
        return [one for _ in requests]


def planned(*overrides: str, **options: Any) -> Plan:
    with FakePool() as pool:
        return make_plan(big(*overrides), 32, H100, pool, **options)


def test_the_lines_on_a_step_warn_where_a_stop_takes_longer_than_the_script_gives() -> None:
    plan = planned(servers=16)
    text = format_plan(plan)
    assert "16 servers of 2 h100" in text and "--signal=B:TERM@" in text
    # An evaluation counts as long as the sampling of a step; without one a stop fits into the script's time.
    step = plan.step
    assert step.has_evaluation and step.stop_seconds == step.seconds + (step.rollout or 0.0) + step.save > 600
    short = replace(step, has_evaluation=False)
    assert short.stop_seconds < 600 == short.signal_seconds
    assert "NOTE: launch/qwen3_moe_dppo.sh signals 600 s" not in "\n".join(format_step(short, plan))
    slow = replace(plan.step, updates=1389.0)
    needed = int(re.findall(r"--signal=B:TERM@(\d+)", "\n".join(format_step(slow, plan)))[0])
    assert slow.stop_seconds <= needed < slow.stop_seconds + 60
    assert "NOTE: launch/qwen3_moe_dppo.sh signals 600 s" in "\n".join(format_step(slow, plan))
    assert "MORE than the 2048.00 GiB of a h100 node" in "\n".join(format_step(replace(slow, host=3 << 40), plan))
    local = replace(plan.step, rollout=None, servers=0)
    assert "rollouts of the local engine are not planned" in "\n".join(format_step(local, plan))


def test_a_sample_longer_than_a_micro_batch_is_named() -> None:
    text = format_plan(planned("--train.micro_batch_tokens", "4096"))
    assert "28 micro-batches of up to 17408 tokens: longer than train.micro_batch_tokens = 4096" in text
    assert "13 micro-batches of 17408 tokens" in format_plan(planned())
    assert "responses of 3000) = " in format_plan(planned(mean_response=3000))


def test_the_flex_dispatcher_sends_a_token_once_to_each_rank() -> None:
    flex = big("--moe-token-dispatcher-type=flex", "--moe-flex-dispatcher-backend=deepep")
    hf_config, _ = load_model_config("Qwen3-30B-A3B")
    layout = resolve_layout(flex.parallel, flex.batch, 32, model_shape(hf_config))
    generator = random.Random(0)
    draws = [len({expert // 16 for expert in generator.sample(range(128), 8)}) for _ in range(20_000)]
    assert dispatch_ratio(flex, hf_config, layout) == pytest.approx(sum(draws) / len(draws) / 8, rel=0.01)
    assert dispatch_ratio(big(), hf_config, layout) == 1.0
    assert "note     the flex dispatcher is planned as alltoall" in format_plan(
        planned("--moe-token-dispatcher-type=flex", "--moe-flex-dispatcher-backend=deepep")
    )


AXES = {"tensor-model-parallel-size": ("1", "2", "4"), "recompute": ("full", "none")}


@pytest.mark.slow
def test_a_search_ends_in_time_and_names_what_it_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def search(slow_after: int, seconds: float = 100.0) -> PlanSearch:
        return PlanSearch(lambda flags: big(*flags), 32, H100, FakePool(slow_after), seconds=seconds)

    complete = search(10**9)
    candidates = complete.rank_all(AXES, lambda total, done: None)
    assert complete.untried is None and len(candidates) > 3
    short = search(2)
    assert len(short.rank_all(AXES, lambda total, done: None)) == 2
    assert short.untried is not None
    assert f"{len(candidates) - 2} of {len(candidates)} combinations, the next ones: " in short.untried
    with pytest.raises(PlanError, match="Not tried within 100"):
        search(0).rank_all(AXES, lambda total, done: None)
    with pytest.raises(PlanError):
        search(10**9, seconds=0.0).rank_all(AXES, lambda total, done: None)
    # Its usual axes have thousands of combinations, each of which is loaded.
    monkeypatch.setattr(megatron_dppo_plan.search, "DEFAULT_AXES", AXES)
    assert list(search(0).find_nearest(3)) == []


def test_rehearsals_that_take_too_long_are_killed_with_what_they_have_forked(tmp_path: Path) -> None:
    class Sleepers(RehearsalPool):
        def _start(self) -> subprocess.Popen[bytes]:
            script = f"sleep 100 & echo $! > {tmp_path}/child; wait"
            process = subprocess.Popen(
                ["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )
            self._processes.append(process)
            return process

    def is_running(number: int) -> bool:
        try:
            return Path(f"/proc/{number}/stat").read_text().split()[2] != "Z"
        except FileNotFoundError:
            return False

    start = time.monotonic()
    with Sleepers(1) as pool:
        with pytest.raises(RehearsalTimeout):
            pool.end = time.monotonic() + 1
            pool.run([object()])  # type: ignore[list-item]
        child = int((tmp_path / "child").read_text())
        end = time.monotonic() + 5
        while is_running(child) and time.monotonic() < end:
            time.sleep(0.01)
        assert not is_running(child)
    assert time.monotonic() - start < 10
    assert os.getpgrp() != child


def test_numbers_on_the_command_line_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--num-servers=0", "--mean-response-tokens=0", "--search-seconds=0"):
        assert main(["plan", str(EXAMPLE), "--world-size", "32", flag]) == 2
        assert f"{flag.split('=')[0]} 0" in capsys.readouterr().err
    assert main(["plan", str(EXAMPLE), "--world-size", "32", "--mean-response-tokens", "20000"]) == 2
    assert "expected at most rollout.max_new_tokens = 16384" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "gpus", "copies"),
    [
        # Of the model's 4 key-value heads each of 16 GPUs has one, in 4 copies.
        (("--rollout.sglang.tp-size", "16", "--rollout.sglang.nnodes", "2"), 16, 4),
        # Two replicas of 8 GPUs inside of 16 ranks: two copies of each head for the sequences of a replica.
        (
            (
                "--rollout.sglang.tp-size",
                "16",
                "--rollout.sglang.dp-size",
                "2",
                "--rollout.sglang.enable-dp-attention",
                "true",
            ),
            16,
            2,
        ),
        (("--rollout.sglang.tp-size", "4", "--rollout.sglang.pp-size", "2"), 8, 2),
        (("--rollout.sglang.tp-size", "2"), 2, 1),
    ],
)
def test_the_cache_of_servers_over_nodes_and_with_replicas(options: Sequence[str], gpus: int, copies: int) -> None:
    made = big(*options)
    model = PlannedModel.from_config(made)
    cache = plan_kv_cache(made, model.hf_config, model.parameters, H100)
    room = gpus * 0.85 * H100.memory - 2 * model.parameters
    assert cache.gpus_per_server == gpus
    # 48 layers, 4 heads, 128 values of key and value, 2 bytes.
    assert cache.tokens_in_flight == pytest.approx(room / (48 * 4 * 2 * 128 * 2 * copies), rel=1e-6)
