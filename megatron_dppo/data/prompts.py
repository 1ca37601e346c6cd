"""Prompts as an endless stream addressed by one integer, held in packed memory."""

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


@dataclass(frozen=True)
class _LengthLimits:
    """Longest prompt, and handling of longer ones. The fields are arguments of ``PromptDataset``."""

    max_prompt_tokens: int
    max_new_tokens: int
    context_length: int
    overlong: Overlong
    max_new_tokens_key: str

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt that is allowed."""
        return min(self.max_prompt_tokens, self.context_length - self.max_new_tokens)

    def fit(self, prompt: Prompt) -> Prompt | None:
        """Return the prompt if it is short enough. A longer one is cut, or None drops it."""
        if len(prompt.token_ids) <= self.longest:
            return prompt
        # If the response may fill the context, no prompt fits, however short.
        if self.overlong == "error" or self.max_new_tokens >= self.context_length:
            raise DataError(self._message(prompt))
        if self.overlong == "drop":
            return None
        return replace(prompt, token_ids=prompt.token_ids[-self.longest :])

    def _message(self, prompt: Prompt) -> str:
        length = len(prompt.token_ids)
        if length > self.max_prompt_tokens:
            return (
                f"{prompt.prompt_id}: the prompt has {length} tokens, more than data.max_prompt_tokens = "
                f"{self.max_prompt_tokens}. Shorten or remove the row, raise data.max_prompt_tokens, or set "
                "data.overlong_prompts = 'drop' or 'truncate_left'"
            )
        key = self.max_new_tokens_key
        return (
            f"{prompt.prompt_id}: the prompt has {length} tokens; with {key} = {self.max_new_tokens} that is "
            f"{length + self.max_new_tokens}, more than the model's context of {self.context_length}. Shorten the "
            f"prompt or lower {key}"
        )


class PromptDataset:
    """Rows as tokenized prompts; epoch e is a reshuffle by ``(seed, e)``, so that a cursor is one integer.

    With weights each source has epochs of its own, and the position in the stream gives the source (``SourceMix``).
    Without a seed the rows keep their order (for evaluation). ``are_tasks`` makes tasks of an agent, with messages.

    Each prompt is made anew when it is asked for. ``num_dropped`` and ``num_truncated`` rows were too long; the longest
    prompt that is there has ``longest`` tokens.
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
        limits = _LengthLimits(max_prompt_tokens, max_new_tokens, context_length, overlong, max_new_tokens_key)
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
                prompt = (_to_task if are_tasks else _to_prompt)(row, tokenizer, chat)
                fitting = limits.fit(prompt)
                if fitting is None:
                    self.num_dropped += 1
                    continue
                self.num_truncated += fitting is not prompt
                self.longest = max(self.longest, len(fitting.token_ids))
                if weights and fitting.limits is not None:
                    self.sizes[fitting.limits.source] += 1
                # Not the name of the file: a renamed file is the same stream.
                digest.update(f"{fitting.token_ids} {fitting.label}\n".encode())
                yield fitting

        try:
            self._prompts = PackedList(iter_prompts())
        except pickle.PicklingError as error:
            raise DataError(
                f"{location}: the row holds an object that cannot be sent to the other ranks: {error}. Write it as "
                "text or as numbers, or leave its column out"
            ) from error
        self._digest = digest.hexdigest()[:12]
        self._check_left(len(rows), limits.longest)
        self.mix = SourceMix(list(weights.values())) if weights else None
        """Shares of the sources ``sizes``. None without weights."""

    def _check_left(self, num_rows: int, longest: int) -> None:
        """Check that a prompt is left, and one of each source with a weight."""
        if not len(self):
            raise DataError(
                f"all {num_rows} prompts are longer than {longest} tokens and data.overlong_prompts = 'drop' leaves "
                "none; raise data.max_prompt_tokens"
            )
        if empty := [name for name, size in self.sizes.items() if not size]:
            raise DataError(
                f'data.sources."{empty[0]}" has a weight, but no prompt of this source is left: all its rows are too '
                "long, or repeat rows of earlier sources. Fix: remove the source from data.train, or see "
                "data.overlong_prompts and data.deduplicate"
            )

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


def _to_task(row: DataRow, tokenizer: Tokenizer, chat: ChatOptions) -> Prompt:
    messages = row.prompt
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
        # The variables of the template are for the agent's calls, which a task in plain text has to become.
        chat = replace(chat, template_kwargs={})
    prompt = _to_prompt(row, tokenizer, chat, writes_tools=False)
    if not isinstance(row.prompt, str) and row.prompt[-1]["role"] == "assistant":
        raise DataError(
            f"{row.location}: the messages end with an assistant message, which an agent cannot continue; remove it"
        )
    return replace(prompt, messages=tuple(messages), is_task=True)


def _to_prompt(row: DataRow, tokenizer: Tokenizer, chat: ChatOptions, *, writes_tools: bool = True) -> Prompt:
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
