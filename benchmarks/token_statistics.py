"""Single tokens under engine and policy, by the token's probability: two figures of docs/results/windtunnel.

    python benchmarks/token_statistics.py [ratio_tv] [most_clipped] [--seeds 0 1 2 3 4] [--rows FILE] [--output FOLDER]

*ratio_tv*: engine and policy have the same weights. What differs is the numerics of the engine: bf16, FP8 and INT4.
*most_clipped*: the policy has trained for three steps from the engine's weights. Which tokens each rule masks.

The task is rare_words with 4,096 words. Measurements of ``--rows`` (default: those of docs/results/windtunnel)
and of the output folder are taken over, missing ones are made. Writes ``NAME.md`` and ``NAME.png`` for each figure, and
``rows.jsonl``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w
import torch
from torch import Tensor

from megatron_dppo.advantages.by_name import advantages_by
from megatron_dppo.config.io import validate
from megatron_dppo.config.loss import LossConfig
from megatron_dppo.config.schema import Config
from megatron_dppo.data.chat import load_tokenizer
from megatron_dppo.data.data_rows import iter_rows
from megatron_dppo.engines.local.engine import LocalEngine
from megatron_dppo.hf.folder import build_hf_model, copy_into_model, read_hf_config
from megatron_dppo.hf.weight_files import FolderWeights
from megatron_dppo.losses import policy_loss
from megatron_dppo.parallel.platform import DTYPES
from megatron_dppo.rewards.item import RewardItem
from megatron_dppo.setup.engines import open_scorer
from megatron_dppo.types import LossInputs, Prompt, SamplingParams
from megatron_dppo_lab.catalogue import LOSSES, MISMATCHES, TASKS
from megatron_dppo_lab.grid import PLACEHOLDER_PATHS, GridRun, merged, run_settings
from megatron_dppo_lab.perturbation import Perturbation, require_modelopt
from megatron_dppo_lab.row import read_external_rows
from megatron_dppo_lab.runner import make_base_at
from megatron_dppo_lab.statistics import Row, band
from megatron_dppo_lab.store import Store

ROOT = Path(__file__).resolve().parents[1]
TASK, LOSS = "rare_words", "dppo_binary_tv"
SAMPLES = 32
"""Responses to each prompt."""
EDGES = (0.0, 1e-4, 1e-3, 1e-2, 0.03, 0.1, 0.3, 0.6, 0.9, 0.99, 1.0 + 1e-6)
"""Edges of the bins of mu."""
QUANTILES = {"5 %": 0.05, "median": 0.5, "95 %": 0.95}
RULES = {name: LossConfig(name=name) for name in ("grpo", "dppo_binary_tv", "dppo_binary_kl")}
_SHOWN_WORDS = 20


@dataclass(frozen=True)
class Scored:
    """Tokens of all responses, one after the other."""

    ids: Tensor
    """Token ids. Shape [T]."""
    mu: Tensor
    """Log-probabilities as the engine reported them. Shape [T]."""
    pi: Tensor
    """Log-probabilities of the policy. Shape [T]."""
    advantages: Tensor
    """Advantage of each token's response. Shape [T]."""


def bins(scored: Scored) -> list[dict[str, Any]]:
    """Return abs(pi - mu) and quantiles of the ratio for each bin of mu; None where a bin has no tokens."""
    return [_bin(scored, low, high) for low, high in pairwise(EDGES)]


def _bin(scored: Scored, low: float, high: float) -> dict[str, Any]:
    inside = _inside(scored, low, high)
    if not bool(inside.any()):
        return {"low": low, "high": high, "tokens": 0, "tv": None, "ratio": None}
    ratio = (scored.pi - scored.mu)[inside].exp()
    tv = (scored.pi.exp() - scored.mu.exp())[inside].abs()
    quantiles = ratio.quantile(torch.tensor(list(QUANTILES.values()))).tolist()
    return {"low": low, "high": high, "tokens": int(inside.sum()), "tv": float(tv.mean()), "ratio": quantiles}


