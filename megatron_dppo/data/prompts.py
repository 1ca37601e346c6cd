"""Prompts as an endless stream addressed by one integer, held in packed memory."""

from __future__ import annotations

import hashlib
import pickle
import random
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron_dppo.data.chat import ChatOptions
from megatron_dppo.data.data_rows import DataRow, drop_duplicates, iter_rows
from megatron_dppo.data.mix import SourceMix
from megatron_dppo.data.tasks import Split
from megatron_dppo.errors import DataError
from megatron_dppo.source_names import name_sources
from megatron_dppo.types import Prompt, PromptLimits
from megatron_dppo.types.model_folder import Tokenizer

T = TypeVar("T")


class PackedList(Generic[T]):
    """An immutable list of pickled items; each access unpickles an item.

    The pickles live in memory and come from a process of the run, never from a file.

    Args:
        items: Anything that can be pickled.

    Raises:
        pickle.PicklingError: An item cannot be pickled.

    Example:
        >>> squares = PackedList((i, i * i) for i in range(1000))
        >>> len(squares), squares[12]
        (1000, (12, 144))
    """

    def __init__(self, items: Iterable[T]) -> None:
        data, ends = bytearray(), array("q", [0])
        for item in items:
            try:
                data += pickle.dumps(item, protocol=5)
            except Exception as error:  # what an object of a foreign type raises is up to it
                raise pickle.PicklingError(str(error)) from error
            ends.append(len(data))
        self._data, self._ends = np.frombuffer(data, np.uint8), np.frombuffer(ends, np.int64)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> T:
        if not 0 <= index < len(self):
            raise IndexError(f"item {index} of {len(self)}")
        start, end = self._ends[index : index + 2].tolist()
        item: T = pickle.loads(self._data[start:end])
        return item

    def __iter__(self) -> Iterator[T]:
        return (self[i] for i in range(len(self)))


Overlong = Literal["error", "drop", "truncate_left"]


@dataclass(frozen=True)
class LoadedRows:
    """Rows of one or several sources without duplicates, and the number of rows read."""

    rows: list[DataRow]
    num_read: int


def load_rows(
    sources: str | Sequence[str],
    split: Split,
    *,
    prompt_key: str | None = None,
    label_key: str | None = None,
    deduplicate: str = "auto",
    limits: Mapping[str, PromptLimits] | None = None,
    names: Mapping[str, str] | None = None,
) -> LoadedRows:
    """Return all rows of the sources, one source after the other. Each source may have another layout.

    See ``iter_rows`` for sources and keys, ``drop_duplicates`` for ``deduplicate``. ``limits`` has the limits of
    sources that have some, by their name. ``names`` has the name of each source, which is unique in the run
    (``name_sources``). None names these sources alone.

    Raises:
        DataError: See both.
    """
    listed = [sources] if isinstance(sources, str) else list(sources)
    named = names or name_sources(listed)

    def iter_all() -> Iterator[DataRow]:
        for source in listed:
            name = named[source]
            source_limits = (limits or {}).get(name)
            for row in iter_rows(source, split, prompt_key, label_key, name):
                yield replace(row, source=name, limits=source_limits)

    return LoadedRows(*drop_duplicates(iter_all(), deduplicate))


