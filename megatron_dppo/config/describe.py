"""Descriptions of the configuration's keys, for the documentation, for ``help`` and for hints."""

import types
import typing
from collections.abc import Iterator
from difflib import SequenceMatcher, get_close_matches
from typing import TypeGuard

from pydantic.fields import FieldInfo

from megatron_dppo.config.foreign_keys import FOREIGN_KEY_NAMES, FOREIGN_KEY_NOTES
from megatron_dppo.config.loss_aliases import ALIAS_VERSIONS, LOSS_ALIASES
from megatron_dppo.config.schema import Config
from megatron_dppo.config.section import Section
from megatron_dppo.errors import ConfigError

_SIGNS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}


def type_name(annotation: object) -> str:
    """Return a short name of a field's type."""
    if typing.get_origin(annotation) is typing.Literal:
        return " or ".join(f"`{value}`" for value in typing.get_args(annotation))
    if typing.get_origin(annotation) is typing.Annotated:
        return type_name(typing.get_args(annotation)[0])
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        parts = [type_name(part) for part in typing.get_args(annotation) if part is not type(None)]
        return ", ".join(parts)
    if typing.get_origin(annotation) is dict:
        return "table"
    return getattr(annotation, "__name__", str(annotation))


def limits(field: FieldInfo) -> str:
    """Return the limits of a number such as ``> 0, ≤ 1``; empty if there are none."""
    bounds = ((key, getattr(limit, key)) for limit in field.metadata for key in _SIGNS if hasattr(limit, key))
    return ", ".join(f"{_SIGNS[key]} {value}" for key, value in bounds)


def toml_value(value: object) -> str:
    """Return a default as a TOML file would write it; ``null`` for None, as on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml_value(part) for part in value) + "]"
    return str(value)


def is_section(kind: object) -> TypeGuard[type[Section]]:
    """Return True if a type is a section."""
    return isinstance(kind, type) and issubclass(kind, Section)


def sections(model: type[Section] = Config, name: str = "") -> Iterator[tuple[str, type[Section]]]:
    """Yield path, such as ``rollout.servers``, and model of each section; the path of the configuration is empty."""
    yield name, model
    for key, field in model.known_fields().items():
        below = f"{name}.{key}" if name else key
        if is_section(field.annotation):
            yield from sections(field.annotation, below)
        # dict[str, Section]: a table of named sections, such as [reward.functions.NAME].
        elif (inner := typing.get_args(field.annotation)[1:]) and is_section(inner[0]):
            yield from sections(inner[0], f"{below}.NAME")


def keys() -> dict[str, FieldInfo]:
    """Return the field of each key that is not a section, by its path such as ``loss.name``."""
    return {
        f"{name}.{key}": field
        for name, model in sections()
        for key, field in model.known_fields().items()
        if not is_section(field.annotation)
    }


_MAX_LINES = 30
"""Lines of a description that is not verbose."""


def explain(name: str, *, verbose: bool = True) -> str:
    """Return the description of a key, a section, a Megatron flag, a loss or another framework's name.

    Without ``verbose`` a section that needs more than 30 lines has one line for each key, without its description.

    Example:
        >>> print(explain("optimizer.clip_grad"))
        optimizer.clip_grad  float (≥ 0), default 1.0
            Maximum global gradient norm. 0 disables clipping.
    """
    # Accept a flag (--clip-grad), a section in brackets ([loss]) and a plain path.
    wanted = name.strip("-[]").replace("-", "_")
    fields = keys()
    models = dict(sections())
    if wanted in fields:
        return _entry(wanted, fields[wanted])
    if wanted in models and wanted:
        inside = [_entry(f"{wanted}.{key}", f) for key, f in models[wanted].known_fields().items()]
        text = "\n".join([f"[{wanted}]  {_prose(models[wanted].__doc__ or '')}", "", *inside])
        return text if verbose or text.count("\n") < _MAX_LINES else _shortened(text, inside)
    if name in LOSS_ALIASES:
        expansion = ", ".join(f"{key} = {value!r}" for key, value in LOSS_ALIASES[name].items())
        version = ALIAS_VERSIONS.get(name.partition("/")[0])
        described = "" if version is None else f" (the framework's version: {version})"
        return f"loss.name = {name!r} is an alias of: {expansion}{described}"
    # A key without its section may exist in several sections: describe all of them.
    paths = [path for path in fields if path.rpartition(".")[2] == wanted]
    if paths:
        return "\n".join(_entry(path, fields[path]) for path in paths)
    if wanted in FOREIGN_KEY_NAMES:
        path = FOREIGN_KEY_NAMES[wanted]
        note = FOREIGN_KEY_NOTES.get(wanted)
        return f"{wanted} of another framework is here{f' ({note})' if note else ''}:\n{_entry(path, fields[path])}"
    hint = closest_hint(wanted) or "; docs/configuration.md lists all keys"
    raise ConfigError(f"no key, section or loss is called {name!r}{hint}")


def _shortened(text: str, entries: list[str]) -> str:
    """Return the description of a section with the first line of each entry, as far as they fit."""
    names = [entry.partition("\n")[0] for entry in entries]
    shown = names[: _MAX_LINES - 3]
    more = [f"... and {len(names) - len(shown)} more keys"] if len(shown) < len(names) else []
    return "\n".join([text.partition("\n")[0], "", *shown, "; ".join([*more, "--verbose describes every key"])])


def exact_hint(name: str) -> str:
    """Return ``; did you mean 'optimizer.lr'?`` for a name that exists exactly elsewhere, otherwise "".

    Another framework or another section may have the name. Of several sections, the most similar ones come first.
    """
    leaf = _leaf(name)
    if leaf in FOREIGN_KEY_NAMES:
        exact = [FOREIGN_KEY_NAMES[leaf]]
    else:
        exact = [path for path in _paths() if _leaf(path) == leaf]
    exact.sort(key=lambda path: -SequenceMatcher(None, name, path).ratio())
    return f"; did you mean {' or '.join(map(repr, exact[:3]))}?" if exact else ""


def closest_hint(name: str) -> str:
    """Return the hint of ``exact_hint``, or one for the most similar name; "" if nothing is similar."""
    if hint := exact_hint(name):
        return hint
    # Compare the last parts too, because a long section name alone would make two paths similar.
    alike = [path for path in _paths() if get_close_matches(_leaf(name), [_leaf(path)], 1)]
    if close := get_close_matches(name, alike, 1, 0.8):
        return f"; did you mean {close[0]!r}?"
    leaves = {_leaf(path): path for path in reversed(_paths())} | dict(FOREIGN_KEY_NAMES)
    if close := get_close_matches(_leaf(name), list(leaves), 1, 0.8):
        return f"; did you mean {leaves[close[0]]!r}?"
    losses = get_close_matches(name, list(LOSS_ALIASES), 1, 0.7)
    return f"; did you mean the loss {losses[0]!r}?" if losses else ""


def _leaf(path: str) -> str:
    return path.rpartition(".")[2]


def _paths() -> list[str]:
    return [*keys(), *(name for name, _ in sections() if name)]


def _entry(path: str, field: FieldInfo) -> str:
    if is_section(field.annotation):
        return f"[{path}]"
    default = (
        "required" if field.is_required() else f"default {toml_value(field.get_default(call_default_factory=True))}"
    )
    within = limits(field)
    kind = type_name(field.annotation).replace("`", "") + (f" ({within})" if within else "")
    text = _prose(field.description or "")
    return f"{path}  {kind}, {default}" + (f"\n    {text}" if text else "")


def _prose(text: str) -> str:
    return " ".join(text.partition("\n\n    Example:")[0].replace("``", "").split())
