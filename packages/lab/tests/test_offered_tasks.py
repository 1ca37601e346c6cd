"""Tasks and rewards of packages: what an installed package offers can be named, and nothing else."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest

from megatron_dppo.config.reward_options import BUILT_IN_REWARDS
from megatron_dppo.data import tasks
from megatron_dppo.data.data_rows import iter_rows
from megatron_dppo.data.tasks import Split, TaskRow
from megatron_dppo.errors import ConfigError, DataError
from megatron_dppo.functions import packages
from megatron_dppo.rewards import FunctionSpec, RewardItem, RewardScorer
from megatron_dppo.rewards import functions as reward_functions
from megatron_dppo_lab.supervised import SupervisedDataset, load_task_with_corpus
from tests.silent_tokenizer import SilentTokenizer

MODULE = "package_with_offers"


class Countdown:
    """A task of another package, with options in its name and without a corpus."""

    def __init__(self, source: str) -> None:
        self._start = int(source.rpartition(":")[2])

    def rows(self, split: Split) -> Iterator[TaskRow]:
        for number in range(self._start, 0, -1):
            yield f"countdown/{split}:{number}", f"{number},", str(number - 1), {"split": split}


def offer(monkeypatch: pytest.MonkeyPatch, **points: tuple[str, str]) -> None:
    """Replace what the installed packages offer by ``NAME = (group, object of MODULE)``."""
    made = [EntryPoint(name, f"{MODULE}:{value}", group) for name, (group, value) in points.items()]
    monkeypatch.setattr(packages, "entry_points", lambda group: [each for each in made if each.group == group])
    half = reward_functions.PackagedReward(lambda **_: 0.5, lambda completion, label, metadata: 0.25)
    module = SimpleNamespace(Countdown=Countdown, half=lambda options: half)
    monkeypatch.setitem(sys.modules, MODULE, module)


def test_a_task_of_another_package_has_its_rows_and_gets_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, countdown=(tasks.GROUP, "Countdown"))
    rows = list(iter_rows("task:countdown:2", "eval"))
    assert [(row.location, row.prompt, row.label, row.metadata) for row in rows] == [
        ("countdown/eval:2", "2,", "1", {"split": "eval"}),
        ("countdown/eval:1", "1,", "0", {"split": "eval"}),
    ]
    with pytest.raises(DataError, match="'task:countdown:2'"):
        SupervisedDataset("task:countdown:2", SilentTokenizer(), 0)


@pytest.mark.parametrize("source", ["task:countdown2", "task:chain_sum", "task:", "task::countdown"])
def test_a_task_that_no_package_has_is_an_error_with_those_that_there_are(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(monkeypatch, countdown=(tasks.GROUP, "Countdown"), words=(reward_functions.GROUP, "half"))
    for read in (lambda: list(iter_rows(source, "train")), lambda: SupervisedDataset(source, SilentTokenizer(), 0)):
        with pytest.raises(DataError, match=rf"'{source}'; expected 'task:countdown', .*hf:[^.]*$"):
            read()


def test_without_any_package_the_error_says_how_to_install_them(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch)
    with pytest.raises(DataError, match=r"hf:owner/name. No package"):
        list(iter_rows("task:chain_sum", "train"))
    with pytest.raises(ConfigError, match=r"'words' needs .*megatron_dppo.rewards"):
        RewardScorer("words", 1.0, 1)


def test_a_package_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, countdown=(tasks.GROUP, "Removed"))
    with pytest.raises(ConfigError, match=f"megatron_dppo.tasks: {MODULE}:Removed .* AttributeError"):
        list(iter_rows("task:countdown:1", "train"))


@pytest.mark.parametrize("source", ["task:chain_sum:x", "task:chain_sum:", "task:rare_words:2"])
def test_an_embedded_task_refuses_options(source: str) -> None:
    with pytest.raises(DataError, match=r"'task:(chain_sum|rare_words)'"):
        list(iter_rows(source, "train"))


def test_reasoning_gym_needs_the_name_of_one_of_its_tasks() -> None:
    with pytest.raises(DataError, match="Fix: write 'task:reasoning_gym:NAME'"):
        list(iter_rows("task:reasoning_gym", "train"))


def test_a_packaged_reward_scores_quickly_without_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, words=(reward_functions.GROUP, "half"))
    item = RewardItem(prompt="p", completion="c", label="l", metadata={})
    assert [result.reward for result in RewardScorer(FunctionSpec("words"), 10.0, 1).score([item])] == [0.25]


def test_each_built_in_reward_is_of_the_trainer_or_offered() -> None:
    offered = packages.installed(reward_functions.GROUP).keys()
    assert offered == {"reasoning_gym", "words"} and offered <= BUILT_IN_REWARDS.keys()


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("chain_sum", "66ef54db70c77ae2"),
        ("rare_words", "b7c0b76498b5b367"),
        ("rare_chain", "61590cdea9d15ada"),
        ("rare_words_32k", "bb2e863cbbef8bfa"),
    ],
)
def test_the_tasks_give_the_prompts_and_the_corpus_that_they_always_gave(name: str, digest: str) -> None:
    """Runs are compared over versions: rows and random numbers stay the same."""
    splits: tuple[Split, ...] = ("train", "eval")
    rows = [[(row.location, row.prompt, row.label) for row in iter_rows(f"task:{name}", split)] for split in splits]
    task, rng = load_task_with_corpus(f"task:{name}"), random.Random(7)
    text = repr(rows) + repr([task.demonstration(rng) for _ in range(1000)])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == digest
