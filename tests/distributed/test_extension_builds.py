"""Real builds of a C++ extension by torch: killed, stuck, failing, and wanted by several processes at once."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from torch.utils.file_baton import FileBaton

from megatron_dppo.errors import ExtensionError
from megatron_dppo.mcore import extensions
from megatron_dppo.mcore.extensions import load_extension, missing_build_tools
from tests.warm import preload

ANSWER = r"""
#include <Python.h>
static PyObject* answer(PyObject*, PyObject*) { return PyLong_FromLong(42); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "tiny_ext", nullptr, -1, methods};
PyMODINIT_FUNC PyInit_tiny_ext() { return PyModule_Create(&module); }
"""
MISSING = missing_build_tools()
pytestmark = [pytest.mark.distributed, pytest.mark.skipif(bool(MISSING), reason=f"this machine lacks {MISSING}")]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of extensions, new and empty, and a compiler that writes down its calls and waits at a gate."""
    compiler = tmp_path / "compiler"
    compiler.write_text(
        f'#!/bin/sh\necho $$ >>{tmp_path}/calls\nwhile [ -e {tmp_path}/closed ]; do sleep 0.05; done\nexec c++ "$@"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "megatron_dppo"


def load() -> int:
    return int(load_extension("tiny_ext", ANSWER, no_implicit_headers=True).answer())


class Loading:
    """A process that loads the extension, forked from one that has imported torch."""

    def __init__(self, folder: Path) -> None:
        self._output = folder / f"output-{len(list(folder.glob('output-*')))}"
        self._output.touch()
        self.process = preload().Process(target=_load, args=(dict(os.environ), self._output))
        self.process.start()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def result(self) -> str:
        """Return what it has printed at its end."""
        self.process.join(60)
        text = self._output.read_text()
        assert self.process.exitcode == 0, text
        return text


def _load(environment: dict[str, str], output: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    with output.open("w") as file, redirect_stdout(file):
        print("answer", load())


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def compiling(tmp_path: Path) -> int:
    """The process group of a build that has reached the compiler, which waits."""
    wait_for(lambda: (tmp_path / "calls").exists() and (tmp_path / "calls").read_text().endswith("\n"))
    return os.getpgid(int((tmp_path / "calls").read_text().split()[-1]))


def test_a_run_goes_on_after_another_was_killed_while_it_compiled(
    tmp_path: Path, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "closed").touch()
    killed = Loading(tmp_path)
    os.killpg(compiling(tmp_path), signal.SIGKILL)
    killed.kill()
    (left,) = cache.glob("tiny_ext-*.build-*")
    # That file is what a process waits for without end that calls torch's load_inline in that folder.
    assert not FileBaton(str(left / "lock")).try_acquire()
    (tmp_path / "closed").unlink()
    assert load() == 42
    text = capfd.readouterr().out
    assert f"{left} is left by a build that was killed, with torch's lock {left / 'lock'}; removing it" in text
    assert not left.exists() and not list(cache.glob("*.build-*"))


def test_a_build_ends_without_the_run_that_started_it_and_serves_the_next(tmp_path: Path) -> None:
    (tmp_path / "closed").touch()
    killed = Loading(tmp_path)
    compiling(tmp_path)
    killed.kill()
    following = Loading(tmp_path)
    following.process.join(2)
    assert following.process.is_alive()
    (tmp_path / "closed").unlink()
    text = following.result()
    assert text.endswith("answer 42\n") and "compiling" not in text


def test_processes_that_start_at_once_compile_once(tmp_path: Path) -> None:
    (tmp_path / "closed").touch()
    processes = [Loading(tmp_path) for _ in range(3)]
    compiling(tmp_path)
    calls = len((tmp_path / "calls").read_text().split())
    (tmp_path / "closed").unlink()
    texts = [process.result() for process in processes]
    assert all(text.endswith("answer 42\n") for text in texts), texts
    assert sum("compiling" in text for text in texts) == 1
    once = len((tmp_path / "calls").read_text().split())
    assert load() == 42 and len((tmp_path / "calls").read_text().split()) == once >= calls


def test_a_compiler_that_hangs_is_stopped(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extensions, "BUILD_SECONDS", 15.0)
    (tmp_path / "closed").touch()
    with pytest.raises(ExtensionError, match=r"tiny_ext in .*15 s"):
        load()
    (group,) = {int(line) for line in (tmp_path / "calls").read_text().split()[-1:]}
    wait_for(lambda: not Path(f"/proc/{group}").exists())
    assert not list(cache.glob("*.build-*"))


def test_a_builder_that_lives_for_too_long_is_named_with_its_lock(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extensions, "WAIT_SECONDS", 0.5)
    (tmp_path / "closed").touch()
    other = Loading(tmp_path)
    try:
        compiling(tmp_path)
        (lock,) = cache.glob("*.lock")
        with pytest.raises(ExtensionError, match=f"{re.escape(str(lock))} .*process {other.process.pid} on"):
            load()
    finally:
        (tmp_path / "closed").unlink()
        other.result()


def test_what_is_missing_or_wrong_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ExtensionError, match=r"tiny_ext cannot be compiled:[\s\S]*error"):
        load_extension("tiny_ext", "nonsense", no_implicit_headers=True)
    monkeypatch.setenv("CXX", str(tmp_path / "nothing"))
    with pytest.raises(ExtensionError, match="this machine lacks a"):
        load()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "compiler"))
    with pytest.raises(ExtensionError, match="TORCH_EXTENSIONS_DIR"):
        load()


def test_a_damaged_library_is_named(tmp_path: Path, cache: Path) -> None:
    Loading(tmp_path).result()
    (library,) = cache.glob("*/tiny_ext.so")
    library.write_bytes(library.read_bytes()[:100])
    with pytest.raises(ExtensionError, match=f"{re.escape(str(library))} cannot be loaded"):
        load()
