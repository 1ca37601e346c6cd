"""User functions that a configuration names: ``module:function`` or ``path/to/file.py:function``."""

import hashlib
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_dppo.errors import FunctionError
from megatron_dppo.functions.user_files import load_user_file, make_importable

_ON_PATH = "The module must be installed, on PYTHONPATH or in the working directory"
_RELATIVE = "A path in a configuration is relative to it, one on the command line to the working directory"
_BESIDE = "Modules of the file's folder, of PYTHONPATH and installed ones can be imported"


def is_function_name(name: str) -> bool:
    """Return whether a value has the form of a function's name."""
    module, _, function = name.rpartition(":")
    return bool(module and function)


def load_function(name: str, setting: str, also: str = "") -> Callable[..., object]:
    """Import the function; a file is executed again at each call.

    ``also`` are other values that the key ``setting`` takes, for error messages: ``"'math', "``.

    Raises:
        FunctionError: The name has another form, the import fails, or it is not callable.
    """
    module_name, _, function_name = name.rpartition(":")
    if not is_function_name(name):
        raise FunctionError(
            f"{setting} = {name!r}; expected {also}'module:function' or 'path/to/file.py:function', e.g. "
            "'my_functions:one'"
        )
    is_file = module_name.endswith(".py")
    if ".py:" in name and not is_file:
        raise FunctionError(f"{setting} = {name!r} has more than one ':'; expected 'path/to/file.py:function'")
    try:
        module = load_user_file(Path(module_name)) if is_file else _import_module(module_name)
        if not hasattr(module, function_name):
            has = ", ".join(name for name, value in vars(module).items() if callable(value) and name[0] != "_")
            raise AttributeError(f"{module_name} has no {function_name!r}; it has {has or 'no function'}")
        function = getattr(module, function_name)
    except (Exception, SystemExit) as error:
        if not is_file:
            hint = f". {_ON_PATH}"
        elif isinstance(error, ModuleNotFoundError):
            hint = f". {_BESIDE}"
        else:
            hint = f". {_RELATIVE}" if isinstance(error, FileNotFoundError) else ""
        raise FunctionError(
            f"{setting} = {name!r} cannot be imported: {type(error).__name__}: {error}{hint}"
        ) from error
    if not callable(function):
        raise FunctionError(f"{setting} = {name!r} is not callable, but {type(function).__name__}")
    return function


def _import_module(name: str) -> Any:
    # `python -m` has the working directory on its path, and the installed command has not.
    with suppress(OSError):  # it may be deleted
        make_importable(Path.cwd())
    return importlib.import_module(name)


def check_arguments(
    function: Callable[..., object], name: str, setting: str, takes: Sequence[str], options: Mapping[str, object]
) -> None:
    """Check that a function can be called with some positional arguments, and with options by name."""
    try:
        inspect.signature(function).bind(*takes, **options)
    except (TypeError, ValueError) as error:
        given = "".join(f", {option}=..." for option in options)
        raise FunctionError(
            f"{setting} = {name!r} is called as f({', '.join(takes)}{given}), but has the parameters "
            f"{_signature(function)}: {error}. Options come from the table of options next to {setting}"
        ) from error


def has_parameter(function: Callable[..., object], name: str) -> bool:
    """Return whether a function has a parameter of that name."""
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def content_hash(name: str) -> str:
    """Return the SHA-256 of the file in ``name``; empty for a module's function."""
    file = name.rpartition(":")[0]
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file.endswith(".py") else ""


def _signature(function: Callable[..., object]) -> str:
    try:
        return str(inspect.signature(function))
    except (TypeError, ValueError):
        return "not known"
