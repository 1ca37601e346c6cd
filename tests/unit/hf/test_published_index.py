"""Weight names against those of index files that people uploaded, and not against rules that are written by hand."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from megatron_dppo.hf.folder import model_shape, weight_shapes
from megatron_dppo.hf.published_names import LANGUAGE_MODEL, published_name
from megatron_dppo.mcore import mapping

FOLDERS: dict[str, Any] = json.loads((Path(__file__).parents[2] / "data/published_names.json").read_text())["folders"]


def patterns(names: list[str]) -> dict[str, int]:
    """How often each name occurs, with layer and expert as N."""
    return Counter(re.sub(r"\.\d+(?=\.)", ".N", name) for name in names)


@pytest.mark.parametrize("folder", FOLDERS)
def test_names_are_those_of_an_uploaded_index_file(folder: str) -> None:
    stored = FOLDERS[folder]["names"]
    hf_config = AutoConfig.for_model(**FOLDERS[folder]["config"])
    shape = model_shape(hf_config)
    mapped = [name for rule, *place in mapping.parameters(shape, tied=False) for name in rule.names(*place)[1]]
    for names in (mapped, list(weight_shapes(hf_config))):
        if any(name.startswith(LANGUAGE_MODEL) for name in stored):
            names = list(map(published_name, names))
        assert patterns(names) == stored
