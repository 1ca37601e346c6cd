"""Standard streams that any output can go to, and enough open files."""

from __future__ import annotations

import os
import resource
import sys

from megatron_dppo.errors import ConfigError

_STANDARD = (0, 1, 2)
MIN_OPEN_FILES = 256
"""Descriptors that a rank needs for libraries, sockets of the other ranks, and its own files."""
_WANTED_OPEN_FILES = 65_536


def prepare_streams() -> None:
    """Make stdin, stdout and stderr usable, whatever the caller has closed or whatever encoding they have.

    A closed descriptor would be given to the next file that is opened, and output would go into that file. Characters
    that the encoding lacks are written as escapes.
    """
    for number in _STANDARD:
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is this one: those below are open.
            # For reading and writing, because it may be any of the three.
            os.open(os.devnull, os.O_RDWR)
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # open until the end
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        # A caller may have replaced it by an object that is no text file.
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="backslashreplace")


def raise_file_limit() -> None:
    """Raise the soft limit on open files (``ulimit -n``) to what a run with many connections needs.

    Raises:
        ConfigError: The hard limit is too low for any run.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED_OPEN_FILES if hard == resource.RLIM_INFINITY else min(_WANTED_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    if soft != resource.RLIM_INFINITY and soft < MIN_OPEN_FILES:
        raise ConfigError(
            f"this process may open {soft} files (ulimit -n, hard limit), and a run needs at least {MIN_OPEN_FILES}. "
            f"Raise the limit: ulimit -Hn {MIN_OPEN_FILES}, LimitNOFILE of the service, or limits.conf"
        )
