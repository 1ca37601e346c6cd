"""Errors whose message is meant for the user. The command line prints them without a traceback.

Every message names the value, what was expected, and what to change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


class UserError(Exception):
    """Something the user can mend: a configuration, a file, an environment. Exit code 2."""

    exit_code = 2
    on_every_rank = True
    """Whether all ranks meet the error alike, so that rank 0 alone reports it."""


class SeveralProblems(UserError):
    """More than one thing to mend, told in one message.

    Args:
        errors: at least one.
    """

    def __init__(self, errors: Sequence[UserError]) -> None:
        listed = "\n".join("  - " + str(error).replace("\n", "\n    ") for error in errors)
        super().__init__(f"{len(errors)} problems, to be mended before this run can start:\n{listed}")
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
    """A function of the user's that cannot be loaded, raises, or returns something else than was agreed."""

    on_every_rank = False


class GenerateError(UserError):
    """A function of ``rollout.generate`` that cannot be loaded, raises, or returns something else than a response."""

    on_every_rank = False


class ServerError(UserError):
    """An inference server that cannot be reached, is too slow, refuses, or answers something unusable.

    Args:
        url: what was called; never holds a key.
        detail: what went wrong, the server's own message in it.
        status: the HTTP status; None when there was no answer.
        retry_after: seconds after which the server wants to be asked again; None = it does not say.
    """

    on_every_rank = False

    def __init__(self, url: str, detail: str, status: int | None = None, *, retry_after: float | None = None) -> None:
        super().__init__(f"{url}: {detail}" if status is None else f"{url}: HTTP {status}: {detail}")
        self.url, self.detail, self.status, self.retry_after = url, detail, status, retry_after

    @property
    def passing(self) -> bool:
        """Whether the answer speaks of the moment, not of the request: try later, a failure inside, or no JSON."""
        return self.status is not None and (self.status in (200, 408, 425, 429) or self.status >= 500)


class ContractBreach(ServerError):
    """An answer of an inference server that cannot be what it says it is.

    Args:
        url: as for ``ServerError``.
        request_id: of the request that was answered.
        field: the part of the answer that is wrong.
        detail: what it is, and what was expected.
    """

    def __init__(self, url: str, request_id: str, field: str, detail: str) -> None:
        super().__init__(url, f"the answer to request {request_id} breaks the contract: {field} {detail}")
        self.request_id, self.field = request_id, field


class AnswersLost(ServerError):
    """The answer is lost between the server and here, which is not the server's fault: a process of ours ended."""

    @property
    def passing(self) -> bool:
        """True: ask again."""
        return True


class NoServerLeft(ServerError):
    """No inference server can be used before a run that resumes gives it weights. Exit code 5."""

    exit_code = 5


class PublishError(UserError):
    """The rollout engine could not be given the current weights, or does not show them."""


class TrainingStopped(UserError):
    """Training cannot go on (non-finite gradients n times in a row). Exit code 3."""

    exit_code = 3


class DiskError(UserError):
    """A file that cannot be written: a full or read-only disk, missing rights, a failing device."""

    on_every_rank = False


class PlanError(UserError):
    """A part of a run that ``megatron-dppo plan`` cannot rehearse."""


class Problems:
    """Errors that are held back until everything has been looked at."""

    def __init__(self) -> None:
        self.errors: list[UserError] = []

    def add(self, error: UserError) -> None:
        """Remember an error, or each of several; one that is known already is not told twice."""
        parts = error.errors if isinstance(error, SeveralProblems) else [error]
        known = {str(e) for e in self.errors}
        self.errors += [e for e in parts if str(e) not in known]

    def attempt(self, function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R | None:
        """The result of a call, or None when it found something wrong."""
        try:
            return function(*args, **kwargs)
        except UserError as error:
            self.add(error)
            return None

    def raise_if_any(self) -> None:
        """One error as it is, several as a list.

        Raises:
            UserError: whatever was found.
        """
        if len(self.errors) == 1:
            raise self.errors[0]
        if self.errors:
            raise SeveralProblems(self.errors)
