"""Packages of the extra ``train`` (setup.py), and the message of a command that misses one."""

import importlib.util

from megatron_dppo.errors import ConfigError

TRAIN_MODULES = frozenset(
    [
        *("megatron", "transformers", "tokenizers", "safetensors", "numpy", "psutil", "aiohttp", "orjson", "pybase64"),
        *("tomli_w", "tree_sitter", "tree_sitter_bash", "yaml", "rich", "sympy", "tensorboard", "matplotlib"),
    ]
)
"""Top-level modules of the extra, and the tokenizers that transformers brings."""
INSTALL = "pip install '.[train]' in a clone, or pip install 'megatron-dppo[train]'"


def missing_modules() -> list[str]:
    """Return the modules of the extra that are not installed."""
    return sorted(name for name in TRAIN_MODULES if importlib.util.find_spec(name) is None)


def require_extra(command: str) -> None:
    """Check that the extra is installed, for a command that trains in processes of its own."""
    if missing := missing_modules():
        raise _error(missing[0], command)


def missing_extra(error: ModuleNotFoundError, command: str) -> ConfigError:
    """Return the error for a package of the extra that is not installed; raise any other again."""
    package = (error.name or "").partition(".")[0]
    if package not in TRAIN_MODULES:
        raise error
    return _error(package, command)


def _error(package: str, command: str) -> ConfigError:
    return ConfigError(
        f"megatron-dppo {command} needs the extra [train]: the package {package} is not installed. Fix: {INSTALL}"
    )
