"""What every section of the configuration has in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo

DType = Literal["fp32", "bf16", "fp16"]


class Section(BaseModel):
    """A frozen table of keys; an unknown key, a value of another type and a non-finite number are errors."""

    # Strict: a flag whose value was forgotten reads as true, which lax mode takes for the number 1.
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    def changed_keys(self) -> list[str]:
        """The keys whose values are not their defaults, in the order of the section."""
        fields = type(self).model_fields.items()
        return [name for name, f in fields if getattr(self, name) != f.get_default(call_default_factory=True)]

    @classmethod
    def known_fields(cls) -> Mapping[str, FieldInfo]:
        """Return every key that the section may have; a section with variants has those of all."""
        return cls.model_fields
