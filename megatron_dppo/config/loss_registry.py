"""The registry of built-in losses: each file of ``megatron_dppo/losses`` declares its own.

This package never imports torch. The loss files do not import it either when they are loaded: the functions of
``megatron_dppo.losses`` that they compute with import torch at their first call.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, TypeGuard, get_args

from megatron_dppo.config.loss_aliases import LOSS_ALIASES, expand_alias
from megatron_dppo.config.section import Section
from megatron_dppo.config.user_functions import may_execute, reload_if_changed
from megatron_dppo.errors import FunctionError
from megatron_dppo.functions import is_function_name

DEFAULT_LOSS = "dppo_binary_tv"
_PACKAGE = "megatron_dppo.losses"
_NAME = re.compile(r"^    name: Literal\[", re.MULTILINE)
"""Line that makes a class a built-in loss, and its file one that does not import torch."""


@cache
def loss_classes() -> Mapping[str, type[Section]]:
    """Return the class of each ``loss.name``, with its keys and its rule; DPPO first."""
    classes = {name: kind for kind in _classes() for name in get_args(kind.model_fields["name"].annotation)}
    # Sorting is stable: DPPO first, then the order of the files.
    return dict(sorted(classes.items(), key=lambda item: not item[0].startswith("dppo_")))


def loss_names() -> tuple[str, ...]:
    """Return the names of all built-in losses."""
    return tuple(loss_classes())


@cache
def user_loss_class() -> type[Section]:
    """Return the class for a loss that is a plain user function."""
    kind: type[Section] = import_module(f"{_PACKAGE}.user_loss").UserLoss
    return kind


def is_loss_name(name: object) -> TypeGuard[str]:
    """Return True for the name of a built-in loss, or the path of a user's function or class."""
    return isinstance(name, str) and (name in loss_classes() or is_function_name(name))


def unknown_loss_message(name: str) -> str:
    """Return the error text for an unknown loss, with the closest known name."""
    close = get_close_matches(name, [*loss_names(), *LOSS_ALIASES], 1)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    return (
        f"unknown loss{hint} Expected one of {', '.join(loss_names())}, an alias (docs/loss_details.md), or "
        "'path/to/file.py:function'"
    )


def loss_class_for(values: Mapping[str, object]) -> type[Section]:
    """Return the class that ``name`` selects; for an unknown name that of the default loss, which rejects it."""
    name = expand_alias(dict(values)).get("name", DEFAULT_LOSS)
    if not is_loss_name(name):
        return loss_classes()[DEFAULT_LOSS]
    if not is_function_name(name):
        return loss_classes()[name]
    if not may_execute():
        text_class: type[Section] = import_module(f"{_PACKAGE}.user_loss").TextLoss
        return text_class
    # A user's loss: either a class with keys of its own, or a plain function with the keys of UserLoss.
    try:
        value: Any = reload_if_changed(name, "loss.name").function
    except FunctionError:
        # The function cannot be loaded. This class reports that when it is validated.
        return user_loss_class()
    return value if isinstance(value, type) and hasattr(value, "required_inputs") else user_loss_class()


def drop_keys_of_other_losses(kind: type[Section], values: Mapping[str, object]) -> dict[str, Any]:
    """Return the keys without those of other losses that have their default.

    Recorded configurations of earlier versions have every key of every loss in one table.
    """
    return {key: value for key, value in values.items() if not _is_unset_key_of_another_loss(kind, key, value, values)}


def _is_unset_key_of_another_loss(kind: type[Section], key: str, value: object, values: Mapping[str, object]) -> bool:
    owners = [name for name, each in loss_classes().items() if key in each.model_fields]
    if key in user_loss_class().model_fields and not owners:
        owners = ["a user function in loss.name"]
    if key in kind.model_fields or not owners:
        # A key of this loss, or an unknown key, which pydantic rejects.
        return False
    owner = loss_classes().get(owners[0], user_loss_class())
    if value is None or value == owner.model_fields[key].get_default(call_default_factory=True):
        return True
    name = values.get("name", DEFAULT_LOSS)
    raise ValueError(f"{key} = {value} has no effect on the loss {name!r}; remove it or use {_join_names(owners)}")


def _join_names(names: Sequence[str]) -> str:
    if len(names) > 6:  # Almost every loss has the key, so a full list helps nobody.
        return f"{', '.join(names[:6])} or another loss that has it (docs/losses/README.md)"
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _classes() -> Iterator[type[Section]]:
    """Yield the classes whose ``name`` is a literal: ``name: Literal["grpo"]``."""
    folder = import_module(_PACKAGE)
    for file in sorted(Path(folder.__path__[0]).glob("*.py")):
        # The other files hold what losses share, and import torch.
        if _NAME.search(file.read_text(encoding="utf-8")):
            module = import_module(f"{_PACKAGE}.{file.stem}")
            yield from (value for value in vars(module).values() if _is_loss(value, module.__name__))


def _is_loss(value: object, module: str) -> bool:
    is_here = isinstance(value, type) and value.__module__ == module
    return is_here and hasattr(value, "model_fields") and bool(get_args(value.model_fields["name"].annotation))
