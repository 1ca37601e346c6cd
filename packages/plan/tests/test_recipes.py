"""The paper's runs as configurations: their numbers are those of its tables, and every example is planned."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.config.io import load_config
from megatron_dppo.config.layout import resolve_layout
from megatron_dppo.errors import ConfigError
from megatron_dppo.hf.folder import model_shape
from megatron_dppo_plan.machine import get_machine
from megatron_dppo_plan.models import count_parameters, load_model_config
from megatron_dppo_plan.plan import make_plan
from megatron_dppo_plan.rehearsal_pool import RehearsalPool
from megatron_dppo_plan.text import format_plan

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
PAPER = EXAMPLES / "paper"
STATED = re.compile(r"^# Planned on (\d+) x (\w+)\.$", re.M)

# arXiv 2602.04879, table 1 and appendix E, column by column.
TABLE = {
    "moe_base": ("Qwen3-30B-A3B-Base", 1024, 16384, 256, 32, 16, 1e-6, 5, "off"),
    "moe_base_r3": ("Qwen3-30B-A3B-Base", 1024, 16384, 256, 32, 16, 1e-6, 5, "rollout"),
    "moe_thinking": ("Qwen3-30B-A3B", 1024, 16384, 256, 32, 16, 1e-6, 5, "off"),
    "dense_base": ("Qwen3-8B-Base", 1024, 8000, 128, 32, 8, 1e-6, 10, "off"),
    "moe_base_lora": ("Qwen3-30B-A3B-Base", 1024, 8000, 128, 16, 8, 1e-5, 10, "off"),
}


def test_the_recipes_are_the_papers_columns() -> None:
    result = {}
    for file in PAPER.glob("*.toml"):
        config = load_config(file)
        rollout, train = config.rollout, config.train
        adapters = file.stem == "moe_base_lora"
        threshold = 0.15 if adapters else 0.2
        assert (config.lora.rank, config.lora.alpha) == ((32, 64.0) if adapters else (0, None))
        assert (rollout.temperature, config.loss.name) == (1.0, "dppo_binary_tv")
        assert config.loss.thresholds == (threshold, threshold)
        assert (config.loss.ratio_cap, train.advantage, train.epochs, train.max_staleness) == (5.0, "mean", 1, 0)
        evaluation = config.eval
        assert (evaluation.samples_per_prompt, evaluation.temperature, evaluation.top_p) == (32, 0.7, 0.95)
        result[file.stem] = (
            Path(config.model.path).name,
            config.data.max_prompt_tokens,
            rollout.max_new_tokens,
            rollout.prompts_per_step,
            rollout.prompts_per_step // train.mini_batches,
            rollout.samples_per_prompt,
            config.optimizer.lr,
            evaluation.every,
            train.router_replay,
        )
    assert result == TABLE


def commands() -> list[list[str]]:
    """The flags of the paper's other methods, as the page gives them."""
    page = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
    block = page.split("```flags\n")[1].split("```")[0]
    return [line.partition(": ")[2].split() for line in block.splitlines()]


def test_the_papers_other_methods_are_flags() -> None:
    losses = [load_config(PAPER / "moe_base.toml", flags).loss for flags in commands()]
    assert [(one.name, one.ratio_limits[1]) for one in losses] == [
        ("dppo_binary_kl", 5.0),
        ("dppo_topk_tv", 5.0),
        ("dppo_topk_kl", 5.0),
        ("grpo", 5.0),
        ("cispo", 5.0),
    ]
    assert [one.thresholds for one in losses[:3]] == [(0.05, 0.05), (0.2, 0.2), (0.05, 0.05)]
    assert losses[3].clip_ratios == (0.2, 0.27) and losses[1].topk == losses[2].topk == 20
    with pytest.raises(ConfigError, match=r"divergence_threshold_low = 0\.2"):
        load_config(PAPER / "moe_base.toml", ["--loss.name", "grpo"])


def test_the_dense_model_has_the_parameters_of_its_card() -> None:
    # 36 layers of attention (with two norms of heads), MLP and two norms; embedding and output layer; a last norm
    layer = 2 * 4096 * 4096 + 2 * 1024 * 4096 + 2 * 128 + 3 * 4096 * 12288 + 2 * 4096
    config, note = load_model_config("/nowhere/Qwen3-8B-Base")
    assert count_parameters(config) == (36 * layer + 2 * 151936 * 4096 + 4096, 0) and note is not None
    assert count_parameters(config)[0] == pytest.approx(8.2e9, rel=0.01)  # the model card: 8.2 B


@pytest.fixture(scope="module")
def rehearsals() -> Iterator[RehearsalPool]:
    with RehearsalPool(1) as rehearsals:
        yield rehearsals


def hardware(file: Path) -> tuple[int, str]:
    """As the head of the file states it; the small models that ship fit on anything."""
    stated = STATED.search(file.read_text(encoding="utf-8"))
    if stated is None:
        config = load_config(file)
        assert (Path(config.model.path) / "config.json").is_file(), f"{file} does not say what it is planned on"
        return config.parallel.expert_model_parallel_size, "h100"
    return int(stated[1]), stated[2]


def planned_by_another_test(file: Path) -> bool:
    """``test_plan.py`` has the first two; ``losses`` are the user's; two build their models in a run."""
    return file.parent.name in ("chain_sum", "qwen3_30b_a3b", "losses", "rare_words", "smollm2")


FILES = [file for file in sorted(EXAMPLES.rglob("*.toml")) if not planned_by_another_test(file)]


@pytest.mark.parametrize(
    "file",
    [pytest.param(f, marks=[pytest.mark.long] if i % 4 else []) for i, f in enumerate(FILES)],
    ids=lambda f: f"{f.parent.name}/{f.stem}",
)
def test_every_example_fits_what_it_says(file: Path, rehearsals: RehearsalPool) -> None:
    number, name = hardware(file)
    config = load_config(file)
    shape = model_shape(load_model_config(config.model.path)[0])
    busiest = ["hot" if resolve_layout(config.parallel, config.batch, number, shape).ep > 1 else "all"]
    few = shape.num_layers > 3
    plan = make_plan(config, number, get_machine(name), rehearsals, kinds=busiest, few_layers=few)
    assert f"Fits {number} x {name}." in format_plan(plan) and not plan.is_tight
    if plan.kv_cache.sequences is not None:
        assert plan.kv_cache.sequences >= 1
    written: Mapping[str, Any] = config.rollout.sglang
    if "context-length" in written:
        longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
        assert longest < written["context-length"] <= shape_context(config.model.path)


def shape_context(path: str) -> int:
    """Positions that the model has."""
    return int(load_model_config(path)[0].max_position_embeddings)
