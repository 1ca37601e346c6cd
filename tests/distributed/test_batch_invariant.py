"""True on-policy: with ``rollout.batch_invariant`` what the engine reports is what training computes, to the bit."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.config.loss import LossConfig
from megatron_dppo.data.training_samples import to_training_sample
from megatron_dppo.parallel.objects import is_leader
from megatron_dppo.parallel.platform import Platform
from megatron_dppo.policy.update import Updater
from megatron_dppo.report.clock import Clock
from megatron_dppo.types import Prompt, PromptLimits, SamplingParams, TrainingSample
from tests.distributed.layouts import EP, TP
from tests.distributed.parity import Case, build_trainer, config_for, hf_reference
from tests.distributed.spawn import run_distributed
from tests.silent_tokenizer import SilentTokenizer

pytestmark = pytest.mark.distributed

MANY = bool(os.environ.get("EVERYTHING"))
STEPS, NEW_TOKENS = (50, 12) if MANY else (2, 16)
"""Short responses where there are many steps: each token costs a pass over all sequences."""
GROUPS, SIBLINGS = 3, 4
TOKENIZER = SilentTokenizer()
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "topk": {"topk_logprobs": 4, "temperature": 0.7},
    "filtered": {"top_p": 0.8, "top_k": 20, "return_sampling_mask": True},
}
IN_SHORT = (("tp", "topk"), ("ep", "filtered"))


def prompts(step: int, dp_rank: int) -> list[Prompt]:
    """Return the prompts of one rank, of different lengths; the second has fewer, of a source with a lower limit."""
    limits = PromptLimits(source="short", max_new_tokens=NEW_TOKENS // 4) if dp_rank == 1 else None
    numbers = random.Random(f"{step}/{dp_rank}")
    texts = [[numbers.randrange(2, 117) for _ in range(1 + 5 * i)] for i in range(GROUPS - dp_rank)]
    return [Prompt(prompt_id="", text="", token_ids=tuple(tokens), label="", limits=limits) for tokens in texts]


def sampled(engine: Any, trainer: Any, step: int, **settings: Any) -> list[TrainingSample]:
    own = [prompt for prompt in prompts(step, trainer.dp_rank) for _ in range(SIBLINGS)]
    params = SamplingParams(max_new_tokens=NEW_TOKENS, seed=100 * step + trainer.dp_rank, **settings)
    engine.policy_version = trainer.policy_version
    result = []
    for i, (prompt, c) in enumerate(zip(own, engine.generate(own, params), strict=True)):
        assert len(c.token_ids) <= prompt.limited(params).max_new_tokens
        topk = None if c.topk_token_ids is None else (c.topk_token_ids, c.topk_logprobs)
        advantage = 1.0 if i % 2 else -1.0
        result.append(
            to_training_sample(prompt.token_ids, c.token_ids, c.logprobs, advantage, topk, None, None, c.sampling_mask)
        )
    return result


def apart(trainer: Any, samples: list[TrainingSample], budget: int) -> float:
    """The largest ``|log pi - log mu|`` of this rank, Top-K included."""
    packed = trainer.pack(samples, budget)
    largest = 0.0
    for reading, batch in zip(trainer.token_logprobs(packed.batches)[0], packed.batches, strict=True):
        mask = batch.loss_mask
        largest = max(largest, _largest(reading.logprobs - batch.rollout_logprobs, mask))
        if batch.rollout_topk_ids is not None:
            used = mask[:, None] & (batch.rollout_topk_ids[:, :-1] >= 0)
            largest = max(largest, _largest(reading.id_logprobs - batch.rollout_topk_logprobs[:, :-1], used))
    return largest


def _largest(difference: Tensor, mask: Tensor) -> float:
    return float(difference[mask].abs().max()) if bool(mask.any()) else 0.0


def run_steps(rank: int, world_size: int, case: Case, setting: str, steps: int, file: str | None) -> None:
    from megatron_dppo.mcore.shims import apply_shims

    platform = Platform.detect(force_cpu=True)
    apply_shims(platform)
    from megatron_dppo.setup.batch_invariant_engine import BatchInvariantEngine

    settings = SETTINGS[setting]
    rollout = {"batch_invariant": True, "dtype": "fp32", "temperature": settings.get("temperature", 1.0)}
    model = hf_reference(case.tied, case.dense, case.shared)
    trainer = build_trainer(case, model, platform, "fp32", rollout=rollout)
    engine = BatchInvariantEngine(trainer, model.config, TOKENIZER, 96)
    train = config_for(case, rollout=rollout).train
    loss = LossConfig(name="dppo_topk_tv", topk=4) if setting == "topk" else LossConfig(name="dppo_binary_tv")
    updater = Updater(trainer, train, loss)
    worst, tokens, moved = 0.0, 0, 0.0
    for step in range(steps):
        samples = sampled(engine, trainer, step, **settings)
        for budget in (64, 512):  # packed alone and together, as training may have it
            worst = max(worst, apart(trainer, samples, budget))
        tokens += is_leader(trainer.groups.replica) * sum(int(sample.loss_mask.sum()) for sample in samples)
        # Equally many on every rank for the update; fewer were asked for on the second one.
        samples = samples[: (GROUPS - 1) * SIBLINGS]
        metrics: list[float] = []
        for _ in updater.run(
            samples, step, Clock(), lambda m, _, result=metrics: result.append(m["abs_prob_diff"]) or {}
        ):
            pass
        assert metrics == [0.0], "the first update's own pass"
        moved = max(moved, apart(trainer, samples, 512))
    assert worst == 0.0, f"{case} {setting}: max |log pi - log mu| = {worst} on rank {rank}"
    assert moved > 1e-4, "the updates have to move the policy, or nothing was tested"
    everywhere = torch.tensor([tokens])
    dist.all_reduce(everywhere)
    if file is not None and rank == 0:
        Path(file).write_text(json.dumps({"steps": steps, "tokens": int(everywhere), "max_abs": worst}))


def check_kernels(rank: int, world_size: int) -> None:
    """Every kernel on parts of a batch, against itself on the whole batch and against float64."""
    from megatron_dppo.mcore.shims import apply_shims

    apply_shims(Platform.detect(force_cpu=True))
    from megatron_dppo.mcore.invariant import InvariantCoreAttention, enable_batch_invariant_mode

    enable_batch_invariant_mode(torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    for width, out in ((48, 117), (64, 96), (7, 5), (33, 3), (64, 8), (65, 5), (15, 1)):
        x, weight = made(70, width), made(out, width)
        x.requires_grad_()
        whole = torch.nn.functional.silu(x @ weight.t())
        whole.sum().backward()
        exact = x.detach().double().requires_grad_()
        expected = torch.nn.functional.silu(exact @ weight.double().t())
        expected.sum().backward()
        assert (whole - expected).abs().max() < 1e-4 and (x.grad - exact.grad).abs().max() < 1e-3
        for n in (1, 2, 5, 31, 33, 65):
            for start in (0, 3):
                part = torch.nn.functional.silu(x[start : start + n] @ weight.t())
                assert torch.equal(part, whole[start : start + n]), (width, out, n, start)
    for function in (torch.exp, torch.exp2, torch.log, torch.sigmoid, torch.cos, torch.sin):
        values = made(133).abs() + 0.1
        whole, exact = function(values), function(values.double())
        assert (whole - exact).abs().max() < 1e-4
        assert all(torch.equal(function(values[i:j]), whole[i:j]) for i, j in ((0, 1), (3, 20), (100, 133)))
    attention = InvariantCoreAttention.__new__(InvariantCoreAttention)
    torch.nn.Module.__init__(attention)
    attention.softmax_scale = None
    query, key, value = made(3, 70, 4, 16), made(3, 70, 2, 16), made(3, 70, 2, 16)
    whole = attention._attend(query, key, value, None)
    q, k, v = (part.double().transpose(1, 2) for part in (query, key, value))
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert (whole - exact.transpose(1, 2)).abs().max() < 1e-5
    for length in (1, 2, 31, 32, 33, 64, 69):
        for i in range(3):
            parts = (x[i : i + 1, :length] for x in (query, key, value))
            assert torch.equal(attention._attend(*parts, None)[0], whole[i, :length]), length


def test_kernels_give_a_token_the_same_bits_in_any_batch() -> None:
    run_distributed(check_kernels, 1)


@pytest.mark.parametrize(
    ("layout", "setting"),
    [
        pytest.param(layout, setting, marks=[] if (layout, setting) in IN_SHORT else [pytest.mark.long])
        for layout in ("tp", "ep")
        for setting in SETTINGS
    ],
)
def test_the_reported_log_probabilities_are_the_trainers_to_the_bit(layout: str, setting: str, tmp_path: Path) -> None:
    case = Case(TP if layout == "tp" else EP, shared=layout == "tp" and setting == "topk", micro_batch_tokens=128)
    steps = STEPS if setting == "plain" else min(STEPS, 2)
    run_distributed(run_steps, 2, case, setting, steps, str(tmp_path / "found.json"), timeout=3000)
    result = json.loads((tmp_path / "found.json").read_text())
    print(layout, setting, result)
    assert result["tokens"] > 50 * steps and result["max_abs"] == 0.0
