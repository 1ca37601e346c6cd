"""Errors that a client gets, in the shapes that its SDK reads."""

from torch import Tensor


class RequestError(Exception):
    """A request that cannot be served, for a reason that its sender can change.

    Args:
        status: HTTP status if the request is refused at once. A request in the queue fails with its future instead.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def require_finite(logprobs: Tensor) -> Tensor:
    """Return log-probabilities, if all are finite."""
    if not bool(logprobs.isfinite().all()):
        raise RequestError(
            "the log-probabilities are not finite: an update has broken the weights. Fix: load weights that were saved "
            "before it, and lower learning_rate"
        )
    return logprobs
