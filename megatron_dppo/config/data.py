"""The sections ``[data]`` and ``[eval]``: training prompts, held-out prompts, and evaluation."""

import re
from difflib import get_close_matches
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from megatron_dppo.config.section import Section
from megatron_dppo.source_names import name_sources

_SAME_FOR_ALL = {
    "temperature": "the loss divides all logits by one temperature, at which it computes every log-probability",
    "top_p": "the run records the ids that the filters allowed for all responses or for none",
    "top_k": "the run records the ids that the filters allowed for all responses or for none",
    "min_p": "the run records the ids that the filters allowed for all responses or for none",
}
"""Sampling settings that all sources share, and the reason."""


def source_metric(name: str) -> str:
    """Return the name of a source as a part of metric names, with ``_`` for other characters than ``A-Za-z0-9_.-``."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", name)


class SourceConfig(Section):
    """Share and limits of one source of ``data.train``.

    ``NAME`` is the file's name without its folder, such as ``"train.jsonl"``, or the source itself with ``task:`` or
    ``hf:``. Files of one name in ``data.train`` and ``data.eval`` are ``"gsm8k/train.jsonl"`` and
    ``"math/train.jsonl"``.
    """

    weight: float | None = Field(None, gt=0)
    """Share of the prompts that are from this source, relative to the other weights. All sources need one, or none.
    null goes over all sources at the same pace."""
    max_new_tokens: int | None = Field(None, gt=0)
    """Maximum response length in tokens, at most ``rollout.max_new_tokens``. null uses that."""
    max_calls: int | None = Field(None, gt=0)
    """Maximum number of model calls per episode. null uses ``agent.max_calls``."""
    max_segments: int | None = Field(None, gt=0)
    """Maximum number of conversations per episode. null uses ``agent.max_segments``."""
    timeout_seconds: float | None = Field(None, gt=0)
    """Time limit of an episode in seconds. null uses ``agent.timeout_seconds``."""

    @model_validator(mode="before")
    @classmethod
    def _sampling_is_the_same(cls, values: object) -> object:
        for name, reason in _SAME_FOR_ALL.items():
            if isinstance(values, dict) and name in values:
                raise ValueError(f"{name} cannot differ by source: {reason}. Set rollout.{name} instead")
        return values


class DataConfig(Section):
    """Training and held-out prompts.

    A source is one of: an embedded task (``task:chain_sum``, ``task:rare_words``, ``task:rare_chain``,
    ``task:rare_words_32k``), ``task:reasoning_gym:NAME``, a JSONL or Parquet file, or ``hf:owner/name``
    (``docs/data.md``).
    """

    train: str | list[str]
    """Training prompts: one source, or a list of sources that are concatenated."""
    sources: dict[str, SourceConfig] = Field(default_factory=dict)
    """Weights and limits of single sources of ``data.train`` (``[data.sources.NAME]``, docs/data.md)."""
    eval: str | dict[str, str] | None = None
    """Held-out prompts: one source, or a table ``name = source``. Each named set is also reported as
    ``eval/<name>/accuracy``. null disables evaluation."""
    prompt_key: str | None = None
    """Column with the prompt: a string or a list of chat messages. ``a.b`` is field ``b`` of column ``a``. null detects
    the column."""
    label_key: str | None = None
    """Column with the reference answer. ``a.b`` is field ``b`` of column ``a``. null detects the column;
    ``""`` means that the data has no labels."""
    deduplicate: str = "auto"
    """Keep only the first row of each problem. ``auto`` and ``prompt`` compare the prompt, and the name of a column
    compares that column. ``off`` keeps every row."""
    apply_chat_template: bool | None = None
    """Apply the tokenizer's chat template. null applies it to chat messages and to bare problems, but not to a string
    in the column ``prompt``. true also applies it to such strings, as one user message. false never applies it."""
    chat_template_kwargs: dict[str, object] = Field(default_factory=dict)
    """Variables passed to the chat template, for example ``enable_thinking = false``."""
    system_prompt: str | None = None
    """System message added to prompts that have none. Needs a chat template. null adds none."""
    max_prompt_tokens: int = Field(1024, gt=0)
    """Maximum prompt length in tokens, after the chat template is applied."""
    overlong_prompts: Literal["error", "drop", "truncate_left"] = "error"
    """Handling of longer prompts: stop with an error, drop them, or keep only their last tokens (``truncate_left``).
    The number of dropped or truncated prompts is printed at the start."""

    @field_validator("train")
    @classmethod
    def _has_a_source(cls, value: str | list[str]) -> str | list[str]:
        if not value:
            raise ValueError("expected at least one source; name one")
        return value

    @field_validator("eval")
    @classmethod
    def _sets_have_names(cls, value: str | dict[str, str] | None) -> str | dict[str, str] | None:
        names = list(value) if isinstance(value, dict) else ["one"]
        if not names:
            raise ValueError("an empty table names no set; remove data.eval to disable evaluation")
        if bad := [name for name in names if not re.fullmatch(r"[A-Za-z0-9_.-]+", name)]:
            raise ValueError(
                f"the set name {bad[0]!r} becomes part of a metric name; use only letters, digits, '_', '.' and '-'"
            )
        return value

    @property
    def names(self) -> dict[str, str]:
        """Name of each source of ``train`` and ``eval``, which messages, metrics and ``[data.sources]`` use."""
        named = self.eval if isinstance(self.eval, dict) else {"": self.eval}
        return name_sources([*self._train_sources, *(source for source in named.values() if source is not None)])

    @property
    def source_names(self) -> list[str]:
        """Names of the sources of ``train``, in order."""
        names = self.names
        return [names[source] for source in self._train_sources]

    @property
    def _train_sources(self) -> list[str]:
        return [self.train] if isinstance(self.train, str) else self.train

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each source, in the order of ``train``. Empty without weights."""
        weights = {name: self.sources[name].weight for name in self.source_names if name in self.sources}
        return {name: weight for name, weight in weights.items() if weight is not None}

    @model_validator(mode="after")
    def _sources_exist_once(self) -> Self:
        names = self.source_names
        if repeated := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"data.train has the source {repeated[0]!r} twice; remove one")
        for name in self.sources:
            if name not in names:
                close = [each for each in names if Path(each).name == name] or get_close_matches(name, names, 1)
                hint = f"its sources are {', '.join(map(repr, names))}"
                if close:
                    hint = f"did you mean {' or '.join(map(repr, close))}?"
                raise ValueError(f"data.sources has {name!r}, which is no source of data.train; {hint}")
        metrics: dict[str, str] = {}
        for name in self.sources:
            if (other := metrics.setdefault(source_metric(name), name)) != name:
                raise ValueError(
                    f"data.sources has {other!r} and {name!r}, whose metrics would both be "
                    f"rollout/source/{source_metric(name)}; rename one of the sources"
                )
        return self

    @model_validator(mode="after")
    def _weights_are_complete(self) -> Self:
        weights = self.weights
        if weights and len(self.source_names) == 1:
            raise ValueError(
                f'data.sources."{self.source_names[0]}".weight has no effect on the only source; remove it'
            )
        if missing := [name for name in self.source_names if weights and name not in weights]:
            raise ValueError(
                f'data.sources."{next(iter(weights))}" has a weight and {missing[0]!r} has none; set '
                f'data.sources."{missing[0]}".weight, or remove the source from data.train'
            )
        return self


