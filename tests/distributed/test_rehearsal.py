"""The rehearsal of a rank against the rank: memory, collectives and FLOPs of one update of a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_dppo_plan.rehearsal_pool import RehearsalPool
from tests.distributed.layouts import ALLGATHER, CP, EP, ETP, FULL, OVERLAP, PP, SELECTIVE, TP, VPP
from tests.distributed.parity import Case
from tests.distributed.rehearsal_cases import real, rehearsal_request

pytestmark = pytest.mark.distributed
TOLERANCE = 0.05
CASES = [
    (1, Case(micro_batch_tokens=64), "fp32"),
    (1, Case(micro_batch_tokens=64, dense=True), "bf16"),
    (2, Case({**TP, **EP}, micro_batch_tokens=64), "bf16"),
    (2, Case(PP, micro_batch_tokens=64, transformer=FULL), "fp32"),
    (2, Case({**CP, **EP}, micro_batch_tokens=64), "fp32"),
    (2, Case(VPP, micro_batch_tokens=64), "fp32"),
    (2, Case(PP, micro_batch_tokens=64, transformer={"num_layers_in_first_pipeline_stage": 3}), "fp32"),
    (2, Case(EP, micro_batch_tokens=64, transformer=ALLGATHER), "fp32"),
    (2, Case({**EP, "use_distributed_optimizer": False}, micro_batch_tokens=64), "fp32"),
    (2, Case({**TP, **EP}, micro_batch_tokens=64, family="deepseek_v3"), "bf16"),
    # Three chunks of gated delta nets, whose heads context parallelism exchanges.
    (2, Case({**CP, **EP}, micro_batch_tokens=192, family="qwen3_next"), "fp32"),
    (4, Case({**TP, **PP, **EP}, micro_batch_tokens=64), "fp32"),
    (4, Case({**TP, **ETP, **OVERLAP}, micro_batch_tokens=64, transformer=SELECTIVE), "fp32"),
]
SAMPLED = (1, 3, 10, 11)
"""Cases that CI takes: each parallelism, recomputation, bf16, a dense model and gated delta nets."""


@pytest.fixture(scope="module")
def rehearsals() -> Iterator[RehearsalPool]:
    with RehearsalPool(1) as rehearsals:
        yield rehearsals


@pytest.mark.parametrize(
    ("world_size", "case", "dtype"),
    [pytest.param(*case, marks=[] if i in SAMPLED else [pytest.mark.long]) for i, case in enumerate(CASES)],
)
def test_a_rehearsed_rank_is_like_the_real_one(
    world_size: int, case: Case, dtype: str, tmp_path: Path, rehearsals: RehearsalPool
) -> None:
    real_ranks = real(case, world_size, tmp_path, dtype)
    # Without a pipeline all ranks are alike.
    compared = sorted({0, world_size - 1}) if case.parallel.keys() & PP.keys() else [0]
    planned = rehearsals.run([rehearsal_request(case, world_size, rank, dtype) for rank in compared])
    for rank, result in zip(compared, planned, strict=True):
        expected = real_ranks[rank]
        for part in ("weights", "gradients", "optimizer"):
            assert result.static[part] == expected.static[part], part
        assert result.peak.total == pytest.approx(expected.peak.total, rel=TOLERANCE)
        assert result.start_peak.total == pytest.approx(expected.start_peak.total, rel=TOLERANCE)
        # Two parts may be nearly equal, and what gloo still holds differs from run to run.
        assert expected.peaks[result.peak.phase].total == pytest.approx(expected.peak.total, rel=TOLERANCE)
        activations = sum(expected.peak.by_phase.values()) - sum(expected.static.values())
        assert result.peak.total - sum(result.static.values()) == pytest.approx(activations, rel=TOLERANCE)
        assert result.collectives == expected.collectives
        for phase in ("forward", "head", "backward"):
            if phase in expected.work:
                assert result.work[phase].flops == expected.work[phase].flops, phase
