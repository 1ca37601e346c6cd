"""Prompts from the embedded task or a JSONL file, as an endless stream addressed by one integer."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_dppo.data import chain_sum, reasoning_gym
from megatron_dppo.errors import DataError
from megatron_dppo.types import Prompt

CHAIN_SUM = "task:chain_sum"


@dataclass(frozen=True)
class Row:
    """One data row with the place it came from, for example ``train.jsonl:12``."""

    place: str
    prompt: str | list[dict[str, str]]
    label: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


def load_rows(source: str, split: chain_sum.Split, prompt_key: str = "prompt", label_key: str = "label") -> list[Row]:
    """All rows of a source.

    Args:
        source: ``task:chain_sum``, ``task:reasoning_gym:NAME`` or the path of a JSONL file.
        split: which part of the task; a file is taken whole.
        prompt_key: column with a string or a list of chat messages.
        label_key: column with the reference answer, a string or a number.

    Raises:
        DataError: a missing file, an empty one, or a bad row (named by line and field).
    """
    if source == CHAIN_SUM:
        tasks = enumerate(chain_sum.problems(split))
        return [Row(f"chain_sum/{split}:{i}", p.question, str(p.answer)) for i, p in tasks]
    if source.startswith(reasoning_gym.PREFIX):
        return [Row(*problem) for problem in reasoning_gym.problems(source, split)]
    rows = [_parse_row(place, record, prompt_key, label_key) for place, record in read_jsonl(source)]
    if not rows:
        raise DataError(f"{source} has no rows; expected one JSON object a line with {prompt_key!r} and {label_key!r}")
    return rows


def read_jsonl(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """``(place, object)`` of each non-empty line.

    Raises:
        DataError: an unknown task, a missing file, or a line that is not a JSON object in UTF-8.
    """
    file = Path(path)
    if path.startswith("task:"):
        raise DataError(
            f"unknown task {path!r}; expected {CHAIN_SUM!r}, '{reasoning_gym.PREFIX}NAME' or the path of a JSONL file"
        )
    if not file.is_file():
        reason = "is a folder, not a JSONL file" if file.is_dir() else "does not exist"
        raise DataError(f"data file {path!r} {reason} (looked in {file.resolve().parent})")
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            place = f"{file.name}:{number}"
            try:
                record = json.loads(line.decode("utf-8-sig"))
            except UnicodeDecodeError as error:
                raise DataError(f"{place}: not UTF-8 ({error.reason} at byte {error.start}); convert it") from error
            except json.JSONDecodeError as error:
                raise DataError(f"{place}: not valid JSON ({error.msg} at column {error.colno})") from error
            if not isinstance(record, dict):
                raise DataError(f"{place}: expected a JSON object, got {type(record).__name__}")
            yield place, record


def require(place: str, record: Mapping[str, Any], key: str) -> Any:
    """The value of a column, or a DataError that says which columns there are."""
    if key not in record:
        raise DataError(f"{place}: field {key!r} is missing; the row has {sorted(record)}")
    return record[key]


def _parse_row(place: str, record: dict[str, Any], prompt_key: str, label_key: str) -> Row:
    prompt, label = require(place, record, prompt_key), require(place, record, label_key)
    if isinstance(label, bool) or not isinstance(label, str | int | float):
        raise DataError(f"{place}: field {label_key!r} must be a string or a number, got {label!r}")
    is_chat = (
        isinstance(prompt, list)
        and bool(prompt)
        and all(isinstance(m, dict) and isinstance(m.get("content"), str) and "role" in m for m in prompt)
    )
    if not is_chat and not (isinstance(prompt, str) and prompt):
        raise DataError(
            f"{place}: field {prompt_key!r} must be a non-empty string or a list of messages "
            f"{{role, content}}, got {prompt!r}"
        )
    rest = {k: v for k, v in record.items() if k not in (prompt_key, label_key)}
    return Row(place, prompt, str(label), rest)


class PromptDataset:
    """Rows as tokenized prompts; epoch e is a reshuffle by ``(seed, e)``, so that a cursor is one integer.

    Args:
        rows: at least one.
        tokenizer: a transformers tokenizer.
        max_prompt_tokens: longest prompt that is allowed.
        max_new_tokens: longest response; prompt and response must fit the context.
        context_length: the model's ``max_position_embeddings``.
        seed: order of the stream; None keeps the order of the rows (for evaluation).

    Raises:
        DataError: a prompt is too long, or chat messages meet a tokenizer without a chat template.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        tokenizer: Any,
        *,
        max_prompt_tokens: int,
        max_new_tokens: int,
        context_length: int,
        seed: int | None = None,
    ) -> None:
        if not rows:
            raise DataError("the data set has no rows")
        self._seed = seed
        self._order: tuple[int, list[int]] = (-1, [])
        self._prompts = [_to_prompt(row, tokenizer) for row in rows]
        limits = {"data.max_prompt_tokens": max_prompt_tokens, "the context": context_length - max_new_tokens}
        for prompt in self._prompts:
            for name, limit in limits.items():
                if len(prompt.token_ids) > limit:
                    raise DataError(_too_long(prompt, name, limit, max_new_tokens, context_length))

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> Prompt:
        """Prompt ``index`` of the endless stream."""
        if index < 0:
            raise IndexError(f"the stream starts at 0, got {index}")
        epoch, position = divmod(index, len(self._prompts))
        if self._seed is None:
            return self._prompts[position]
        if self._order[0] != epoch:
            order = list(range(len(self._prompts)))
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._prompts[self._order[1][position]]


def _too_long(prompt: Prompt, name: str, limit: int, max_new_tokens: int, context_length: int) -> str:
    length = len(prompt.token_ids)
    if name == "the context":
        return (
            f"{prompt.prompt_id}: the prompt has {length} tokens; with rollout.max_new_tokens = {max_new_tokens} that "
            f"is {length + max_new_tokens}, more than the model's context of {context_length}. Shorten the prompt or "
            "lower rollout.max_new_tokens"
        )
    return (
        f"{prompt.prompt_id}: the prompt has {length} tokens, more than {name} = {limit}. Shorten or remove the "
        f"row, or raise {name}"
    )


def _to_prompt(row: Row, tokenizer: Any) -> Prompt:
    if isinstance(row.prompt, str):
        text, ids = row.prompt, tokenizer(row.prompt).input_ids
    else:
        if not tokenizer.chat_template:
            raise DataError(
                f"{row.place}: the prompt is a list of messages, but the tokenizer has no chat template. Use a plain "
                "string, or a model folder whose tokenizer has one"
            )
        try:
            text = tokenizer.apply_chat_template(row.prompt, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # a template is a program of the model's authors and may raise anything
            raise DataError(f"{row.place}: the chat template refuses the messages: {error}") from error
        ids = tokenizer(text, add_special_tokens=False).input_ids
    if not ids:
        raise DataError(f"{row.place}: the prompt has no tokens")
    return Prompt(
        prompt_id=row.place,
        text=text,
        token_ids=tuple(ids),
        label=row.label,
        metadata=row.metadata,
        messages=None if isinstance(row.prompt, str) else tuple(row.prompt),
    )
