"""What happens to single tokens: the same responses under the engine and under a policy, by the token's probability."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.config.loss import LossConfig
from megatron_dppo.config.schema import Config
from megatron_dppo.data.chat import load_tokenizer
from megatron_dppo.data.rows import iter_rows
from megatron_dppo.engines.local.engine import LocalEngine
from megatron_dppo.engines.local.perturbation import Perturbation
from megatron_dppo.hf.folder import FolderWeights, build_hf_model, copy_into_model, read_hf_config
from megatron_dppo.losses import advantages_by, policy_loss
from megatron_dppo.parallel.platform import DTYPES
from megatron_dppo.rewards.item import RewardItem
from megatron_dppo.run.engines import open_scorer
from megatron_dppo.types import LossInputs, Prompt, SamplingParams

SAMPLES = 32
"""of each prompt"""
EDGES = (0.0, 1e-4, 1e-3, 1e-2, 0.03, 0.1, 0.3, 0.6, 0.9, 0.99, 1.0 + 1e-6)
"""of the bins of mu"""
RULES = {
    "grpo": LossConfig(name="grpo"),
    "dppo_binary_tv": LossConfig(name="dppo_binary_tv"),
    "dppo_binary_kl": LossConfig(name="dppo_binary_kl"),
}
_SHOWN_WORDS = 20
_QUANTILES = (0.05, 0.5, 0.95)


@dataclass(frozen=True)
class Scored:
    """Tokens of all responses, one after the other."""

    ids: Tensor
    """[T]"""
    mu: Tensor
    """[T] log-probabilities as the engine reported them"""
    pi: Tensor
    """[T] those of the policy"""
    advantages: Tensor
    """[T]"""


def ratio_tv(config: Config, base: Path, folder: Path) -> dict[str, Any]:
    """Engine and policy have the weights of ``base``: what differs is the engine's numerics."""
    del folder
    scored = _score(config, base, base)
    return {"bins": [_bin(scored, low, high) for low, high in pairwise(EDGES)], "tokens": len(scored.ids)}


def most_clipped(config: Config, base: Path, folder: Path) -> dict[str, Any]:
    """The engine has the weights of ``base``, the policy those that the run ended with."""
    scored = _score(config, base, folder / "hf")
    tokenizer = load_tokenizer(base)
    found: dict[str, Any] = {"bins": [_bin(scored, low, high) for low, high in pairwise(EDGES)]}
    signal = scored.advantages != 0
    for name, rule in RULES.items():
        inputs = LossInputs(
            logprobs=scored.pi, rollout_logprobs=scored.mu, advantages=scored.advantages, loss_mask=signal
        )
        dropped = signal & ~policy_loss(inputs, rule).keep_mask
        counts = Counter(scored.ids[dropped].tolist()).most_common(_SHOWN_WORDS)
        found[name] = {
            "share": _share(dropped, signal),
            "bins": [
                _share(dropped & inside, signal & inside)
                for inside in (_inside(scored, low, high) for low, high in pairwise(EDGES))
            ],
            "words": [
                {
                    "word": tokenizer.convert_ids_to_tokens(token),
                    "masked": count,
                    "mean_mu": float(scored.mu[scored.ids == token].exp().mean()),
                }
                for token, count in counts
            ],
        }
    return found


MEASUREMENTS: Mapping[str, Callable[[Config, Path, Path], dict[str, Any]]] = {
    "ratio_tv": ratio_tv,
    "most_clipped": most_clipped,
}
"""Name -> measurement, given the configuration, the base model's folder, and the run's."""


def _score(config: Config, engine_folder: Path, policy_folder: Path) -> Scored:
    tokenizer, hf_config = load_tokenizer(engine_folder), read_hf_config(engine_folder)
    assert isinstance(config.data.train, str)
    rows = iter_rows(config.data.train, "train")
    texts = [(row.place, str(row.prompt), row.label) for row in rows]
    prompts = [
        Prompt(prompt_id=place, text=text, token_ids=tuple(tokenizer(text).input_ids), label=label)
        for place, text, label in texts
    ]
    engine = LocalEngine(
        hf_config,
        tokenizer,
        dtype=DTYPES[config.rollout.dtype],
        device=torch.device("cpu"),
        perturbation=Perturbation(**config.rollout.perturbation.model_dump()),
    )
    engine.update_weights(FolderWeights(engine_folder).stream(tied=hf_config.tie_word_embeddings), 0)
    params = SamplingParams(max_new_tokens=config.rollout.max_new_tokens, seed=config.run.seed)
    asked = [prompt for prompt in prompts for _ in range(SAMPLES)]
    completions = engine.generate(asked, params)
    engine.close()
    scorer = open_scorer(config)
    items = [
        RewardItem(prompt=p.text, completion=c.text, label=p.label, token_ids=c.token_ids.tolist())
        for p, c in zip(asked, completions, strict=True)
    ]
    rewards = torch.tensor([result.reward for result in scorer.score(items)]).view(-1, SAMPLES)
    scorer.close()
    train, valid = config.train, torch.ones_like(rewards, dtype=torch.bool)
    advantages = advantages_by(train.advantage, rewards, valid, options=train.advantage_options)
    lengths = torch.tensor([len(c.token_ids) for c in completions])
    model = build_hf_model(hf_config, torch.float32)
    copy_into_model(model, FolderWeights(policy_folder).stream(tied=hf_config.tie_word_embeddings))
    pairs = [(prompt.token_ids, c.token_ids.tolist()) for prompt, c in zip(asked, completions, strict=True)]
    return Scored(
        ids=torch.cat([c.token_ids.long() for c in completions]),
        mu=torch.cat([c.logprobs for c in completions if c.logprobs is not None]),
        pi=_logprobs(model, pairs),
        advantages=advantages.flatten().float().repeat_interleave(lengths),
    )


@torch.no_grad()
def _logprobs(model: Any, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Tensor:
    """Log-probabilities of each response's tokens, one pass for all of one length."""
    found: dict[int, Tensor] = {}
    by_length: dict[tuple[int, int], list[int]] = {}
    for place, (prompt, response) in enumerate(pairs):
        by_length.setdefault((len(prompt), len(response)), []).append(place)
    for (start, _), places in by_length.items():
        tokens = torch.tensor([[*pairs[i][0], *pairs[i][1]] for i in places])
        logprobs = model(tokens).logits[:, start - 1 : -1].log_softmax(-1)
        own = logprobs.gather(2, tokens[:, start:, None])[:, :, 0]
        found |= dict(zip(places, own, strict=True))
    return torch.cat([found[place] for place in range(len(pairs))])


def _inside(scored: Scored, low: float, high: float) -> Tensor:
    mu = scored.mu.exp()
    return (mu >= low) & (mu < high)


def _bin(scored: Scored, low: float, high: float) -> dict[str, Any]:
    """Of the tokens whose mu is in [low, high): |pi - mu| and quantiles of the ratio; None where there are none."""
    inside = _inside(scored, low, high)
    if not bool(inside.any()):
        return {"low": low, "high": high, "tokens": 0, "tv": None, "ratio": None}
    ratio = (scored.pi - scored.mu)[inside].exp()
    tv = (scored.pi.exp() - scored.mu.exp())[inside].abs()
    quantiles = ratio.quantile(torch.tensor(_QUANTILES)).tolist()
    return {"low": low, "high": high, "tokens": int(inside.sum()), "tv": float(tv.mean()), "ratio": quantiles}


def _share(part: Tensor, of: Tensor) -> float | None:
    total = int(of.sum())
    return int(part.sum()) / total if total else None
