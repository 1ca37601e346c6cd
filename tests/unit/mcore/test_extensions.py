"""Which code of Megatron compiles at run time, and when a run needs it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_dppo.mcore import extensions
from megatron_dppo.mcore.extensions import load_extension, needs_extension
from megatron_dppo.mcore.shims import apply_shims
from megatron_dppo.parallel.platform import Platform

PACKAGE = Path(extensions.__file__).parents[1]


@pytest.mark.parametrize(
    "granularity, modules, expected",
    [
        (None, ["layernorm"], False),
        ("full", None, False),
        ("selective", ["core_attn", "moe", "mlp", "shared_experts"], False),
        ("selective", ["core_attn", "layernorm"], True),
        ("selective", ["moe_act"], True),
    ],
)
def test_the_extension_is_built_only_for_recomputation_that_restores_outputs(
    granularity: str | None, modules: list[str] | None, expected: bool
) -> None:
    apply_shims(Platform.detect(force_cpu=True))
    from megatron.core.tensor_parallel import random

    assert getattr(random, "load_inline", load_extension) is load_extension
    config = SimpleNamespace(recompute_granularity=granularity, recompute_modules=modules)
    assert needs_extension(config) is (expected and hasattr(random, "_get_share_storage"))  # type: ignore[arg-type]


def test_nothing_else_of_megatron_that_this_package_reaches_compiles_cpp_at_run_time() -> None:
    handled = {"tensor_parallel/random.py"}
    not_reached = {"nccl_allocator.py", "inference/unified_memory.py", "datasets/utils.py"}
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None and spec.origin is not None
    root = Path(spec.origin).parent
    compiles = re.compile(r"load_inline\(|cpp_extension\.load\(|def compile_helpers")
    files = {str(file.relative_to(root)) for file in root.rglob("*.py") if compiles.search(file.read_text())}
    assert files <= handled | not_reached
    ours = [file.read_text() for file in PACKAGE.rglob("*.py")]
    assert not [text for text in ours if re.search(r"nccl_ub|megatron\.core\.(inference|datasets|nccl_alloc)", text)]
