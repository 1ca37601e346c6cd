"""Model families: how config.json and weights of each map to Megatron Core. One file per family."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from megatron_dppo.config.layout import ModelShape
from megatron_dppo.errors import CheckpointError
from megatron_dppo.hf.families.bridged import BRIDGED, MARK
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
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    if getattr(model, MARK, False):
        return BRIDGED
    raise CheckpointError(
        f"model_type {model_type!r} has no mapping to Megatron; expected one of {', '.join(FAMILIES)}. "
        "docs/models.md lists their models. On GPUs model.provider = 'megatron-bridge' has more"
    )


def mark_bridged(hf_config: Any) -> Any:
    """Let Megatron Bridge build the model of a transformers configuration that has no family here; returns it."""
    setattr(hf_config, MARK, True)
    return hf_config


__all__ = ["ALIASES", "FAMILIES", "Family", "Rope", "get_family", "mark_bridged"]
