"""The keys of the configuration as its own models describe them: for documents, for ``help``, for hints."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterator, Mapping
from difflib import SequenceMatcher, get_close_matches
from typing import Any

from pydantic.fields import FieldInfo

from megatron_dppo.config.foreign_keys import FOREIGN_KEY_NAMES
from megatron_dppo.config.layout import Layout
from megatron_dppo.config.loss_aliases import LOSS_ALIASES
from megatron_dppo.config.removed import removed_key_hint
from megatron_dppo.config.schema import Config
from megatron_dppo.config.section import Section
from megatron_dppo.errors import ConfigError

_SIGNS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}


def type_name(annotation: Any) -> str:
    """A short name of a field's type."""
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
    """The limits of a number, as ``> 0, ≤ 1``; empty without any."""
    found = ((key, getattr(limit, key)) for limit in field.metadata for key in _SIGNS if hasattr(limit, key))
    return ", ".join(f"{_SIGNS[key]} {value}" for key, value in found)


def is_section(kind: Any) -> bool:
    """Whether a type is that of a section."""
    return isinstance(kind, type) and issubclass(kind, Section)


def sections(model: type[Section] = Config, name: str = "") -> Iterator[tuple[str, type[Section]]]:
    """``(rollout.servers, ServersConfig)`` of every section, those in others after them; the whole has the name ""."""
    yield name, model
    for key, field in model.known_fields().items():
        below = f"{name}.{key}" if name else key
        if is_section(field.annotation):
            yield from sections(typing.cast(type[Section], field.annotation), below)
        elif (inner := typing.get_args(field.annotation)[1:]) and is_section(inner[0]):
            yield from sections(inner[0], f"{below}.NAME")


def keys() -> dict[str, FieldInfo]:
    """``loss.name`` -> its field, of every key that is no section."""
    return {
        f"{name}.{key}": field
        for name, model in sections()
        for key, field in model.known_fields().items()
        if not is_section(field.annotation)
    }


def explain(name: str) -> str:
    """What is known of a key, a section, a flag of Megatron's, a loss or a name from another framework.

    Example:
        >>> print(explain("optimizer.clip_grad"))
        optimizer.clip_grad  float (≥ 0), default 1.0
            Global gradient norm limit; 0 = no clipping.

    Raises:
        ConfigError: nothing is called so; with what is close to it.
    """
    wanted = name.strip("-[]").replace("-", "_")
    found = keys()
    models = dict(sections())
    if wanted in found:
        return _entry(wanted, found[wanted])
    if removed := removed_key_hint(wanted):
        return f"{wanted}: {removed}"
    if wanted in models and wanted:
        inside = [_entry(f"{wanted}.{key}", f) for key, f in models[wanted].known_fields().items()]
        return "\n".join([f"[{wanted}]  {_prose(models[wanted].__doc__ or '')}", "", *inside])
    if name in LOSS_ALIASES:
        stands = ", ".join(f"{key} = {value!r}" for key, value in LOSS_ALIASES[name].items())
        return f"loss.name = {name!r} is an alias of: {stands}"
    ends = [path for path in found if path.rpartition(".")[2] == wanted]
    if ends:
        return "\n".join(_entry(path, found[path]) for path in ends)
    if wanted in FOREIGN_KEY_NAMES:
        path = FOREIGN_KEY_NAMES[wanted]
        return f"{wanted} elsewhere is here:\n{_entry(path, found[path])}"
    raise ConfigError(
        f"no key, section or loss is called {name!r}{closest_hint(wanted) or '; docs/configuration.md has them'}"
    )


def exact_hint(name: str) -> str:
    """``; did you mean 'optimizer.lr'?`` for a name that another framework, or another section here, has exactly; of
    several sections those that are most alike come first."""
    leaf = _leaf(name)
    exact = (
        [FOREIGN_KEY_NAMES[leaf]] if leaf in FOREIGN_KEY_NAMES else [path for path in _paths() if _leaf(path) == leaf]
    )
    exact.sort(key=lambda path: -SequenceMatcher(None, name, path).ratio())
    return f"; did you mean {' or '.join(map(repr, exact[:3]))}?" if exact else ""


def closest_hint(name: str) -> str:
    """The same for a name that is only like one of them; empty when nothing is."""
    if hint := exact_hint(name):
        return hint
    # The section alone may be most of the name: the key in it has to be like the other one too.
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
    default = "required" if field.is_required() else f"default {field.get_default(call_default_factory=True)!r}"
    within = limits(field)
    kind = type_name(field.annotation).replace("`", "") + (f" ({within})" if within else "")
    text = _prose(field.description or "")
    return f"{path}  {kind}, {default}" + (f"\n    {text}" if text else "")


def _prose(text: str) -> str:
    return " ".join(text.partition("\n\n    Example:")[0].replace("``", "").split())


_RUN: Mapping[str, Callable[[Config, Layout], Any]] = {
    "parallel.expert_tensor_parallel_size": lambda config, layout: layout.etp,
    "parallel.sequence_parallel": lambda config, layout: layout.sequence_parallel,
    "parallel.overlap_p2p_comm": lambda config, layout: layout.overlap_p2p_comm,
    "eval.max_new_tokens": lambda config, layout: config.eval_max_new_tokens,
    "eval.beside_training": lambda config, layout: config.evaluates_beside_training,
    "run.hang_minutes": lambda config, layout: 0.9 * config.run.timeout_minutes,
}


def resolved_defaults(config: Config, layout: Layout) -> dict[str, Any]:
    """Key -> the value in force, of each key that is not set and that has an effect in this run.

    Example: ``{"loss.divergence_threshold_low": 0.15, "parallel.sequence_parallel": False}`` and more for
    DPPO-Binary-TV on one process.
    """
    idle = config.loss.unused_keys()
    found = {
        f"loss.{key}": value
        for key, value in config.loss.resolved_defaults().items()
        if key not in idle and getattr(config.loss, key) is None
    }
    for path, rule in _RUN.items():
        section, _, key = path.partition(".")
        if getattr(getattr(config, section), key) is None:
            found[path] = rule(config, layout)
    return found