class PromptDataset:
    """Rows as tokenized prompts; epoch e is a reshuffle by ``(seed, e)``, so that a cursor is one integer.

    With weights each source has epochs of its own, and the position in the stream gives the source (``SourceMix``).

    Each prompt is made anew when it is asked for. ``num_dropped`` and ``num_truncated`` rows were too long; the longest
    prompt that is there has ``longest`` tokens.

    Args:
        rows: At least one.
        tokenizer: A transformers tokenizer.
        max_prompt_tokens: Longest prompt that is allowed.
        max_new_tokens: Longest response; prompt and response must fit the context.
        max_new_tokens_key: The setting that it comes from, for messages.
        are_tasks: True if the prompts are tasks of an agent (``Prompt.is_task``), which have messages.
        context_length: The model's ``max_position_embeddings``.
        seed: Order of the stream; None keeps the order of the rows (for evaluation).
        chat: Options that turn a prompt into text.
        overlong: Handling of a prompt that is too long: ``error``, ``drop``, or ``truncate_left``, which keeps its
            last tokens.
        weights: Weight of each source by its name (``PromptLimits.source``), for all rows. Needs a seed. Empty: one
            epoch takes each row once.

    Raises:
        DataError: A prompt is too long, none is left (of a source), or a prompt does not go with the chat template.
    """

    def __init__(
        self,
        rows: Sequence[DataRow],
        tokenizer: Tokenizer,
        *,
        max_prompt_tokens: int,
        max_new_tokens: int,
        context_length: int,
        seed: int | None = None,
        chat: ChatOptions | None = None,
        overlong: Overlong = "error",
        max_new_tokens_key: str = "rollout.max_new_tokens",
        are_tasks: bool = False,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        if not rows:
            raise DataError("the data set has no rows; expected at least one prompt")
        chat = chat or ChatOptions()
        chat.check(tokenizer)
        limits = {"data.max_prompt_tokens": max_prompt_tokens, "the context": context_length - max_new_tokens}
        self._seed = seed
        self.num_dropped = 0
        self.num_truncated = 0
        self.longest = 0
        self._orders: dict[str, tuple[int, NDArray[np.int64]]] = {}
        self.sizes = dict.fromkeys(weights or {}, 0)
        """Number of prompts of each source that has a weight, in the order of the rows."""
        digest, location = hashlib.sha256(), ""

        def iter_prompts() -> Iterator[Prompt]:
            nonlocal location
            for row in rows:
                # For the error below: ``PackedList`` knows nothing of rows.
                location = row.location
                # The variables of the template are for the agent's calls, which a task in plain text has to become.
                is_text = are_tasks and isinstance(row.prompt, str)
                options = replace(chat, template_kwargs={}) if is_text else chat
                prompt = _to_prompt(row, tokenizer, options, writes_tools=not are_tasks)
                prompt = _as_task(prompt, row) if are_tasks else prompt
                exceeded = [item for item in limits.items() if len(prompt.token_ids) > item[1]]
                # If the response may fill the context, no prompt fits, however short.
                if exceeded and overlong == "truncate_left" and max_new_tokens < context_length:
                    prompt = replace(prompt, token_ids=prompt.token_ids[-min(limits.values()) :])
                    self.num_truncated, exceeded = self.num_truncated + 1, []
                if not exceeded:
                    self.longest = max(self.longest, len(prompt.token_ids))
                    if weights and prompt.limits is not None:
                        self.sizes[prompt.limits.source] += 1
                    # Not the name of the file: a renamed file is the same stream.
                    digest.update(f"{prompt.token_ids} {prompt.label}\n".encode())
                    yield prompt
                elif overlong == "error" or max_new_tokens >= context_length:
                    raise DataError(_too_long(prompt, *exceeded[0], max_new_tokens_key, max_new_tokens, context_length))
                else:
                    self.num_dropped += 1

        try:
            self._prompts = PackedList(iter_prompts())
        except pickle.PicklingError as error:
            raise DataError(
                f"{location}: the row holds an object that cannot be sent to the other ranks: {error}. Write it as "
                "text or as numbers, or leave its column out"
            ) from error
        if not len(self):
            raise DataError(
                f"all {len(rows)} prompts are longer than {min(limits.values())} tokens and data.overlong_prompts = "
                "'drop' leaves none; raise data.max_prompt_tokens"
            )
        self._digest = digest.hexdigest()[:12]
        if empty := [name for name, size in self.sizes.items() if not size]:
            raise DataError(
                f'data.sources."{empty[0]}" has a weight, but no prompt of this source is left: all its rows are too '
                "long, or repeat rows of earlier sources. Fix: remove the source from data.train, or see "
                "data.overlong_prompts and data.deduplicate"
            )
        self.mix = SourceMix(list(weights.values())) if weights else None
        """Shares of the sources ``sizes``. None without weights."""

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> Prompt:
        """Return prompt ``index`` of the endless stream."""
        if index < 0:
            raise IndexError(f"the stream starts at 0, got {index}")
        if self._seed is None:
            return self._prompts[index % len(self)]
        if self.mix is None:
            return self._prompts[self._shuffled(index, len(self))]
        source, index = self.mix.locate(index)
        sizes = list(self.sizes.values())
        # By its number and not its name: a renamed file is the same stream.
        return self._prompts[sum(sizes[:source]) + self._shuffled(index, sizes[source], f"{source}/")]

    def _shuffled(self, index: int, size: int, name: str = "") -> int:
        """Return the row of prompt ``index`` of an endless stream of ``size`` rows."""
        epoch, position = divmod(index, size)
        # Only the order of the current epoch is in memory.
        if self._orders.get(name, (-1,))[0] != epoch:
            order = list(range(size))
            random.Random(f"{self._seed}/{name}{epoch}").shuffle(order)
            self._orders[name] = (epoch, np.array(order, np.int64))
        return int(self._orders[name][1][position])

    def __iter__(self) -> Iterator[Prompt]:
        """Yield each prompt once, in the order of the rows."""
        return iter(self._prompts)

    def fingerprint(self) -> str:
        """Return number and digest of prompts and labels, and shares: a cursor is valid only in the same stream."""
        mix = ""
        if self.mix is not None:
            counts = zip(self.mix.shares, self.sizes.values(), strict=True)
            mix = f", mixed {' : '.join(f'{share} of {size}' for share, size in counts)}"
        return f"{len(self)} prompts, {self._digest}{mix}"


def _too_long(prompt: Prompt, name: str, limit: int, key: str, max_new_tokens: int, context_length: int) -> str:
    length = len(prompt.token_ids)
    if name == "the context":
        return (
            f"{prompt.prompt_id}: the prompt has {length} tokens; with {key} = {max_new_tokens} that is "
            f"{length + max_new_tokens}, more than the model's context of {context_length}. Shorten the prompt or "
            f"lower {key}"
        )
    return (
        f"{prompt.prompt_id}: the prompt has {length} tokens, more than {name} = {limit}. Shorten or remove the "
        f"row, raise {name}, or set data.overlong_prompts = 'drop' or 'truncate_left'"
    )


def _as_task(prompt: Prompt, row: DataRow) -> Prompt:
    if not isinstance(row.prompt, str) and row.prompt[-1]["role"] == "assistant":
        raise DataError(
            f"{row.location}: the messages end with an assistant message, which an agent cannot continue; remove it"
        )
    messages = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
    return replace(prompt, messages=tuple(messages), is_task=True)


def _to_prompt(row: DataRow, tokenizer: Tokenizer, chat: ChatOptions, *, writes_tools: bool) -> Prompt:
    text, is_templated = chat.render(row, tokenizer, writes_tools=writes_tools)
    ids = tokenizer(text, add_special_tokens=not is_templated).input_ids
    if not ids:
        raise DataError(f"{row.location}: the prompt has no tokens; write a text, or remove the row")
    return Prompt(
        prompt_id=row.location,
        text=text,
        token_ids=tuple(ids),
        label=row.label,
        metadata=row.metadata,
        source=row.source,
        messages=None if isinstance(row.prompt, str) else tuple(row.prompt),
        limits=row.limits,
    )
