"""The probe's verdicts, on answers with one thing wrong at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch

from megatron_dppo.rollout.probe import Expectation, ProbeAnswer, ProbeError, judge
from megatron_dppo.rollout.server import Generation, ServerInfo
from megatron_dppo.types import VersionSpan

R, TEMPERATURE = 32, 0.7
EXPECTED = Expectation(
    prompt="p", prompt_token_ids=(1, 2), vocab_size=50, temperature=TEMPERATURE, dtype="fp32", topk_logprobs=2
)
LOGITS = torch.randn(R, 50, generator=torch.Generator().manual_seed(0)) * 2
TOKENS = LOGITS.argmax(-1)


def of(logits: torch.Tensor) -> list[float]:
    """Log-probabilities of the response."""
    return logits.log_softmax(-1).gather(1, TOKENS[:, None]).squeeze(1).tolist()


TRAINER, TRAINER_RAW = of(LOGITS / TEMPERATURE), of(LOGITS)


def answer(logprobs: list[float], engine: Literal["sglang", "vllm"] = "sglang") -> ProbeAnswer:
    info = ServerInfo(engine=engine, engine_version="1", model="/m", policy_version=3, max_context=64, world_size=1)
    generation = Generation(
        token_ids=tuple(TOKENS.tolist()),
        logprobs=tuple(logprobs),
        finish_reason="length",
        versions=(VersionSpan(3, 0, R),),
    )
    return ProbeAnswer(info=info, url="http://s", generation=generation)


def test_equal_logprobs_pass_and_their_distance_is_told() -> None:
    shifted = [x + 2e-5 for x in TRAINER]
    result = judge(answer(shifted), EXPECTED, TRAINER, TRAINER_RAW)
    assert result.mean_difference == pytest.approx(2e-5) == result.largest_difference


@pytest.mark.parametrize(
    ("engine", "flag"), [("sglang", "SGLANG_RETURN_ORIGINAL_LOGPROB"), ("vllm", "--logprobs-mode processed_logprobs")]
)
def test_raw_logprobs_are_named_with_the_engines_own_setting(engine: Literal["sglang", "vllm"], flag: str) -> None:
    with pytest.raises(ProbeError, match=f"http://s: raw log-probabilities: .*{flag}"):
        judge(answer(TRAINER_RAW, engine), EXPECTED, TRAINER, TRAINER_RAW)


@pytest.mark.parametrize(
    ("engine", "flag"), [("sglang", "URL of the server itself"), ("vllm", "--generation-config vllm")]
)
def test_a_filtered_distribution_is_named(engine: Literal["sglang", "vllm"], flag: str) -> None:
    scaled = LOGITS / TEMPERATURE
    kept = scaled.masked_fill(scaled < scaled.topk(5).values[:, -1:], float("-inf"))
    with pytest.raises(ProbeError, match=f"filtered distribution: .*{flag}"):
        judge(answer(of(kept), engine), EXPECTED, TRAINER, TRAINER_RAW)


def test_a_top_k_with_tokens_that_were_never_sampled_is_a_filter() -> None:
    broken = answer([x - 0.5 for x in TRAINER], "vllm")
    topk = torch.full((R, 3), float("-inf"))
    broken = replace(broken, generation=replace(broken.generation, topk_logprobs=topk))
    with pytest.raises(ProbeError, match="filtered distribution"):
        judge(broken, EXPECTED, TRAINER, TRAINER_RAW)


def test_other_weights_are_named_with_what_the_server_serves() -> None:
    other = of(torch.randn(R, 50, generator=torch.Generator().manual_seed(1)))
    with pytest.raises(ProbeError, match=r"wrong weights: .*'/m', version 3") as caught:
        judge(answer(other), EXPECTED, TRAINER, TRAINER_RAW)
    assert "coarser type" not in str(caught.value)


def test_a_small_difference_points_to_the_type_and_passes_where_that_type_is_expected() -> None:
    noise = torch.randn(R, generator=torch.Generator().manual_seed(2)) * 2e-4
    near = [x + float(n) for x, n in zip(TRAINER, noise, strict=True)]
    with pytest.raises(ProbeError, match="coarser type than fp32"):
        judge(answer(near), EXPECTED, TRAINER, TRAINER_RAW)
    judge(answer(near), replace(EXPECTED, dtype="bf16"), TRAINER, TRAINER_RAW)


def test_what_is_not_a_number_never_passes() -> None:
    with pytest.raises(ProbeError, match="wrong weights"):
        judge(answer([float("nan"), *TRAINER[1:]]), EXPECTED, TRAINER, TRAINER_RAW)
