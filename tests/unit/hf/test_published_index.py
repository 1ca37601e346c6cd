"""Weight names against those of folders that people uploaded, and not against rules that are written by hand."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from megatron_dppo.hf.folder import model_shape, weight_shapes
from megatron_dppo.hf.published_names import LANGUAGE_MODEL, published_name, stored_weights
from megatron_dppo.mcore import mapping

MXFP4 = "gpt-oss-20b"
"""The folder whose experts are joined, and stored in blocks."""
FOLDERS: dict[str, Any] = json.loads((Path(__file__).parents[2] / "data/published_names.json").read_text())["folders"]


def patterns(names: list[str]) -> dict[str, int]:
    """Return the number of times that each name occurs, with layer and expert as N."""
    return Counter(re.sub(r"\.\d+(?=\.)", ".N", name) for name in names)


@pytest.mark.parametrize("folder", [name for name in FOLDERS if name != MXFP4])
def test_names_are_those_of_an_uploaded_index_file(folder: str) -> None:
    stored = FOLDERS[folder]["names"]
    hf_config = AutoConfig.for_model(**FOLDERS[folder]["config"])
    shape = model_shape(hf_config)
    mapped = [name for rule, *place in mapping.parameters(shape, tied=False) for name in rule.names(*place)[1]]
    for names in (mapped, list(weight_shapes(hf_config))):
        if any(name.startswith(LANGUAGE_MODEL) for name in stored):
            names = list(map(published_name, names))
        assert patterns(names) == stored


class Header:
    """Handle of a safetensors file with the shapes of gpt-oss-20b's experts: 32 of 2880 inputs and outputs."""

    def __init__(self, name: str) -> None:
        self._projection, self._kind = name.rsplit(".", 1)[1].rsplit("_", 1)

    def get_slice(self, name: str) -> Header:
        return self

    def get_shape(self) -> list[int]:
        rows = {"gate_up_proj": 5760, "down_proj": 2880}[self._projection]
        return [32, rows, *{"blocks": (90, 16), "scales": (90,), "bias": ()}[self._kind]]

    def get_dtype(self) -> str:
        return "BF16" if self._kind == "bias" else "U8"


def test_a_folder_in_mxfp4_has_the_weights_of_the_model() -> None:
    hf_config = AutoConfig.for_model(**FOLDERS[MXFP4]["config"])
    stored = [
        name.replace(".N.", f".{layer}.") for name, number in FOLDERS[MXFP4]["names"].items() for layer in range(number)
    ]
    files = {name: Header(name) if ".experts." in name else None for name in stored}
    weights = dict(stored_weights(files, stored))
    shapes = weight_shapes(hf_config)
    assert weights.keys() == shapes.keys()
    experts = {name for name in shapes if ".experts." in name}
    assert {name: weights[name].describe()[0] for name in experts} == {name: shapes[name] for name in experts}