def masked_tokens(scored: Scored, word: Callable[[int], str]) -> dict[str, Any]:
    """Return for each rule the share of tokens with an advantage that it masks, also by bin, and its words.

    Args:
        scored: engine and policy.
        word: text of a token id.
    """
    result: dict[str, Any] = {}
    has_advantage = scored.advantages != 0
    for name, rule in RULES.items():
        inputs = LossInputs(
            logprobs=scored.pi, rollout_logprobs=scored.mu, advantages=scored.advantages, loss_mask=has_advantage
        )
        masked = has_advantage & ~policy_loss(inputs, rule).keep_mask
        insides = [_inside(scored, low, high) for low, high in pairwise(EDGES)]
        words = Counter(scored.ids[masked].tolist()).most_common(_SHOWN_WORDS)
        result[name] = {
            "share": _share(masked, has_advantage),
            "bins": [_share(masked & inside, has_advantage & inside) for inside in insides],
            "words": [
                {"word": word(token), "masked": count, "mean_mu": float(scored.mu[scored.ids == token].exp().mean())}
                for token, count in words
            ],
        }
    return result


def _inside(scored: Scored, low: float, high: float) -> Tensor:
    mu = scored.mu.exp()
    return (mu >= low) & (mu < high)


def _share(part: Tensor, total: Tensor) -> float | None:
    return int(part.sum()) / int(total.sum()) if bool(total.any()) else None


def score(config: Config, engine_folder: Path, policy_folder: Path) -> Scored:
    """Sample responses to all prompts with the weights of one folder; score them with those of another one.

    Args:
        config: task, dtype and perturbation of the engine, seed.
        engine_folder: Hugging Face folder with the engine's weights.
        policy_folder: the same for the policy, which computes in fp32.
    """
    tokenizer = load_tokenizer(engine_folder)
    hf_config = read_hf_config(engine_folder)
    assert isinstance(config.data.train, str)
    prompts = []
    for row in iter_rows(config.data.train, "train"):
        text = str(row.prompt)
        token_ids = tuple(tokenizer(text).input_ids)
        prompt = Prompt(prompt_id=row.location, text=text, token_ids=token_ids, label=row.label)
        prompts += [prompt] * SAMPLES
    engine = LocalEngine(
        hf_config,
        tokenizer,
        dtype=DTYPES[config.rollout.dtype],
        device=torch.device("cpu"),
        perturbation=Perturbation(**config.rollout.perturbation.model_dump()),
    )
    engine.update_weights(FolderWeights(engine_folder).stream(tied=hf_config.tie_word_embeddings), 0)
    params = SamplingParams(max_new_tokens=config.rollout.max_new_tokens, seed=config.run.seed)
    completions = engine.generate(prompts, params)
    engine.close()
    scorer = open_scorer(config)
    items = [
        RewardItem(prompt=p.text, completion=c.text, label=p.label, token_ids=c.token_ids.tolist())
        for p, c in zip(prompts, completions, strict=True)
    ]
    rewards = torch.tensor([result.reward for result in scorer.score(items)]).view(-1, SAMPLES)
    scorer.close()
    valid = torch.ones_like(rewards, dtype=torch.bool)
    advantages = advantages_by(config.train.advantage, rewards, valid, options=config.train.advantage_options)
    lengths = torch.tensor([len(c.token_ids) for c in completions])
    model = build_hf_model(hf_config, torch.float32)
    copy_into_model(model, FolderWeights(policy_folder).stream(tied=hf_config.tie_word_embeddings))
    pairs = [(prompt.token_ids, c.token_ids.tolist()) for prompt, c in zip(prompts, completions, strict=True)]
    return Scored(
        ids=torch.cat([c.token_ids.long() for c in completions]),
        mu=torch.cat([c.logprobs for c in completions if c.logprobs is not None]),
        pi=_logprobs(model, pairs),
        advantages=advantages.flatten().float().repeat_interleave(lengths),
    )


