"""Python files of the user as modules, which any process of the run can import by name.

A function of a file can be sent to another process (``multiprocessing``, ``concurrent.futures``) only if that process
can import its module by name, and a file's bare name may stand for another module there. So the name holds the path:
``megatron_dppo.functions.user_rewards_2f776f726b...``, and importing this package makes such names importable.
"""

import os
import re
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from megatron_dppo.functions.imports import find_module, imported_files

_PREFIX = f"{__package__}.user_"


def load_user_file(path: Path) -> ModuleType:
    """Execute a file as a module, also if it was executed before. It can import the modules beside it."""
    path = path.resolve()
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    _check_neighbors(path)
    name = _module_name(path)
    spec = _FINDER.find_spec(name)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a module up by its name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def make_importable(folder: Path) -> None:
    """Append a folder to the search path of imports. Last, since it may hold a file of any name."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _module_name(path: Path) -> str:
    stem = re.sub(r"\W", "_", path.stem)
    return f"{_PREFIX}{stem}_{os.fsencode(path).hex()}"


class _Finder(MetaPathFinder):
    """Finder of the files whose path is in the name of the module."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the specification of such a module. None for any other."""
        del path, target
        if not fullname.startswith(_PREFIX):
            return None
        try:
            file = Path(os.fsdecode(bytes.fromhex(fullname.rpartition("_")[2])))
        except ValueError:
            return None
        # A new process may not have the search path of the one that loaded the file.
        make_importable(file.parent)
        return spec_from_file_location(fullname, file)


_FINDER = _Finder()
sys.meta_path.append(_FINDER)


def _check_neighbors(path: Path) -> None:
    """Refuse a module beside a file whose name stands for another module: which one is imported would be chance."""
    make_importable(path.parent)
    for name in sorted({Path(beside).parts[0] for beside in imported_files(path, path.parent).beside}):
        module = name.removesuffix(".py")
        if module == "megatron_dppo":
            continue
        loaded = sys.modules.get(module)
        other = find_module(module) if loaded is None else _loaded_file(loaded)
        if other is None or not other.is_relative_to(path.parent):
            where = other or "a module of Python"
            raise ImportError(
                f"{path.name} imports {module!r}, which is {path.parent / name} and also {where}. Fix: rename the one "
                f"beside {path.name}"
            )


def _loaded_file(module: ModuleType) -> Path | None:
    file = getattr(module, "__file__", None)
    return None if file is None else Path(file).resolve()
