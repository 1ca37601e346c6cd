"""Errors whose message is meant for the user. The command line prints them without a traceback.

Every message names the value, what was expected, and what to change.
"""


class UserError(Exception):
    """Something the user can mend: a configuration, a file, an environment. Exit code 2."""

    exit_code = 2
    on_every_rank = True
    """Whether all ranks meet the error alike, so that rank 0 alone reports it."""


class ConfigError(UserError):
    """A configuration value, or a combination of values, that cannot work."""


class DataError(UserError):
    """A data file that is missing, empty, or holds a bad row."""


class CheckpointError(UserError):
    """A checkpoint or a Hugging Face folder that cannot be used by this run."""


class RewardError(UserError):
    """A reward function that cannot be loaded or that fails on every sample."""

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
    """

    on_every_rank = False

    def __init__(self, url: str, detail: str, status: int | None = None) -> None:
        super().__init__(f"{url}: {detail}" if status is None else f"{url}: HTTP {status}: {detail}")
        self.url, self.detail, self.status = url, detail, status

    @property
    def unanswered(self) -> bool:
        """Whether the server may be dead: no answer, or one that says that it cannot work now."""
        return self.status is None or self.status >= 500


class PublishError(UserError):
    """The rollout engine could not be given the current weights, or does not show them."""


class TrainingStopped(UserError):
    """Training cannot go on (non-finite gradients n times in a row). Exit code 3."""

    exit_code = 3
