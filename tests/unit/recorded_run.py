"""The folder of a run that was never trained: records and rollouts whose every number is known."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_dppo.report.steps.files import StepMeta, write_step
from megatron_dppo.report.steps.rows import RankSamples, TrainedTokens
from megatron_dppo.types import Completion, FinishReason, Prompt, Rollout, RolloutGroup, VersionSpan

HOSTILE = (
    "<script>window.hacked = 1</script>",
    "</script><script>window.hacked = 2</script>",
    "<!-- <script>",
    '<img src=x onerror="window.hacked = 3">',
    "&lt;\u2028</style>",
    "' onclick='window.hacked = 4' \"",
)
"""Tokens 0 to 5; the others are ``t6 ``, ``t7 ``."""


def decode(ids: Sequence[int]) -> list[str]:
    return [HOSTILE[i] if i < len(HOSTILE) else f"t{i} " for i in ids]


def sample(rng: random.Random, group: int, tokens: int, vocabulary: int = 12) -> tuple[Rollout, TrainedTokens]:
    """A response of random tokens, in which every probability, mask and advantage is drawn."""
    ids = [rng.randrange(vocabulary) for _ in range(tokens)]
    mu = torch.tensor([rng.uniform(0.1, 0.9) for _ in ids])
    pi = (mu + torch.tensor([rng.uniform(-0.3, 0.3) for _ in ids])).clamp(0.01, 0.99)
    trained = torch.tensor([rng.random() < 0.9 for _ in ids])
    reward = float(rng.random() < 0.5)
    advantage = reward - 0.5
    completion = Completion(
        token_ids=torch.tensor(ids, dtype=torch.int32),
        logprobs=mu.log(),
        finish_reason=FinishReason.STOP,
        policy_version=3,
        text="".join(decode(ids)),
        policy_versions=(VersionSpan(2, 0, 1), VersionSpan(3, 1, tokens)),
        loss_mask=trained,
        topk_token_ids=torch.tensor([[i, i + 1, -1] for i in ids], dtype=torch.int32),
        topk_logprobs=torch.tensor([[-0.5, -math.inf, 0.0] for _ in ids]),
        routed_experts=torch.randint(0, 8, (tokens + 1, 2, 2)).to(torch.uint8),
    )
    prompt = Prompt(
        prompt_id=f"file:{group}",
        text=f"question {group} {HOSTILE[0]}",
        token_ids=(7, 8),
        label=HOSTILE[1],
        metadata={"level": group},
    )
    parts = {"score": reward, "form": 0.25}
    kept = (pi - mu).abs() < 0.15
    return (
        Rollout(prompt=prompt, completion=completion, reward=reward, reward_parts=parts),
        TrainedTokens(
            update=group % 2,
            policy_version=3 + group % 2,
            loss_mask=trained,
            advantages=torch.where(trained, advantage, 0.0),
            logprobs=torch.where(trained, pi.log(), torch.nan),
            keep=kept & trained,
        ),
    )


def write_run(folder: Path, steps: int, *, tokens: int = 12, every: int = 1, groups: int = 4, seed: int = 0) -> None:
    """Records of all steps, rollouts of every n-th: ``groups`` prompts with four answers each, on two ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, lines = random.Random(seed), []
    for step in range(1, steps + 1):
        shares = {"train/mask_fraction": rng.random() / 5, "train/abs_prob_diff": rng.random() / 50}
        others = {
            f"train/counterfactual/{name}/{part}": rng.random()
            for name in ("grpo", "pg_is", "cispo", "ipo", "drpo", "dppo_binary_tv", "dppo_binary_kl")
            for part in ("mask_fraction", "cosine")
        }
        names = ("entropy", "grad_norm", "kl_k3", "ratio_max", "ratio")
        more = {f"train/{name}": rng.random() for name in names} | {
            "rollout/response_length": rng.random() * 90,
            "eval/hard/accuracy": rng.random(),
        }
        lines.append(json.dumps({"step": step, "rollout/reward": rng.random() + step, **shares, **more, **others}))
        if step % every:
            continue
        parts = []
        for rank in range(2):
            made = [[sample(rng, group, tokens) for _ in range(4)] for group in range(rank, groups, 2)]
            owned = [RolloutGroup(prompt=own[0][0].prompt, rollouts=tuple(r for r, _ in own)) for own in made]
            trained = [t for own in made for _, t in own]
            parts.append(RankSamples(dp_rank=rank, groups=owned, ages=[rank] * len(owned), trained=trained))
        write_step(folder, StepMeta(step, 3, 2, 2, "2 ranks", "dppo_binary_tv"), parts)
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "summary.json").write_text("{}")
