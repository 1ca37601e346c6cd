"""True on-policy: with ``rollout.batch_invariant`` what the engine reports is what training computes, to the bit."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.config.loss import LossConfig
from megatron_dppo.data.samples import to_training_sample
from megatron_dppo.parallel.objects import is_leader
from megatron_dppo.platform import Platform
from megatron_dppo.policy.update import Updater
from megatron_dppo.report.clock import Clock
from megatron_dppo.types import Prompt, SamplingParams, TrainingSample
from tests.distributed.layouts import EP, TP
from tests.distributed.parity import Case, build_trainer, config_for, hf_reference
from tests.distributed.spawn import run_distributed

pytestmark = pytest.mark.distributed

STEPS = 50 if os.environ.get("EVERYTHING") else 3
GROUPS, SIBLINGS = 3, 4
TOKENIZER = SimpleNamespace(eos_token_id=1, pad_token_id=0, decode=lambda ids, skip_special_tokens: "")
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "topk": {"topk_logprobs": 4, "temperature": 0.7},
    "filtered": {"top_p": 0.8, "top_k": 20, "kept_sets": True},
}


def prompts(step: int, dp_rank: int) -> list[Prompt]:
    """Of one rank, of another length each; the second rank has fewer."""
    numbers = random.Random(f"{step}/{dp_rank}")
    texts = [[numbers.randrange(2, 117) for _ in range(1 + 5 * i)] for i in range(GROUPS - dp_rank)]
    return [Prompt(prompt_id="", text="", token_ids=tuple(tokens), label="") for tokens in texts]


def sampled(engine: Any, trainer: Any, step: int, **settings: Any) -> list[TrainingSample]:
    own = [prompt for prompt in prompts(step, trainer.dp_rank) for _ in range(SIBLINGS)]
    params = SamplingParams(max_new_tokens=40, seed=100 * step + trainer.dp_rank, **settings)
    engine.policy_version = trainer.policy_version
    found = []
    for i, (prompt, c) in enumerate(zip(own, engine.generate(own, params), strict=True)):
        topk = None if c.topk_token_ids is None else (c.topk_token_ids, c.topk_logprobs)
        advantage = 1.0 if i % 2 else -1.0
        found.append(to_training_sample(prompt.token_ids, c.token_ids, c.logprobs, advantage, topk, None, None, c.kept))
    return found


def apart(trainer: Any, samples: list[TrainingSample], budget: int) -> float:
    """The largest ``|log pi - log mu|`` of this rank, Top-K included."""
    packed = trainer.pack(samples, budget)
    largest = 0.0
    for reading, batch in zip(trainer.readings(packed.batches)[0], packed.batches, strict=True):
        mask = batch.loss_mask
        largest = max(largest, _largest(reading.logprobs - batch.rollout_logprobs, mask))
        if batch.rollout_topk_ids is not None:
            used = mask[:, None] & (batch.rollout_topk_ids[:, :-1] >= 0)
            largest = max(largest, _largest(reading.id_logprobs - batch.rollout_topk_logprobs[:, :-1], used))
    return largest


def _largest(difference: Tensor, mask: Tensor) -> float:
    return float(difference[mask].abs().max()) if bool(mask.any()) else 0.0


def run_steps(rank: int, world_size: int, case: Case, setting: str, steps: int, file: str | None) -> None:
    from megatron_dppo.mcore.compat import apply_shims

    platform = Platform.detect(force_cpu=True)
    apply_shims(platform)
    from megatron_dppo.run.own_engine import OwnEngine

    settings = SETTINGS[setting]
    rollout = {"batch_invariant": True, "dtype": "fp32", "temperature": settings.get("temperature", 1.0)}
    model = hf_reference(case.tied, case.dense, case.shared)
    trainer = build_trainer(case, model, platform, "fp32", rollout=rollout)
    engine = OwnEngine(trainer, model.config, TOKENIZER, 96)
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
        for _ in updater.run(samples, step, Clock(), lambda m, found=metrics: found.append(m["abs_prob_diff"])):
            pass
        assert metrics == [0.0], "the first update's own pass"
        moved = max(moved, apart(trainer, samples, 512))
    assert worst == 0.0, f"{case} {setting}: max |log pi - log mu| = {worst} on rank {rank}"
    assert moved > 1e-4, "the updates have to move the policy, or nothing was tested"
    everywhere = torch.tensor([tokens])
    dist.all_reduce(everywhere)
    if file is not None and rank == 0:
        Path(file).write_text(json.dumps({"steps": steps, "tokens": int(everywhere), "max_abs": worst}))


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("layout", ["tp", "ep"])
def test_the_reported_log_probabilities_are_the_trainers_to_the_bit(layout: str, setting: str, tmp_path: Path) -> None:
    case = Case(TP if layout == "tp" else EP, shared=layout == "tp" and setting == "topk", micro_batch_tokens=128)
    steps = STEPS if setting == "plain" else min(STEPS, 3)
    run_distributed(run_steps, 2, case, setting, steps, str(tmp_path / "found.json"), timeout=3000)
    found = json.loads((tmp_path / "found.json").read_text())
    print(layout, setting, found)
    assert found["tokens"] > 100 * steps and found["max_abs"] == 0.0
