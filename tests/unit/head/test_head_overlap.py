"""The GEMM of the next chunk of mode B hides the collective of a chunk where two are in flight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_dppo.head import loss as fused_head_loss
from megatron_dppo.head.loss import dppo_head_loss
from megatron_dppo.head.row_plan import chunks_in_flight
from megatron_dppo.head.rows import VocabShard
from megatron_dppo.losses import policy_loss
from megatron_dppo.types import LossInputs, LossOutput
from tests.distributed.head_cases import (
    TOKEN_LOSSES,
    HeadCase,
    check_gradients,
    full_leaves,
    full_loss_inputs,
    make_head_problem,
)


@pytest.mark.parametrize(
    ("in_flight", "order"),
    [(1, ["gemm", "loss"] * 3), (2, ["gemm", "gemm", "loss", "gemm", "loss", "loss"])],
)
def test_two_chunks_in_flight_put_the_gemm_of_the_next_before_the_loss(
    in_flight: int, order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    logits, problem = VocabShard.logits, make_head_problem(HeadCase(tokens=40))

    def gemm(*arguments: Any) -> Tensor:
        events.append("gemm")
        return logits(*arguments)

    def loss(inputs: LossInputs) -> LossOutput:
        events.append("loss")
        return policy_loss(inputs, TOKEN_LOSSES["dppo_topk_tv"])

    monkeypatch.setattr(fused_head_loss, "chunks_in_flight", lambda *_: in_flight)
    monkeypatch.setattr(VocabShard, "logits", gemm)
    leaves, full = problem.leaves(None), full_leaves(problem)
    hidden, weight, _ = leaves
    got = dppo_head_loss(
        hidden,
        weight,
        problem.targets,
        loss,
        group=None,
        vocab_size=problem.case.vocab_size,
        temperature=problem.case.temperature,
        chunk_tokens=14,
    )
    assert events == order
    want = policy_loss(full_loss_inputs(problem, full), TOKEN_LOSSES["dppo_topk_tv"])
    got.loss_sum.backward()
    want.loss_sum.backward()
    torch.testing.assert_close(got.loss_sum.double(), want.loss_sum.double(), rtol=1e-4, atol=1e-4)
    check_gradients(problem, leaves, full, None, f"{in_flight} in flight")


def test_two_chunks_are_in_flight_only_if_a_gpu_overlaps_compute_and_communication() -> None:
    group: Any = object()
    assert chunks_in_flight(torch.device("cuda"), group) == 2
    assert chunks_in_flight(torch.device("cuda"), None) == chunks_in_flight(torch.device("cpu"), group) == 1
