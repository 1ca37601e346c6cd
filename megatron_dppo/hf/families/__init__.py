"""Model families: how config.json and weights of each map to Megatron Core. One file per family."""

# mypy: implicit-reexport

from collections.abc import Collection, Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import get_args

from megatron_dppo.config.layout import ModelShape
from megatron_dppo.config.model import LoraTarget
from megatron_dppo.errors import CheckpointError, ConfigError
from megatron_dppo.hf.families.bridged import BRIDGED, MARK
from megatron_dppo.hf.families.family import Family, Rope  # noqa: F401
from megatron_dppo.types.model_folder import HfConfig

_MODULES = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
FAMILIES: Mapping[str, Family] = {
    family.model_type: family for module in _MODULES for family in getattr(module, "FAMILIES", ())
}
ALIASES: Mapping[str, str] = {alias: name for name, family in FAMILIES.items() for alias in family.aliases}
"""``model_type`` of config.json that transformers does not know -> that of its family."""


def get_family(model: HfConfig | ModelShape) -> Family:
    """Return the family of a transformers configuration, or of a ``ModelShape``."""
    model_type = model.family if isinstance(model, ModelShape) else model.model_type
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    if getattr(model, MARK, False):
        return BRIDGED
    raise CheckpointError(
        f"model_type {model_type!r} has no mapping to Megatron; expected one of {', '.join(FAMILIES)}. "
        "docs/models.md lists their models. On GPUs model.provider = 'megatron-bridge' has more"
    )


def mark_bridged(hf_config: HfConfig) -> HfConfig:
    """Let Megatron Bridge build the model of a transformers configuration that has no family here; returns it."""
    setattr(hf_config, MARK, True)
    return hf_config


def adapter_modules(shape: ModelShape) -> tuple[str, ...]:
    """Return the modules of a model that can be in ``lora.target_modules``."""
    family = get_family(shape)
    num_dense = shape.num_layers if shape.num_experts is None else len(shape.dense_layers)
    rules = (
        family.attention(shape) * (len(shape.linear_layers) < shape.num_layers)
        + family.linear(shape) * (len(shape.linear_layers) > 0)
        + family.dense * (num_dense > 0)
        + family.experts * (num_dense < shape.num_layers)
    )
    modules = {name.split(".")[-2] for rule in rules for name in rule.hf}
    return tuple(module for module in get_args(LoraTarget) if module in modules)


def check_adapter_targets(targets: Collection[str], shape: ModelShape) -> None:
    """Check that the model has every target module."""
    modules = adapter_modules(shape)
    missing = [name for name in targets if name not in modules]
    if missing:
        raise ConfigError(
            f"lora.target_modules: no layer of this {shape.family} model has {', '.join(missing)}. Fix: list some of "
            f"{', '.join(modules)}"
        )