class EvalConfig(Section):
    """Evaluation on ``data.eval``, greedy by default."""

    every: int = Field(10, ge=0)
    """Steps between evaluations. The run also evaluates before the first step and after the last one. 0 disables
    evaluation."""
    samples_per_prompt: int = Field(1, ge=1)
    """Responses sampled for each prompt (n). ``eval/accuracy`` is their mean score. Above 1, the run also reports
    ``eval/pass_at_k`` for k = 1, 2, 4 ... n (unbiased estimate) and ``eval/maj_at_n``, the score of the most frequent
    answer."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature. 0 is greedy. More than one sample per prompt needs a temperature above 0."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the most probable tokens whose total probability reaches this value. 1 disables the filter."""
    top_k: int = Field(0, ge=0)
    """Sample from this many most probable tokens. 0 disables the filter."""
    min_p: float = Field(0.0, ge=0, lt=1)
    """Sample from the tokens whose probability is at least this fraction of the largest one. 0 disables the filter."""
    max_new_tokens: int | None = Field(None, gt=0)
    """Maximum response length in tokens. null uses ``rollout.max_new_tokens``."""
    overlap_training: bool | None = None
    """Evaluate while the next step samples and trains, and log the result when that step ends. null enables this with
    inference servers, unless they share the trainer's GPUs or ``checkpoint.keep_best`` or ``stop_at_accuracy`` needs
    the result at once."""
    stop_at_accuracy: float | None = None
    """End the run after the first evaluation during training whose ``eval/accuracy`` (mean score) reaches this value.
    The run still writes its checkpoint and reports. null trains for ``run.num_steps``."""
    max_prompts: int | None = Field(None, gt=0)
    """Evaluate on a fixed random subset of this many prompts. null evaluates on all prompts."""

    def is_due(self, step: int, num_steps: int) -> bool:
        """Return whether a run of ``num_steps`` steps evaluates after ``step``."""
        return self.every > 0 and (step % self.every == 0 or step == num_steps)

    @model_validator(mode="after")
    def _stop_is_known_in_time(self) -> Self:
        if self.stop_at_accuracy is not None and self.overlap_training:
            raise ValueError(
                f"stop_at_accuracy = {self.stop_at_accuracy} with overlap_training = true: the result arrives one "
                "step too late to stop the run. Remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _samples_differ(self) -> Self:
        if self.samples_per_prompt > 1 and self.temperature == 0:
            raise ValueError(
                f"samples_per_prompt = {self.samples_per_prompt} with temperature = 0 repeats one greedy response; "
                "set temperature above 0"
            )
        filters = {"top_p": self.top_p < 1, "top_k": self.top_k > 0, "min_p": self.min_p > 0}
        if self.temperature == 0 and any(filters.values()):
            name = next(name for name, is_set in filters.items() if is_set)
            raise ValueError(
                f"{name} = {getattr(self, name)} has no effect with temperature = 0, which always picks the most "
                f"probable token; set temperature above 0, or remove {name}"
            )
        return self
