"""``megatron-dppo plan`` counts what sampling filters, Top-K and router replay add to a token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.config.io import load_config
from megatron_dppo.config.layout import resolve_layout
from megatron_dppo.hf.folder import model_shape
from megatron_dppo_plan.arithmetic import ASSUMED_MASK_SIZE, TokenBytes, assumed_mask_size, plan_token_bytes
from megatron_dppo_plan.machine import MACHINES
from megatron_dppo_plan.models import load_model_config
from megatron_dppo_plan.plan import Plan, make_plan
from megatron_dppo_plan.rehearsal_pool import RehearsalPool
from megatron_dppo_plan.text import format_plan

EXAMPLES = Path(__file__).parents[3] / "examples"
TOKENS = 8192
HIDDEN = 64


@pytest.fixture(scope="module")
def rehearsals() -> Iterator[RehearsalPool]:
    with RehearsalPool(1) as rehearsals:
        yield rehearsals


def small(rehearsals: RehearsalPool, *overrides: str) -> Plan:
    config = load_config(EXAMPLES / "chain_sum/dppo.toml", [f"--train.micro_batch_tokens={TOKENS}", *overrides])
    return make_plan(config, 2, MACHINES["h100"], rehearsals, kinds=["all"])


def part(plan: Plan, phase: str) -> int:
    return max(peak.by_phase.get(phase, 0) for peak in plan.ranks["all"].measured.peaks.values())


@pytest.mark.slow
def test_sampling_masks_and_combine_weights_are_in_the_memory_of_a_rank(rehearsals: RehearsalPool) -> None:
    plain = small(rehearsals, "--train.router_replay=rollout")
    full = small(
        rehearsals,
        "--train.router_replay=rollout",
        "--train.router_replay_weights=true",
        "--rollout.top_k=10",
        "--loss.name=dppo_topk_tv",  # of which the head checks ids and sets
        "--loss.topk=4",
    )
    slots = 2 * 4 * (4 + 1)  # ids and log-probabilities of the Top-K
    assert part(full, "row") - part(plain, "row") == TOKENS * (4 * 10 + slots)
    # Two layers of two experts, a byte each, and as many fp32 weights; each is on the device once.
    assert part(full, "replay") - part(plain, "replay") >= TOKENS * 2 * 2 * 4 > part(plain, "replay") / 2
    text = format_plan(full)
    assert "44 sampling mask (10 ids, " in text and "4 experts, 16 combine weights" in text


def test_the_noise_of_the_layers_is_in_the_memory_of_the_forward_pass(rehearsals: RehearsalPool) -> None:
    noise = part(small(rehearsals, "--train.layer_noise.std=1e-3"), "forward")
    # The draw and its product with the standard deviation, in fp32, and no more while the backward pass is under way.
    assert 0 <= noise - part(small(rehearsals), "forward") - 2 * 4 * TOKENS * HIDDEN < 1024


def columns(*overrides: str) -> TokenBytes:
    config = load_config(EXAMPLES / "qwen3_30b_a3b/dppo.toml", overrides)
    model: Any = load_model_config(config.model.path)[0]
    return plan_token_bytes(config, model, resolve_layout(config.parallel, config.batch, 32, model_shape(model)))


def test_the_bytes_of_a_token_of_the_30b_example() -> None:
    plain = columns()
    assert (plain.sampled, plain.topk, plain.sampling_mask, plain.routes, plain.router_weights) == (8, 0, 0, 48 * 8, 0)
    # 256 samples on a data-parallel rank, of 256 + 0.4 x 16384 tokens
    assert plain.step == (8 + 48 * 8) * 256 * (256 + 6554)
    assert columns("--train.router_replay=off").total == 8
    assert columns("--train.router_replay=recorded").routes == 0  # the trainer's own stay with it
    assert columns("--loss.name=dppo_topk_kl").topk == 21 * 8
    assert columns("--rollout.top_k=20").sampling_mask == 4 * 21
    assert columns("--rollout.top_k=20", "--rollout.top_p=0.9").sampling_mask == 4 * 21
    assert columns("--rollout.top_k=4096", "--rollout.top_p=0.9").sampling_mask == 4 * (ASSUMED_MASK_SIZE + 1)


def test_a_sampling_mask_is_never_larger_than_the_vocabulary() -> None:
    config = load_config(EXAMPLES / "chain_sum/dppo.toml", ["--rollout.top_p=0.9"])
    assert (assumed_mask_size(config, 16), assumed_mask_size(config, 1000)) == (16, ASSUMED_MASK_SIZE)
