"""Transformer Engine is found by importing it: stand-in packages that work, that break in each way, and none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dppo.errors import ConfigError, UserError
from megatron_dppo.mcore.transformer_engine import check_attention_support, has_transformer_engine


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for packages that hides the real one."""
    for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]:
        del sys.modules[name]


def package(place: Path, pytorch: str | None, init: str = "") -> None:
    (place / "transformer_engine").mkdir()
    (place / "transformer_engine" / "__init__.py").write_text(init)
    if pytorch is not None:
        (place / "transformer_engine" / "pytorch.py").write_text(pytorch)


def test_an_importable_package_is_detected(install: Path) -> None:
    package(install, "class Linear: ...")
    assert has_transformer_engine()


BROKEN = {
    "no part for torch": (None, ""),
    "built for another torch": ("raise ImportError('undefined symbol: _ZN3c10')", ""),
    "a library is missing": ("raise OSError('libcudart.so.13: cannot open shared object file')", ""),
    "half of it": ("import torch; torch.no_such_thing", ""),
    "its own check": ("", "raise RuntimeError('found empty transformer-engine meta package')"),
    "a dependency is missing": ("import no_such_dependency_of_it", ""),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_package_is_an_error_with_the_versions_and_the_fix(install: Path, case: str) -> None:
    pytorch, init = BROKEN[case]
    package(install, pytorch, init)
    with pytest.raises(UserError, match=r"torch \d.*, CUDA .*pip uninstall") as raised:
        has_transformer_engine()
    assert str(raised.value.__cause__) in str(raised.value)


@pytest.mark.slow
def test_shims_on_cuda_depend_on_what_can_be_imported_and_a_broken_package_stops_the_run(tmp_path: Path) -> None:
    program = f"""
import sys, torch
sys.path.insert(0, {str(tmp_path)!r})
from megatron_dppo.errors import UserError
from megatron_dppo.mcore import shims as trainer
from megatron_dppo.parallel.platform import Platform
from megatron_dppo_megatron_cpu import shims as library
applied = []
def noted(shim):
    return library.Shim(lambda: applied.append(shim.apply.__name__), "", "", "", shim.on_cuda, shim.with_te)
library.SHIMS = tuple(map(noted, library.SHIMS))
trainer._BUILDS = noted(trainer._BUILDS)
try:
    trainer.apply_shims(Platform(torch.device("cuda"), "nccl"))
except UserError as error:
    print("refused")
print(*applied)
"""

    def run() -> list[str]:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    package(tmp_path, "")
    assert run() == [
        "_load_optimizer_without_grad copy_shards_only accept_fp32_weights release_routes replace_load_inline"
    ]
    (tmp_path / "transformer_engine" / "pytorch.py").write_text("raise ImportError")
    assert run() == ["refused", ""]


def test_a_missing_package_is_not_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [p for p in sys.path if not (Path(p or ".") / "transformer_engine").exists()])
    for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]:
        monkeypatch.delitem(sys.modules, name)
    assert not has_transformer_engine()


def test_fp32_with_context_parallelism_has_no_attention_with_it() -> None:
    with pytest.raises(ConfigError, match=r"'fp32' with context_parallel_size = 2.*no attention.*'bf16'"):
        check_attention_support("fp32", 2, transformer_engine=True)
    for dtype, size, engine in (("bf16", 2, True), ("fp32", 1, True), ("fp32", 2, False)):
        check_attention_support(dtype, size, transformer_engine=engine)


def test_windows_with_context_parallelism_need_an_exchange_over_heads() -> None:
    with pytest.raises(ConfigError, match=r"cp_comm_type = None.*'a2a'"):
        check_attention_support("bf16", 2, transformer_engine=True, windows=True)
    check_attention_support("bf16", 2, transformer_engine=True, windows=True, cp_comm_type="a2a")
    check_attention_support("bf16", 1, transformer_engine=True, windows=True)
    check_attention_support("fp32", 2, transformer_engine=False, windows=True)
