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


class TrainingStopped(UserError):
    """Training cannot go on (non-finite gradients n times in a row). Exit code 3."""

    exit_code = 3
