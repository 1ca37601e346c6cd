"""Output of ``megatron-dppo plan`` for an optimizer on the host, and the recipes of the 30B example that use it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dppo.config.io import load_config
from megatron_dppo.config.layout import resolve_layout
from megatron_dppo.errors import ConfigError, PlanError
from megatron_dppo_plan.arithmetic import optimizer_bytes_on_device
from megatron_dppo_plan.machine import MACHINES
from megatron_dppo_plan.measurement import UpdateMeasurement, scale_optimizer
from megatron_dppo_plan.meter import HOST, Meter, Peak
from megatron_dppo_plan.plan import PlannedModel, make_plan
from megatron_dppo_plan.rehearsal_pool import RehearsalPool
from megatron_dppo_plan.search import OFFLOAD, Candidate, PlanSearch, min_rank_bytes, parse_axes
from megatron_dppo_plan.text import format_candidates, format_plan

pytestmark = pytest.mark.slow

FILE = Path(__file__).parents[3] / "examples/qwen3_30b_a3b/dppo.toml"
H100, GIB = MACHINES["h100"], 2**30
PARAMETERS = 30_532_122_624


def big(*flags: str) -> Any:
    return load_config(FILE, flags)


RECIPES = [(8, OFFLOAD["optimizer"], 36.4), (16, (), 57.75), (32, (), 47.1), (64, (), 41.75)]
"""Trainer GPUs of 1, 2, 4, 8 and 16 nodes, flags, and GiB of the fullest rank as the documents say."""
CHOSEN = RECIPES if os.environ.get("EVERYTHING") else RECIPES[:1]


@pytest.mark.parametrize(("gpus", "flags", "size"), CHOSEN)
def test_the_recipes_of_the_30b_example_fit(gpus: int, flags: tuple[str, ...], size: float) -> None:
    with RehearsalPool(1) as rehearsals:
        plan = make_plan(big(*flags), gpus, H100, rehearsals, kinds=["hot"], few_layers=True)
    rank = plan.ranks["hot"]
    assert not plan.oversized_ranks and not plan.is_tight and rank.total / GIB == pytest.approx(size, abs=0.1)
    if flags:
        assert rank.measured.static["optimizer"] == 0
        assert rank.measured.host == pytest.approx(16 * PARAMETERS / gpus, rel=2e-3)  # and padding
        assert rank.host_seconds == pytest.approx((6 / 64e9 + 38 / 76.8e9) / 0.7 * PARAMETERS / gpus, rel=2e-3)
        assert "Offloaded optimizer on the host: 56.89 GiB per rank, 455" in format_plan(plan)
        assert plan.step.updates == pytest.approx(1389, rel=0.01)
        small = replace(plan, machine=replace(H100, name="small host", host_memory=round(plan.step.host) - 1))
        assert plan.fits and not small.fits and "Does NOT fit 8 x small host: the host memory." in format_plan(small)
        assert Candidate(flags, plan).sort_key[:2] == (False, False) < Candidate(flags, small).sort_key[:2]
        assert "NO, too much on the host" in format_candidates([Candidate(flags, small)])
    else:
        assert rank.measured.host == 0 == rank.host_seconds and "Offloaded optimizer" not in format_plan(plan)


def test_what_is_allocated_on_the_host_is_counted_apart() -> None:
    with Meter() as meter:
        with meter.during(HOST):
            host, device = torch.zeros(256), torch.zeros(64)
        assert meter.bytes_in_use == 0 and meter.bytes_in_phase(HOST) == 1280 and not meter.peaks
        meter.relabel_device_tensors([device], "optimizer")
        meter.relabel([host, device], "weights")
        assert (meter.bytes_in_use, meter.bytes_in_phase("optimizer"), meter.bytes_in_phase(HOST)) == (256, 256, 1024)
        assert meter.peak.by_phase == {"optimizer": 256}
        del host, device
        assert meter.bytes_in_use == meter.bytes_in_phase(HOST) == 0


def test_a_precision_aware_optimizer_keeps_less() -> None:
    aware = "--use-precision-aware-optimizer"
    assert optimizer_bytes_on_device(big()) == 12
    assert optimizer_bytes_on_device(big(aware)) == 2 + 4 + 4
    assert optimizer_bytes_on_device(big(aware, "--exp-avg-dtype=bf16", "--exp-avg-sq-dtype=fp8")) == 2 + 2 + 1
    half = big(*OFFLOAD["optimizer"], "--optimizer-offload-fraction=0.5")
    assert optimizer_bytes_on_device(half) == 6
    peak = Peak(100, "backward", {"optimizer": 24, "forward": 76})
    static = {"weights": 4, "optimizer": 24}
    whole = UpdateMeasurement(
        static=static, start_peak=replace(peak), peaks={"backward": peak}, micro_batches=1, collectives=[]
    )
    result = scale_optimizer(whole, 10 / 12)
    assert result.static == {"weights": 4, "optimizer": 20}
    assert result.peak == Peak(96, "backward", {"optimizer": 20, "forward": 76}) == result.start_peak


def test_offloading_is_something_to_search() -> None:
    assert parse_axes(["offload=optimizer,none"]) == {"offload": ["optimizer", "none"]}
    with pytest.raises(PlanError, match="got 'all'"):
        parse_axes(["offload=all"])
    model = PlannedModel.from_config(big())
    config = big(*OFFLOAD["optimizer"])
    layout = resolve_layout(config.parallel, config.batch, 8, model.shape)
    dense = PARAMETERS - model.expert_parameters
    assert min_rank_bytes(config, model, layout) == pytest.approx(
        6 * (dense / 2 + model.expert_parameters / 8), abs=100
    )
    with RehearsalPool(1) as rehearsals:
        search = PlanSearch(lambda flags: big(*flags), 8, H100, rehearsals)
        flags = search.feasible_flags({"offload": ["optimizer"], "recompute": ["full"]}, H100.memory)
        assert [set(result) for result in flags] == [set(OFFLOAD["optimizer"])]
        offloaded = PlanSearch(lambda flags: big(*OFFLOAD["optimizer"], *flags), 16, H100, rehearsals)
        assert offloaded.feasible_flags({"offload": ["optimizer"]}, H100.memory) == [()]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--optimizer-cpu-offload"],
            "optimizer.optimizer_cpu_offload = true .* Set use_precision_aware_optimizer = true",
        ),
        (["--use-precision-aware-optimizer", "--model.dtype=fp32"], "with model.dtype = 'fp32' .* for bf16 weights"),
        (["--use-precision-aware-optimizer", "--no-use-distributed-optimizer"], "use_distributed_optimizer = false"),
        ([*OFFLOAD["optimizer"], "--exp-avg-dtype=bf16"], "exp_avg_dtype = 'bf16': only Transformer"),
        (["--main-params-dtype=fp16"], "optimizer.main_params_dtype = 'fp16': only Transformer"),
        (["--optimizer-offload-fraction=0.5"], "optimizer_offload_fraction = 0.5 .* no effect without"),
        (["--overlap-cpu-optimizer-d2h-h2d"], "overlap_cpu_optimizer_d2h_h2d = true have"),
        (["--optimizer-offload-fraction=0"], "optimizer_offload_fraction"),
    ],
)
def test_memory_settings_that_megatron_cannot_do(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        big(*flags)


def test_a_precision_aware_optimizer_on_the_gpu_needs_transformer_engine() -> None:
    from megatron_dppo.mcore.transformer_engine import check_adam_support

    check_adam_support(big(*OFFLOAD["optimizer"]).optimizer)
    check_adam_support(big().optimizer)
    with pytest.raises(ConfigError, match=r"optimizer.use_precision_aware_optimizer = true: .* Install transformer-"):
        check_adam_support(big("--use-precision-aware-optimizer").optimizer)
