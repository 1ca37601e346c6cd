"""Errors whose message is meant for the user. The command line prints them without a traceback.

Every message names the value, what was expected, and what to change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


class UserError(Exception):
    """An error that the user can fix: a configuration, a file, an environment. Exit code 2."""

    exit_code = 2
    on_every_rank = True
    """True if every rank raises the same error, so that only rank 0 reports it."""


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


class ConfigError(UserError):
    """A configuration value, or a combination of values, that cannot work."""


class DataError(UserError):
    """A data file that is missing, empty, or holds a bad row."""


class CheckpointError(UserError):
    """A checkpoint or a Hugging Face folder that cannot be used by this run."""


class RewardError(UserError):
    """A reward function that cannot be loaded or that fails on every sample."""

    on_every_rank = False


class ExtensionError(UserError):
    """A C++ extension that cannot be compiled or loaded on this machine."""

    on_every_rank = False


class FunctionError(UserError):
    """A user function that cannot be loaded, raises, or returns the wrong type."""

    on_every_rank = False


class GenerateError(UserError):
    """A ``rollout.generate`` function that cannot be loaded, raises, or does not return a response."""

    on_every_rank = False


class ServerError(UserError):
    """A request to an inference server that failed: unreachable, too slow, refused, or an unusable response.

    Args:
        url: Address that was called. Never contains an API key.
        detail: What went wrong, including the server's message.
        status: HTTP status. None without a response.
        retry_after: Seconds to wait before a retry, as the server requests. None if it does not say.
    """

    on_every_rank = False

    def __init__(self, url: str, detail: str, status: int | None = None, *, retry_after: float | None = None) -> None:
        super().__init__(f"{url}: {detail}" if status is None else f"{url}: HTTP {status}: {detail}")
        self.url = url
        self.detail = detail
        self.status = status
        self.retry_after = retry_after

    @property
    def is_transient(self) -> bool:
        """True if the same request may succeed later: the server is busy, failed internally, or sent no JSON."""
        return self.status is not None and (self.status in (200, 408, 425, 429) or self.status >= 500)


class ContractViolation(ServerError):
    """A response of an inference server that violates the contract of its API.

    Args:
        url: As for ``ServerError``.
        request_id: Identifier of the request.
        field: Part of the response that is wrong.
        detail: Its value and what was expected.
    """

    def __init__(self, url: str, request_id: str, field: str, detail: str) -> None:
        super().__init__(url, f"the response to request {request_id} violates the contract: {field} {detail}")
        self.request_id = request_id
        self.field = field


class ResponseLost(ServerError):
    """A response that was lost because a process of the trainer ended. The server is not at fault."""

    @property
    def is_transient(self) -> bool:
        """True: the request can be sent again."""
        return True


class NoUsableServer(ServerError):
    """No usable inference server. Resume the run to reload its weights. Exit code 5."""

    exit_code = 5


class PublishError(UserError):
    """Weights that could not be sent to the rollout engine, or that it does not prove to use."""


class TrainingStopped(UserError):
    """Training cannot continue (several steps in a row with non-finite gradients). Exit code 3."""

    exit_code = 3


class RendezvousError(UserError):
    """Ranks that cannot meet. The exit code is that of a run that hangs."""

    exit_code = 4


class DiskError(UserError):
    """A file that cannot be written: a full or read-only disk, missing rights, a failing device."""

    on_every_rank = False


class JobError(UserError):
    """Ranks of a job that do not find each other."""

    on_every_rank = False


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
