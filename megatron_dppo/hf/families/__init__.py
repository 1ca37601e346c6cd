"""Model families: how config.json and weights of each map to Megatron Core. One file per family."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from megatron_dppo.config.layout import ModelShape
from megatron_dppo.errors import CheckpointError
from megatron_dppo.hf.families.family import Family, Rope

_MODULES = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
FAMILIES: Mapping[str, Family] = {
    family.model_type: family for module in _MODULES for family in getattr(module, "FAMILIES", ())
}
"""Families by ``model_type`` of config.json."""
ALIASES: Mapping[str, str] = {alias: name for name, family in FAMILIES.items() for alias in family.aliases}
"""``model_type`` of config.json that transformers does not know -> that of its family."""


def get_family(model: Any) -> Family:
    """Return the family of a transformers configuration, or of a ``ModelShape``.

    Raises:
        CheckpointError: The architecture has no mapping to Megatron.
    """
    model_type = model.family if isinstance(model, ModelShape) else model.model_type
    if model_type not in FAMILIES:
        raise CheckpointError(
            f"model_type {model_type!r} has no mapping to Megatron; expected one of {', '.join(FAMILIES)}. "
            "docs/models.md lists their models"
        )
    return FAMILIES[model_type]


__all__ = ["ALIASES", "FAMILIES", "Family", "Rope", "get_family"]
