"""Errors whose message is meant for the user. The command line prints them without a traceback.

Every message names the value, what was expected, and what to change.
"""

from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

# These lie below: the engines raise them, too.
from megatron_dppo_engines.errors import CheckpointError as CheckpointError
from megatron_dppo_engines.errors import ConfigError as ConfigError
from megatron_dppo_engines.errors import ContractViolation as ContractViolation
from megatron_dppo_engines.errors import NoUsableServer as NoUsableServer
from megatron_dppo_engines.errors import ResponseLost as ResponseLost
from megatron_dppo_engines.errors import ServerError as ServerError
from megatron_dppo_engines.errors import UserError as UserError

_P = ParamSpec("_P")
_R = TypeVar("_R")


class MultipleErrors(UserError):
    """Several errors in one message.

    Args:
        errors: At least one.
    """

    def __init__(self, errors: Sequence[UserError]) -> None:
        listed = "\n".join("  - " + str(error).replace("\n", "\n    ") for error in errors)
        super().__init__(f"{len(errors)} problems must be fixed before the run can start:\n{listed}")
        self.errors = list(errors)
        self.on_every_rank = all(error.on_every_rank for error in errors)


class OneRankError(UserError):
    """An error that other ranks may not have."""

    on_every_rank = False


class DataError(UserError):
    """A data file that is missing, empty, or holds a bad row."""


class RewardError(OneRankError):
    """A reward function that cannot be loaded or that fails on every sample."""


class ExtensionError(OneRankError):
    """A C++ extension that cannot be compiled or loaded on this machine."""


class FunctionError(OneRankError):
    """A user function that cannot be loaded, raises, or returns the wrong type."""


class GenerateError(OneRankError):
    """A ``rollout.generate`` function that cannot be loaded, raises, or does not return a response."""


class PublishError(UserError):
    """Weights that could not be sent to the rollout engine, or that it does not prove to use."""


class TrainingStopped(UserError):
    """Training cannot continue (several steps in a row with non-finite gradients). Exit code 3."""

    exit_code = 3


class RendezvousError(UserError):
    """Ranks that cannot meet. The exit code is that of a run that hangs."""

    exit_code = 4


class DiskError(OneRankError):
    """A file that cannot be written: a full or read-only disk, missing rights, a failing device."""


class JobError(OneRankError):
    """Ranks of a job that do not find each other."""


class PlanError(UserError):
    """A part of a run that ``megatron-dppo plan`` cannot rehearse."""


class ErrorCollector:
    """Errors that are collected while all checks run, then raised together."""

    def __init__(self) -> None:
        self.errors: list[UserError] = []

    def add(self, error: UserError) -> None:
        """Add an error, or each part of several; duplicates are dropped."""
        parts = error.errors if isinstance(error, MultipleErrors) else [error]
        known = {str(e) for e in self.errors}
        self.errors += [e for e in parts if str(e) not in known]

    def attempt(self, function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R | None:
        """Return the result of a call, or None if it raised a ``UserError``, which is added."""
        try:
            return function(*args, **kwargs)
        except UserError as error:
            self.add(error)
            return None

    def raise_if_any(self) -> None:
        """Raise a single error unchanged, or several as one list.

        Raises:
            UserError: At least one error was added.
        """
        if len(self.errors) == 1:
            raise self.errors[0]
        if self.errors:
            raise MultipleErrors(self.errors)
