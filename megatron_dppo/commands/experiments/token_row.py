"""What the row of a token experiment must hold, by its measurement."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated

from pydantic import Field, model_validator

from megatron_dppo.commands.experiments.row import Part
from megatron_dppo.commands.experiments.tokens import EDGES

_PER_BIN = Field(min_length=len(EDGES) - 1, max_length=len(EDGES) - 1)


class _Bin(Part):
    low: float
    high: float
    tokens: int = Field(ge=0)
    tv: float | None
    ratio: Annotated[list[float], Field(min_length=3, max_length=3)] | None

    @model_validator(mode="after")
    def _is_known_where_tokens_are(self) -> _Bin:
        if self.tokens and (self.tv is None or self.ratio is None):
            raise ValueError(f"{self.tokens} tokens without tv or ratio")
        return self


class _Measured(Part):
    bins: Annotated[list[_Bin], _PER_BIN]

    @model_validator(mode="after")
    def _has_the_bins_of_this_version(self) -> _Measured:
        edges = list(pairwise(EDGES))
        if [(each.low, each.high) for each in self.bins] != edges:
            raise ValueError(f"the bins have other edges than {EDGES}")
        return self


class _RatioTv(_Measured):
    tokens: int = Field(ge=0)


class _Word(Part):
    word: str
    masked: int = Field(ge=0)
    mean_mu: float


class _Rule(Part):
    share: float | None
    bins: Annotated[list[float | None], _PER_BIN]
    words: list[_Word]


class _MostClipped(_Measured):
    grpo: _Rule
    dppo_binary_tv: _Rule
    dppo_binary_kl: _Rule


MEASURED: Mapping[str, type[_Measured]] = {"ratio_tv": _RatioTv, "most_clipped": _MostClipped}
"""Name of ``tokens.MEASUREMENTS`` -> what it finds."""
