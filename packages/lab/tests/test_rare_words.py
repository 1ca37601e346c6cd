"""The embedded tasks with rare words: data, reward and model folder."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
import torch

from megatron_dppo.config.io import load_config
from megatron_dppo.data.chat import load_tokenizer
from megatron_dppo.data.data_rows import iter_rows
from megatron_dppo.errors import DataError
from megatron_dppo.hf.folder import build_hf_model, read_hf_config
from megatron_dppo.rewards.functions import FunctionSpec
from megatron_dppo.rewards.item import RewardItem
from megatron_dppo.rewards.scorer import RewardScorer
from megatron_dppo_lab import embedded_tasks
from megatron_dppo_lab.embedded_tasks import write_model_folder
from megatron_dppo_lab.supervised import SupervisedDataset
from megatron_dppo_lab.task_rewards import words_reward

EXAMPLES = Path(__file__).parents[3] / "examples/rare_words"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The model folder of the words, the same for both tasks."""
    for task in ("rare_words", "rare_chain"):
        write_model_folder(task, tmp_path / task)
    for file in (tmp_path / "rare_words").iterdir():
        assert file.read_bytes() == (tmp_path / "rare_chain" / file.name).read_bytes(), file.name
    return tmp_path / "rare_words"


SIZES = {"rare_words": (1, 0.05, 4024), "rare_chain": (4, 0.08, 4024), "rare_words_32k": (1, 0.05, 32700)}
"""Words of an answer, share of right words, and words of the vocabulary."""


@pytest.mark.parametrize("name", SIZES)
def test_each_key_has_one_fixed_answer_of_rare_words(name: str) -> None:
    rows = list(iter_rows(f"task:{name}", "train"))
    assert [(r.prompt, r.label) for r in rows] == [(r.prompt, r.label) for r in iter_rows(f"task:{name}", "eval")]
    assert len({r.prompt for r in rows}) == len(rows) == 64 and rows[0].location == f"{name}/train:0"
    words = [word for r in rows for word in r.label.split()]
    assert len(words) == 64 * SIZES[name][0]
    assert all(word[0] == "w" and 200 <= int(word[1:]) < SIZES[name][2] for word in words)


@pytest.mark.parametrize("name", SIZES)
def test_the_warm_up_corpus_has_the_configured_rate_of_correct_words_and_zipf_words(name: str) -> None:
    task, rng, right, others = getattr(embedded_tasks, name), random.Random(5), 0, Counter[str]()
    answers, number = dict(task.problems("train")), 20_000
    for _ in range(number):
        key, response = task.demonstration(rng)
        for got, wanted in zip(response.split(), answers[key].split(), strict=True):
            right += got == wanted
            others[got] += got != wanted
    length, share, size = SIZES[name]
    places = number * length
    # Four standard deviations; a Zipf word is right by chance once in ten thousand.
    assert abs(right / places - share) < 4 * (share / places) ** 0.5 + 1e-3
    harmonic = sum(1 / rank for rank in range(1, size + 1))
    for rank in (1, 2, 10):
        expected = (1 - share) / harmonic / rank
        assert abs(others[f"w{rank - 1:0{len(str(size))}d}"] / places - expected) < 5 * (expected / places) ** 0.5


def test_a_supervised_sample_depends_on_seed_and_number_alone(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    first, second, other = (SupervisedDataset("task:rare_chain", tokenizer, seed) for seed in (3, 3, 4))
    ids = [[d[i].tokens.tolist() for i in range(20)] for d in (first, second, other)]
    assert ids[0] == ids[1] != ids[2]
    assert all(len(sample) <= 16 for sample in ids[0])


@pytest.mark.parametrize(
    ("completion", "expected"),
    [("w1 w2 w3 w4", 1.0), ("w1 w9 w3", 0.5), ("w2 w1 w4 w3", 0.0), ("", 0.0), ("w1 w2 w3 w4 w5", 1.0)],
)
def test_the_reward_is_the_fraction_of_correct_words_by_position(completion: str, expected: float) -> None:
    assert words_reward(prompt="k", completion=completion, label="w1 w2 w3 w4", metadata={}) == expected
    scorer = RewardScorer(FunctionSpec("words"), 10.0, 1)
    item = RewardItem(prompt="k", completion=completion, label="w1 w2 w3 w4", metadata={}, token_ids=(4, 5, 6, 7))
    assert [result.reward for result in scorer.score([item])] == [expected]


def test_each_word_is_one_token_and_the_model_is_tiny(folder: Path) -> None:
    tokenizer, config = load_tokenizer(folder), read_hf_config(folder)
    assert config.vocab_size == len(tokenizer) == 4092
    for key, label in embedded_tasks.rare_chain.problems("train"):
        assert tokenizer(key).input_ids[0] == 1 and len(tokenizer(key).input_ids) == 2
        ids = tokenizer(label, add_special_tokens=False).input_ids
        assert len(ids) == 4 and tokenizer.decode([*ids, 2], skip_special_tokens=True) == label
    model = build_hf_model(config, torch.float32, seed=0)
    assert sum(p.numel() for p in model.parameters()) < 1_000_000


def test_the_vocabulary_of_32k_has_one_token_for_each_word_and_its_model_is_narrow(tmp_path: Path) -> None:
    write_model_folder("rare_words_32k", tmp_path)
    tokenizer, config = load_tokenizer(tmp_path), read_hf_config(tmp_path)
    assert config.vocab_size == len(tokenizer) == 2**15
    rows = embedded_tasks.rare_words_32k.problems("train")
    ids = [tokenizer(label, add_special_tokens=False).input_ids for _, label in rows]
    assert all(len(each) == 1 for each in ids) and [tokenizer.convert_tokens_to_ids("?")] not in ids
    # Nearly all words are beyond the vocabulary of the other tasks.
    assert sum(each[0] > 4092 for each in ids) > 48
    assert tokenizer.decode(ids[0], skip_special_tokens=True) == rows[0][1]
    # Two matrices of 2^15 x 32, and little else.
    model = build_hf_model(config, torch.float32, seed=0)
    assert 2**21 < sum(p.numel() for p in model.parameters()) < 2**21 + 100_000


def test_the_error_of_an_unknown_task_lists_the_available_ones() -> None:
    listed = "'task:chain_sum', 'task:rare_chain', 'task:rare_words', .*a file, or hf:owner/name$"
    with pytest.raises(DataError, match=listed):
        list(iter_rows("task:rare_wrds", "train"))


@pytest.mark.parametrize("name", ["words", "chain"])
def test_the_examples_use_the_tasks(name: str) -> None:
    config = load_config(EXAMPLES / f"{name}.toml")
    assert config.data.train == config.data.eval == f"task:rare_{name}"
    assert config.reward.function == "words"
