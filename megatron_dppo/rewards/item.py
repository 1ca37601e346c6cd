"""Inputs and outputs of rewards: items, results, shaping, and checked reads of what a function returns."""

import inspect
import math
import reprlib
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from megatron_dppo_answers.math import is_well_formed

_LIBRARY_FOLDERS = (Path(__file__).parents[1], *map(Path, {sysconfig.get_path(name) for name in ("stdlib", "purelib")}))
"""Folders whose code is not the user's."""


@dataclass(frozen=True, kw_only=True)
class RewardItem:
    """One completion with everything that a reward function of any signature may need."""

    prompt: str
    """Prompt as the model saw it, after the chat template."""
    completion: str
    """Response without special tokens."""
    label: str
    """Reference answer."""
    metadata: Mapping[str, object] = field(default_factory=dict)
    """Other columns of the data row, and ``finish_reason`` (``stop`` or ``length``)."""
    source: str = ""
    """Name of the row's source, as in ``[data.sources]``."""
    token_ids: Sequence[int] = ()
    """Tokens of the response, including the end-of-sequence token. Shape [R]."""
    messages: Sequence[Mapping[str, object]] | None = None
    """Chat messages of the prompt. None if the row has a plain string."""
    max_new_tokens: int | None = None
    """Limit of the response in tokens, if its source has one. None: that of the run."""

    @property
    def truncated(self) -> bool:
        """True if the response was truncated at its maximum length."""
        return self.metadata.get("finish_reason") == "length"


@dataclass(frozen=True, kw_only=True)
class RewardResult:
    """A reward, or the error that prevented it."""

    reward: float
    """Value for training: the score with its shaping."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """``score`` (without shaping), the function's own parts, and the parts of the shaping. Empty for an unshaped plain
    number."""
    failed: bool = False
    """True if there is no reward; ``error`` has the reason."""
    error: str = ""
    is_wrong_type: bool = False
    """True if a function returned what is no reward, or cannot be called so, whatever the answer is."""
    eval_score: float | None = None
    """Score for evaluation if one of several functions is marked for it. None uses the unshaped score."""


def soft_overlong_penalty(length: int, longest: int, buffer: int) -> float:
    """Return DAPO's soft overlong punishment, from 0 to -1 (arXiv 2503.14476, equation 13).

    ``longest`` is L_max; over the last ``buffer`` tokens before it, L_cache, the punishment grows linearly.
    """
    return min(0.0, max(-1.0, (longest - buffer - length) / buffer))


@dataclass(frozen=True, kw_only=True)
class Shaping:
    """Shaping of ``[reward]``. Each enabled part is logged under its name."""

    max_new_tokens: int = 0
    format: float = 0.0
    overlong_buffer_tokens: int = 0
    overlong_penalty: float = 1.0

    def parts(self, item: RewardItem) -> dict[str, float]:
        """Return the addends for one response by name; empty if all shaping is disabled."""
        result = {}
        if self.format:
            has_format = not item.truncated and is_well_formed(item.completion)
            result["format"] = self.format if has_format else 0.0
        if self.overlong_buffer_tokens:
            longest = item.max_new_tokens or self.max_new_tokens
            fraction = soft_overlong_penalty(len(item.token_ids), longest, self.overlong_buffer_tokens)
            result["overlong"] = self.overlong_penalty * fraction
        return result


class SlimeArgs:
    """First argument of slime's functions, with the values that exist here."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"args.{name} does not exist here; available in this run: {sorted(self.__dict__)}")


@dataclass
class SlimeSample:
    """Fields of slime's ``Sample`` (slime/utils/types.py) that a reward function reads."""

    class Status(Enum):
        """Reason for the end of the response."""

        COMPLETED = "completed"
        TRUNCATED = "truncated"

    prompt: str
    response: str
    label: str
    metadata: dict[str, object]
    response_length: int
    """Length in tokens."""
    status: Status


_SCORES = ("score", "reward")
MAX_REWARD = 1e30
"""Largest reward. Advantages are float32, and sums over groups and tokens of larger ones may be infinite."""
_MAX_ERROR_LENGTH = 2000
MAX_PARTS = 256
"""Named parts of one reward, and of all rewards of a step: each is a metric of every step."""


