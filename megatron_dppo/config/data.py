"""The sections ``[data]`` and ``[eval]``: training and held-out prompts, and how they are evaluated."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from megatron_dppo.config.section import Section


class DataConfig(Section):
    """Prompts. A source is an embedded task (``task:chain_sum``, ``task:rare_words``, ``task:rare_chain``),
    ``task:reasoning_gym:NAME``, a JSONL or Parquet file, or ``hf:owner/name`` (``docs/data.md``)."""

    train: str | list[str]
    """Prompts that are trained on: one source, or several, one after the other."""
    eval: str | dict[str, str] | None = None
    """Held-out prompts: one source, or a table name = source (each also reported as ``eval/<name>/accuracy``); None =
    no evaluation."""
    prompt_key: str | None = None
    """Column with a string or a list of chat messages (``a.b`` = field ``b`` of column ``a``); None = recognised."""
    label_key: str | None = None
    """Column with the reference answer, likewise; None = recognised; ``""`` = there are no labels."""
    deduplicate: str = "auto"
    """Keep the first row of each problem, told by ``auto`` (same prompt or ``extra_info.index``), ``prompt``, a column;
    ``off`` = keep all."""
    apply_chat_template: bool | None = None
    """None = messages and bare problems go through the tokenizer's template, a string under ``prompt`` is taken as it
    stands; true = strings do too, as one user message; false = nothing does."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the chat template, for example ``enable_thinking = false``."""
    system_prompt: str | None = None
    """System message for prompts that have none (needs a chat template)."""
    max_prompt_tokens: int = Field(1024, gt=0)
    """Longest prompt, chat template included."""
    overlong_prompts: Literal["error", "drop", "truncate_left"] = "error"
    """What becomes of a longer prompt; ``truncate_left`` keeps its last tokens. Those dropped or cut are counted at the
    start."""

    @field_validator("train")
    @classmethod
    def _has_a_source(cls, value: str | list[str]) -> str | list[str]:
        if not value:
            raise ValueError("name at least one source")
        return value

    @field_validator("eval")
    @classmethod
    def _sets_have_names(cls, value: str | dict[str, str] | None) -> str | dict[str, str] | None:
        names = list(value) if isinstance(value, dict) else ["one"]
        if not names:
            raise ValueError("an empty table has no set; leave data.eval out for no evaluation")
        if bad := [name for name in names if not re.fullmatch(r"[A-Za-z0-9_.-]+", name)]:
            raise ValueError(f"the name {bad[0]!r} becomes part of a metric; use letters, digits, '_', '.' and '-'")
        return value


class EvalConfig(Section):
    """Evaluation on ``data.eval``: greedy by default."""

    every: int = Field(10, ge=0)
    """Steps between evaluations; one more runs before the first step and one after the last. 0 = never."""
    samples_per_prompt: int = Field(1, ge=1)
    """n answers to each prompt: ``eval/accuracy`` is their mean score; above 1 also ``eval/pass_at_k`` for k = 1, 2, 4
    ... n (unbiased) and ``eval/maj_at_n``, the score of the most frequent answer."""
    temperature: float = Field(0.0, ge=0)
    """0 = greedy; needed above 0 for more than one sample."""
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    """Sample among the so many most probable tokens; 0 = all."""
    min_p: float = Field(0.0, ge=0, lt=1)
    """Sample among the tokens that have at least this share of the largest probability; 0 = all."""
    max_new_tokens: int | None = Field(None, gt=0)
    """Longest answer; None = ``rollout.max_new_tokens``."""
    beside_training: bool | None = None
    """Sample while the next step samples and trains, and log when that step ends; None = with inference servers, unless
    ``checkpoint.keep_best`` or ``stop_at_accuracy`` needs the result at once."""
    stop_at_accuracy: float | None = None
    """End the run well, with a checkpoint and all that a run leaves, after the first evaluation in training whose
    ``eval/accuracy`` (the mean score) is at least this; None = after ``run.num_steps``."""
    max_prompts: int | None = Field(None, gt=0)
    """Evaluate on a fixed random sample of this size; None = all."""

    def is_due(self, step: int, num_steps: int) -> bool:
        """Return whether a run of ``num_steps`` evaluates after ``step``."""
        return self.every > 0 and (step % self.every == 0 or step == num_steps)

    @model_validator(mode="after")
    def _stop_is_known_in_time(self) -> EvalConfig:
        if self.stop_at_accuracy is not None and self.beside_training:
            raise ValueError(
                f"stop_at_accuracy = {self.stop_at_accuracy} with beside_training = true: when the result of an "
                "evaluation is there, another step was done. Choose one of them"
            )
        return self

    @model_validator(mode="after")
    def _samples_differ(self) -> EvalConfig:
        if self.samples_per_prompt > 1 and self.temperature == 0:
            raise ValueError(
                f"samples_per_prompt = {self.samples_per_prompt} with temperature = 0 repeats one greedy answer; set "
                "temperature above 0"
            )
        filters = {"top_p": self.top_p < 1, "top_k": self.top_k > 0, "min_p": self.min_p > 0}
        if self.temperature == 0 and any(filters.values()):
            name = next(name for name, is_set in filters.items() if is_set)
            raise ValueError(
                f"{name} = {getattr(self, name)} has no effect with temperature = 0, which always takes the most "
                "probable token; set temperature above 0, or remove it"
            )
        return self
