"""An SGLang server that confirms every weight update and loads something else. Python runs this at start-up.

The file that ``LYING_SGLANG`` names says what is loaded: ``nothing``, ``half`` (every other tensor) or ``older`` (the
weights that the server was started with). If it is empty, the server is honest. All methods of a weight sync end in
``load_weights``, so the lie is the same for each.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import sglang_cpu  # type: ignore[import-not-found]


def _lie(module: Any) -> None:
    model = module.Qwen3MoeForCausalLM
    load = model.load_weights
    started_with: dict[str, Any] = {}

    def load_weights(self: Any, weights: Iterable[tuple[str, Any]], *more: Any, **options: Any) -> Any:
        mode = Path(os.environ["LYING_SGLANG"]).read_text()
        sent = [(name, tensor.clone()) for name, tensor in weights]
        for name, tensor in sent:
            started_with.setdefault(name, tensor)
        loaded = {
            "": sent,
            "nothing": [],
            "half": sent[::2],
            "older": [(name, started_with[name]) for name, _ in sent],
        }[mode]
        return load(self, loaded, *more, **options)

    model.load_weights = load_weights


sglang_cpu._FIXES["sglang.srt.models.qwen3_moe"] = _lie
sglang_cpu.install()
