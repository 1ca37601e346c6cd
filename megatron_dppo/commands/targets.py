"""The file that a command writes at its end: looked at before its work, and never one that exists."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_dppo.errors import ConfigError
from megatron_dppo.files import disk_errors


def require_new(file: Path | None, option: str) -> None:
    """Whether a file can be made there; None = none is wanted.

    Args:
        file: that is to be made.
        option: what named it, for the message.

    Raises:
        ConfigError: it exists, or its folder does not or is not to be written to.
    """
    if file is None:
        return
    parent, problem = file.absolute().parent, "exists already"
    try:
        os.lstat(file)
    except (FileNotFoundError, NotADirectoryError):
        if not parent.is_dir():
            problem = "is in a folder that does not exist"
        elif not os.access(parent, os.W_OK):
            problem = "is in a folder that this user cannot write to"
        else:
            return
    except OSError as error:
        problem = f"cannot be made: {error.strerror}"
    raise ConfigError(f"{option} {str(file)!r} {problem}; name another file")


def write_new(file: Path, text: str) -> None:
    """Write it.

    Raises:
        DiskError: it cannot be written.
    """
    with disk_errors(file, "the result"), file.open("x", encoding="utf-8") as target:
        target.write(text)
