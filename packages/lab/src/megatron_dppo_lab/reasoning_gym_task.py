"""Prompts from reasoning-gym's generators: ``task:reasoning_gym:chain_sum?size=2000&seed=1&min_terms=2``."""

import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from megatron_dppo.data.tasks import Split, TaskRow
from megatron_dppo.errors import DataError

PREFIX = "task:reasoning_gym:"
INSTRUCTION = "\nPut the final answer in \\boxed{}."
_SIZE = 2000


@dataclass(frozen=True)
class ReasoningGymTask:
    """One of the package's tasks."""

    source: str

    def __post_init__(self) -> None:
        if not self.source.startswith(PREFIX):
            raise DataError(f"{self.source!r} does not name a task of the package. Fix: write '{PREFIX}NAME'")

    def rows(self, split: Split) -> list[TaskRow]:
        """Return the problems of a split."""
        return problems(self.source, split)


def problems(source: str, split: Split) -> list[TaskRow]:
    """Return the problems of a split. A checksum of the question puts a tenth of them in ``eval``.

    Args:
        source: ``task:reasoning_gym:NAME`` with options after ``?``: ``size`` (problems of both splits together, 2000),
            ``seed`` (0), ``chat`` (false; true = one user message, for models with a chat template), ``instruction``
            (true; how to give the answer) and every option of the task itself.
        split: ``train`` or ``eval``.
    """
    name, _, query = source.removeprefix(PREFIX).partition("?")
    options = {key: _value(text) for key, text in parse_qsl(query, keep_blank_values=True)}
    chat, instruction = (_flag(source, key, options.pop(key, default)) for key, default in _FLAGS.items())
    made: list[TaskRow] = []
    questions: set[str] = set()
    for index, entry in enumerate(_entries(source, name, {"size": _SIZE, "seed": 0} | options)):
        question = str(entry["question"])
        held_out = zlib.crc32(question.encode()) % 10 == 0
        if question in questions or held_out != (split == "eval"):
            continue
        questions.add(question)
        text = question + INSTRUCTION if instruction else question
        prompt: str | list[dict[str, str]] = [{"role": "user", "content": text}] if chat else text
        label = "" if entry["answer"] is None else str(entry["answer"])
        metadata = {"question": question, "metadata": entry["metadata"]}
        made.append((f"reasoning_gym/{name}/{split}:{index}", prompt, label, metadata))
    if not made:
        raise DataError(f"{source!r} has no problem for the {split} split; raise size")
    return made


_FLAGS = {"chat": False, "instruction": True}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _flag(source: str, key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise DataError(f"{source!r}: {key} must be true or false, got {value!r}")
    return value


def _entries(source: str, name: str, options: dict[str, Any]) -> Iterator[Mapping[str, Any]]:
    try:
        import reasoning_gym
    except ImportError as error:
        raise DataError(
            f"{source!r} needs the package reasoning-gym ({error}); install it with pip install "
            "'megatron-dppo[reasoning-gym]' (its dependency pycosat is compiled: a C compiler must be there)"
        ) from error
    # A task's own checks are assertions; a wrong option may also show only when a problem is made.
    try:
        yield from reasoning_gym.create_dataset(name, **options)
    except Exception as error:
        raise DataError(
            f"{source!r}: reasoning-gym refuses it: {type(error).__name__}: {error}. Change the options in its name"
        ) from error