def read_reward(value: object) -> tuple[float, dict[str, float]]:
    """Return the score and the named parts (none for a plain number).

    Parts that are not numbers are dropped: verl's functions also return the extracted answer.

    Raises:
        TypeError: The value is no number, or a table without exactly one of ``score`` and ``reward``.
        ValueError: The number is not finite, or beyond ``MAX_REWARD``.
    """
    if not isinstance(value, Mapping):
        return _finite("the reward", value), {}
    present = [key for key in _SCORES if key in value]
    if len(present) != 1:
        raise TypeError(
            f"expected exactly one of 'score' and 'reward' in a reward table, got {sorted(map(_name, value))}"
        )
    parts = {
        _name(name): _finite(f"the part {name!r}", part)
        for name, part in value.items()
        if name not in _SCORES and _is_number(part)
    }
    if len(parts) > MAX_PARTS:
        raise ValueError(f"expected a reward table with at most {MAX_PARTS} parts that are numbers, got {len(parts)}")
    return _finite(f"the {present[0]}", value[present[0]]), parts


def read_batch(values: object, count: int) -> list[object]:
    """Return the values of a batch, one per sample; a TypeError or ValueError if it is no list of this length."""
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise TypeError(f"expected a list of rewards from a batch function, got {short_repr(values)}")
    result = list(islice(values, count + 1))  # The iterator may be endless.
    if len(result) != count:
        more = "more than " if len(result) > count else ""
        raise ValueError(
            f"expected {count} rewards for a batch of {count} samples, got {more}{min(len(result), count)}"
        )
    return result


def error_text(error: BaseException, function: Callable[..., object] | None = None) -> str:
    """Return an error as short text with the line that raised it, even if its own methods raise.

    Without such a line of the user, that of ``function`` is named: the user function whose result is wrong.
    """
    try:
        text = f"{type(error).__name__}: {error}"
    except BaseException:
        text = f"{type(error).__name__} (its text cannot be read)"
    line = _user_line(error) or _defining_line(function)
    return _plain(text)[: _MAX_ERROR_LENGTH - len(line)] + line


def _user_line(error: BaseException) -> str:
    """Return the innermost line of an error outside this package and installed ones, such as `` (at my.py:12)``."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if _is_of_user(frame.f_code.co_filename):
            return f" (at {Path(frame.f_code.co_filename)}:{line})"
    return ""


def _defining_line(function: Callable[..., object] | None) -> str:
    """Return where a function of the user is defined, such as `` (returned by score, my.py:12)``; empty if unknown."""
    try:
        while isinstance(function, partial):
            function = function.func
        inner = inspect.unwrap(function) if function is not None else None
        code = getattr(inner, "__code__", None) or getattr(type(inner).__call__, "__code__", None)
    except BaseException:  # Attributes of the user's object may raise.
        return ""
    if code is None or not _is_of_user(code.co_filename):
        return ""
    return f" (returned by {code.co_name}, {code.co_filename}:{code.co_firstlineno})"


def _is_of_user(filename: str) -> bool:
    file = Path(filename)
    return file.is_file() and not any(file.is_relative_to(folder) for folder in _LIBRARY_FOLDERS)


def short_repr(value: object) -> str:
    """Return a short ``repr``, even if the object's own raises."""
    try:
        return _plain(reprlib.repr(value))
    except BaseException:
        return f"a {type(value).__name__}"


def _name(value: Any) -> str:
    return _plain(str(value))


def _plain(text: str) -> str:
    """Return text of the built-in type, without characters that UTF-8 cannot encode."""
    return str.encode(text, "utf-8", "replace").decode()


def _is_number(value: Any) -> bool:
    if value is None or isinstance(value, str | bytes | bytearray | Mapping | list | tuple):
        return False
    try:
        float(value)
    except OverflowError:  # A number, but too large for a float.
        return True
    except (TypeError, ValueError):
        return False
    return True


def _finite(what: str, value: Any) -> float:
    # float() would parse a string, and would drop the imaginary part of a NumPy value.
    is_complex = isinstance(value, complex) or getattr(getattr(value, "dtype", None), "kind", "") == "c"
    if value is None or is_complex or isinstance(value, str | bytes | bytearray):
        raise TypeError(f"{what} must be a number, got {short_repr(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    # An array or a tensor of several numbers raises any of these.
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{what} must be a number, got {short_repr(value)}") from error
    if not math.isfinite(number):
        raise ValueError(f"{what} must be a finite number, got {short_repr(value)}")
    if abs(number) > MAX_REWARD:
        raise ValueError(f"{what} must be between {-MAX_REWARD:g} and {MAX_REWARD:g}, got {number:g}")
    return number
