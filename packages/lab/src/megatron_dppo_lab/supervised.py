"""Prompt and response pairs for supervised training, addressed by one integer."""

import random
from typing import Any, Protocol, runtime_checkable

from megatron_dppo.data.sources import read_records, require
from megatron_dppo.data.tasks import Task, load_task
from megatron_dppo.data.training_samples import to_training_sample
from megatron_dppo.errors import DataError
from megatron_dppo.source_names import TASK
from megatron_dppo.types import TrainingSample
from megatron_dppo.types.model_folder import Tokenizer
from megatron_dppo_conversations.messages import media_problem

_CACHE_SIZE = 100_000
"""Texts of a task whose tokens are cached."""


@runtime_checkable
class TaskWithCorpus(Task, Protocol):
    """An embedded task with a corpus for supervised training."""

    def demonstration(self, rng: random.Random, /) -> tuple[str, str]:
        """Return prompt and response of one sample of the corpus."""


def load_task_with_corpus(source: str) -> TaskWithCorpus:
    """Return the task of a source for supervised training.

    Raises:
        DataError: See ``load_task``, or the task has no corpus.
    """
    task = load_task(source)
    if not isinstance(task, TaskWithCorpus):
        raise DataError(
            f"{source!r} has no corpus for supervised training. Fix: name another task, or a file with 'prompt' and "
            "'response'"
        )
    return task


class SupervisedDataset:
    """An endless stream of supervised samples; sample ``i`` depends on the seed and ``i`` alone.

    The source is an embedded task (its corpus, from training problems only), or a JSONL file, Parquet file or ``hf:``
    name with ``prompt`` and ``response`` strings.
    """

    def __init__(self, source: str, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer, self._seed = tokenizer, seed
        self._cache: dict[tuple[str, str], tuple[list[int], list[int]]] = {}
        self._task = load_task_with_corpus(source) if source.startswith(TASK) else None
        self.pairs = [] if self._task else [_parse_pair(*record) for record in read_records(source)]
        """(location, prompt, response) of each row. Empty if the corpus is that of an embedded task."""
        if not self._task and not len(self.pairs):
            raise DataError(f"{source} has no rows; expected rows with 'prompt' and 'response'")

    def check_lengths(self, context_length: int) -> None:
        """Check that all samples fit into the context. Those of a task always do."""
        for location, prompt, response in self.pairs:
            prompt_ids, response_ids = self._ids(prompt, response)
            if not prompt_ids:
                raise DataError(f"{location}: the prompt has no tokens; write a text, or remove the row")
            length = len(prompt_ids) + len(response_ids)
            if length > context_length:
                raise DataError(
                    f"{location}: prompt and response have {length} tokens together, more than the model's context of "
                    f"{context_length}. Shorten or remove the row"
                )

    def __getitem__(self, index: int) -> TrainingSample:
        """Return sample ``index`` of the stream; the loss is on the response and its end-of-sequence token."""
        rng = random.Random(f"{self._seed}/{index}")
        if self._task:
            prompt_ids, response_ids = self._task_ids(*self._task.demonstration(rng))
        else:
            _, prompt, response = rng.choice(self.pairs)
            prompt_ids, response_ids = self._ids(prompt, response)
        return to_training_sample(prompt_ids, response_ids, None, advantage=1.0)

    def _task_ids(self, prompt: str, response: str) -> tuple[list[int], list[int]]:
        """Return the tokens of prompt and response, cached.

        A task repeats few texts, and tokenizing takes half of a tiny model's step.
        """
        ids = self._cache.get((prompt, response))
        if ids is None:
            ids = self._ids(prompt, response)
            if len(self._cache) < _CACHE_SIZE:
                self._cache[prompt, response] = ids
        return ids

    def _ids(self, prompt: str, response: str) -> tuple[list[int], list[int]]:
        """Return the tokens of prompt and response, including the end-of-sequence token."""
        assert self._tokenizer is not None
        response_ids = self._tokenizer(response, add_special_tokens=False).input_ids
        return self._tokenizer(prompt).input_ids, [*response_ids, self._tokenizer.eos_token_id]


def _parse_pair(location: str, record: dict[str, Any]) -> tuple[str, str, str]:
    if problem := media_problem(record):
        raise DataError(f"{location}: {problem}")
    prompt, response = require(location, record, "prompt"), require(location, record, "response")
    if not isinstance(prompt, str) or not isinstance(response, str) or not prompt:
        raise DataError(
            f"{location}: 'prompt' must be a non-empty string and 'response' a string, got {prompt!r} and {response!r}"
        )
    return location, prompt, response