@torch.no_grad()
def _logprobs(model: Any, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Tensor:
    """Compute the log-probabilities of each response's tokens, one pass for all of one length."""
    rows: dict[int, Tensor] = {}
    by_length: dict[tuple[int, int], list[int]] = {}
    for index, (prompt, response) in enumerate(pairs):
        by_length.setdefault((len(prompt), len(response)), []).append(index)
    for (start, _), indices in by_length.items():
        tokens = torch.tensor([[*pairs[i][0], *pairs[i][1]] for i in indices])
        logprobs = model(tokens).logits[:, start - 1 : -1].log_softmax(-1)
        sampled = logprobs.gather(2, tokens[:, start:, None])[:, :, 0]
        rows |= dict(zip(indices, sampled, strict=True))
    return torch.cat([rows[index] for index in range(len(pairs))])


@dataclass(frozen=True)
class Figure:
    """One figure: a measurement under each of some mismatches."""

    title: str
    mismatches: Sequence[str]
    settings: Mapping[str, Any]
    """Over those of the task."""
    trains: bool = False
    """True if the policy trains before it is compared."""

    def run(self, mismatch: str, seed: int) -> GridRun:
        """Return the run that a measurement belongs to."""
        base = merged(TASKS[TASK], self.settings)
        return GridRun(TASK, LOSS, mismatch, seed, run_settings(base, LOSSES[LOSS], MISMATCHES[mismatch], seed))


FIGURES: Mapping[str, Figure] = {
    "ratio_tv": Figure(
        "Ratio and total variation of engine and trainer at equal weights, by the token's probability (figure 1)",
        ("bf16", "weights fp8", "weights int4"),
        {"run": {"num_steps": 1}},
    ),
    "most_clipped": Figure(
        "Which tokens ratio clipping and DPPO mask, by the token's probability and by word",
        ("none",),
        {"run": {"num_steps": 3}, "checkpoint": {"export_hf": True}},
        trains=True,
    ),
}


def measure(figure: Figure, run: GridRun, store: Store) -> dict[str, Any]:
    """Make the base model of the seed, train if the figure asks for it, and measure."""
    if run.weights != "none":
        require_modelopt(run.weights)
    base = store.base(run)
    if not base.is_dir():
        store.make_folders()
        make_base_at(store, run, base, print)
    config = validate(merged(run.settings, PLACEHOLDER_PATHS), "token_statistics")
    if not figure.trains:
        scored = score(config, base, base)
        return {"bins": bins(scored), "tokens": len(scored.ids)}
    folder = store.place(run)
    folder.mkdir(parents=True, exist_ok=True)
    places = {"run": {"output_dir": str(folder / "run"), "overwrite": True}, "model": {"path": str(base.resolve())}}
    toml = folder / "config.toml"
    toml.write_text(tomli_w.dumps(merged(run.settings, places)))
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-m", "megatron_dppo.train", str(toml)], check=True, env=environment)
    scored = score(config, base, folder / "run" / "hf")
    tokenizer = load_tokenizer(base)
    return {"bins": bins(scored), **masked_tokens(scored, lambda token: str(tokenizer.convert_ids_to_tokens(token)))}


def known(rows: Sequence[Row], run: GridRun) -> dict[str, Any] | None:
    """Return the measurement of a run among rows, None if it is not there."""
    return next((row["tokens"] for row in rows if row.get("tokens") and row["settings"] == run.settings), None)


def table(mismatch: str, measured: Sequence[Any]) -> str:
    """Return a Markdown table: bins of mu down, their values across, mean [least, largest] over seeds."""
    rules = [name for name in RULES if name in measured[0]]
    head = ["mu", "tokens", "mean abs(pi - mu)", *(f"ratio {q}" for q in QUANTILES), *(f"masked by {r}" for r in rules)]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for index, first in enumerate(measured[0]["bins"]):
        filled = [m["bins"][index] for m in measured if m["bins"][index]["tokens"]]
        if not filled:
            continue
        cells = [f"{first['low']:g} to {first['high']:g}", str(sum(b["tokens"] for b in filled))]
        cells.append(_over([b["tv"] for b in filled], ".1e"))
        cells += [_over([b["ratio"][i] for b in filled], ".3f") for i in range(len(QUANTILES))]
        for rule in rules:
            shares = [share for m in measured if (share := m[rule]["bins"][index]) is not None]
            cells.append(_over(shares, ".1%") if shares else "-")
        lines.append("| " + " | ".join(cells) + " |")
    parts = [f"### {TASK}, {mismatch}: tokens by mu ({len(measured)} seeds)", "\n".join(lines)]
    return "\n\n".join([*parts, *(_words(rule, measured) for rule in rules)])


def _words(rule: str, measured: Sequence[Any]) -> str:
    share = _over([m[rule]["share"] or 0.0 for m in measured], ".1%")
    words = ", ".join(f"{w['word']} ({w['masked']}, mu {w['mean_mu']:.3f})" for w in measured[0][rule]["words"])
    return f"`{rule}` masks {share} of the tokens with an advantage; most often, in the first seed: {words or 'none'}."


def _over(values: Sequence[float], form: str) -> str:
    over = band(values)
    assert over is not None
    return f"{over.mean:{form}} [{over.low:{form}}, {over.high:{form}}]"


def draw(title: str, measured: Mapping[str, Sequence[Any]], picture: Path) -> None:
    """Draw ratio, abs(pi - mu) and masked shares by mu: means over seeds with least and largest.

    Args:
        title: above the panels.
        measured: by mismatch, the measurement of each seed.
        picture: PNG file to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    first = next(iter(measured.values()))
    rules = [name for name in RULES if name in first[0]]
    figure, axes = plt.subplots(1, 3 if rules else 2, figsize=(15 if rules else 11, 4), layout="constrained")
    for color, (mismatch, seeds) in zip(plt.get_cmap("tab10").colors, measured.items(), strict=False):
        low, median, high = (_line(seeds, partial(_ratio, i)) for i in range(3))
        axes[0].plot(median.mu, median.mean, color=color, label=mismatch)
        axes[0].fill_between(low.mu, low.mean, high.mean, color=color, alpha=0.15)
        _draw_line(axes[1], _line(seeds, lambda m, index: m["bins"][index]["tv"]), color, mismatch)
    for color, rule in zip(plt.get_cmap("Dark2").colors, rules, strict=False):
        _draw_line(axes[2], _line(first, partial(_masked, rule)), color, rule)
    for axis, name in zip(axes, ("pi / mu: 5 %, median, 95 %", "mean |pi - mu|", "masked"), strict=False):
        axis.set(xscale="log", xlabel="mu", title=name, **({} if name == "masked" else {"yscale": "log"}))
        axis.legend(frameon=False)
    figure.suptitle(title)
    figure.savefig(picture, dpi=110)
    plt.close(figure)


class _Line(NamedTuple):
    mu: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


def _ratio(quantile: int, measured: Any, index: int) -> float:
    return float(measured["bins"][index]["ratio"][quantile])


def _masked(rule: str, measured: Any, index: int) -> float | None:
    share: float | None = measured[rule]["bins"][index]
    return share


def _line(seeds: Sequence[Any], value: Callable[[Any, int], float | None]) -> _Line:
    """Collect a value by bin; a bin that most seeds lack has few tokens and is left out."""
    points = []
    for index, first in enumerate(seeds[0]["bins"]):
        filled = [m for m in seeds if m["bins"][index]["tokens"]]
        over = band([number for m in filled if (number := value(m, index)) is not None])
        if over is not None and 2 * len(filled) > len(seeds):
            points.append(((max(first["low"], 1e-5) * first["high"]) ** 0.5, over.mean, over.low, over.high))
    return _Line(*(list(column) for column in zip(*points, strict=True))) if points else _Line([], [], [], [])


def _draw_line(axis: Any, line: _Line, color: Any, label: str) -> None:
    axis.plot(line.mu, line.mean, color=color, marker=".", label=label)
    axis.fill_between(line.mu, line.low, line.high, color=color, alpha=0.15)


def main() -> None:
    """Measure what is missing; write tables and figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(FIGURES)}; default: both")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--rows", type=Path, nargs="*", default=[ROOT / "docs/results/windtunnel/figures.jsonl.xz"])
    parser.add_argument("--output", type=Path, default=ROOT / "runs/token_statistics")
    options = parser.parse_args()
    if unknown := set(options.names) - set(FIGURES):
        parser.error(f"{min(unknown)!r}: expected some of {', '.join(FIGURES)}")
    options.output.mkdir(parents=True, exist_ok=True)
    store = Store(options.output)
    file = options.output / "rows.jsonl"
    rows: list[Row] = [external.row for source in options.rows for external in read_external_rows(source)]
    rows += [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    for name in options.names or FIGURES:
        figure = FIGURES[name]
        measured: dict[str, list[Any]] = {mismatch: [] for mismatch in figure.mismatches}
        for mismatch in figure.mismatches:
            for seed in options.seeds:
                run = figure.run(mismatch, seed)
                tokens = known(rows, run)
                if tokens is None:
                    print(f"{name}: {mismatch}, seed {seed}", flush=True)
                    tokens = measure(figure, run, store)
                    with file.open("a") as lines:
                        lines.write(json.dumps({"settings": run.settings, "tokens": tokens}) + "\n")
                measured[mismatch].append(tokens)
        text = "\n\n".join(table(mismatch, seeds) for mismatch, seeds in measured.items())
        (options.output / f"{name}.md").write_text(text + "\n")
        draw(figure.title, measured, options.output / f"{name}.png")
        print(f"{text}\n\nwritten to {options.output}: {name}.md, {name}.png", flush=True)


if __name__ == "__main__":
    main()
