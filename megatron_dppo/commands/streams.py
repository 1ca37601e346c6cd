"""Standard streams that any output can go to."""

import os
import sys

_STANDARD = (0, 1, 2)


def prepare_streams() -> None:
    """Make stdin, stdout and stderr usable, whatever the caller has closed or whatever encoding they have.

    Output would go into the next file that gets a closed descriptor. Characters that the encoding lacks are escaped.
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
