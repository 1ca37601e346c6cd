"""The base class of every section of the configuration."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from megatron_dppo.config.plausible import check_plausible

DType = Literal["fp32", "bf16", "fp16"]
ContainerTool = Literal["podman", "docker", "apptainer"]
TomlTable = dict[str, Any]


class Section(BaseModel):
    """A frozen table of keys. An unknown key, a value of another type, or a non-finite number is an error."""

    # Strict, because a flag without its value parses as true, and lax mode would convert that to the number 1.
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    @field_validator("*")
    @classmethod
    def _is_plausible(cls, value: Any, info: ValidationInfo) -> Any:
        check_plausible(info.field_name or "", value)
        return value

    def changed_keys(self) -> list[str]:
        """Return the keys whose values differ from their defaults, in the order of the section."""
        return [
            name
            for name, field in type(self).model_fields.items()
            if getattr(self, name) != field.get_default(call_default_factory=True)
        ]

    @classmethod
    def known_fields(cls) -> Mapping[str, FieldInfo]:
        """Return every key that the section may have; a section with variants has the keys of all."""
        return cls.model_fields
