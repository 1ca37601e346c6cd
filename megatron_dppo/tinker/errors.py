"""Errors that a client gets, in the shapes that its SDK reads."""

from __future__ import annotations


class RequestError(Exception):
    """A request that cannot be served, for a reason that its sender can change.

    Args:
        message: The value, what was expected, and what to change.
        status: HTTP status if the request is refused at once. A request in the queue fails with its future instead.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status
