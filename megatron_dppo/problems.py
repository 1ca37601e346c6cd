"""Collecting what is wrong, so that the user hears of all of it at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from megatron_dppo.errors import SeveralProblems, UserError

_P = ParamSpec("_P")
_R = TypeVar("_R")


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
