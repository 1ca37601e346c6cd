"""Code that a configuration names, and the permission to execute it: commands that look at a run have none.

The option is read by the list of commands, so that importing this module does not import pydantic.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from megatron_dppo.errors import ConfigError

if TYPE_CHECKING:
    from megatron_dppo.config.schema import Config

OPTION = "--run-functions"
OPTION_HELP = "allow functions and programs that the configuration names to run; read them first"
SAMPLING = ("rollout", "agent")
"""Sections whose functions a command executes to sample."""
TRAINING = ("reward", "loss", "train")
"""Sections whose functions a command executes to train."""


def named_functions(config: Config) -> dict[str, str]:
    """Return the user functions and agent programs of a configuration, by ``section.key``."""
    from megatron_dppo.config.paths import is_function_key
    from megatron_dppo.functions import is_function_name
    from megatron_dppo.setup.contents import flatten

    functions = {
        key: value
        for key, value in flatten(config.model_dump(mode="json"))
        if is_function_key(key) and isinstance(value, str) and is_function_name(value)
    }
    if config.agent.command:
        functions["agent.command"] = " ".join(config.agent.command)
    return functions


def require_permission(config: Config, sections: Collection[str], command: str, *, is_given: bool) -> None:
    """Check that a command may execute the functions that it needs."""
    needed = [f"{key} = {name!r}" for key, name in named_functions(config).items() if key.split(".")[0] in sections]
    if needed and not is_given:
        raise ConfigError(
            f"{command} needs {' and '.join(needed)}, and runs code that a run or a configuration names only if you "
            f"allow it. Fix: read that code, then add {OPTION}"
        )
