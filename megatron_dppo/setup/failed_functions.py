"""Record of user functions whose failures stopped the run: the next start may have other ones.

Such a stop asks the user to fix the function and to rerun the same command. So a function in the record may differ from
that of the checkpoint; any other change still needs ``checkpoint.accept_changes``.
"""

import json
from fnmatch import fnmatchcase
from pathlib import Path

from megatron_dppo.errors import GenerateError, RewardError, TrainingStopped, UserError
from megatron_dppo.files import read_regular_file, write_synced

FAILED_FUNCTIONS = "failed_functions.json"
REWARD_KEYS = ("reward.function", "reward.functions.*.function")
AGENT_KEYS = ("agent.function", "agent.command", "rollout.generate")


class FunctionsFailed(TrainingStopped):
    """A step in which too many calls of user functions failed."""

    def __init__(self, message: str, keys: tuple[str, ...]) -> None:
        super().__init__(message)
        self.keys = keys


def failed_keys(error: UserError) -> tuple[str, ...]:
    """Return patterns of the keys whose functions caused an error of the training loop. Empty for other errors."""
    if isinstance(error, FunctionsFailed):
        return error.keys
    if isinstance(error, RewardError):
        return REWARD_KEYS
    return AGENT_KEYS if isinstance(error, GenerateError) else ()


def record_failed_functions(folder: Path, step: int, keys: tuple[str, ...]) -> None:
    """Write the record of a stop."""
    write_synced(folder / FAILED_FUNCTIONS, json.dumps({"step": step, "keys": list(keys)}) + "\n")


def may_differ(folder: Path, step: int, key: str) -> bool:
    """Return True if a start from the checkpoint of ``step`` may have another function in ``key``.

    The record holds until a checkpoint of a later step, which has the function that replaced the failed one.
    """
    try:
        record = json.loads(read_regular_file(folder / FAILED_FUNCTIONS))
        stopped_at, keys = record["step"], record["keys"]
        is_valid = isinstance(stopped_at, int) and isinstance(keys, list)
        # Another key in the file is not believed: only functions that can fail alone may differ.
        return is_valid and step <= stopped_at and any(fnmatchcase(key, p) for p in _KNOWN if p in keys)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


_KNOWN = REWARD_KEYS + AGENT_KEYS
