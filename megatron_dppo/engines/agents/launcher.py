"""Isolate this process and run an agent's program in its place: ``python -I -S launcher.py PROGRAM ARGUMENT...``.

A Landlock domain (Linux 5.13) keeps the program and its children from every process outside of it: they cannot read its
environment (``/proc/PID/environ``), memory or file descriptors, and from Linux 6.12 on not signal it. Files, network
and the program's own children are not restricted. No privileges are needed. The domain needs ``no_new_privs``, so that
set-user-id programs such as ``sudo`` do not work. Root loses the capabilities that a domain does not stop.
"""

from __future__ import annotations

import ctypes
import os
import sys

# System calls, with the same numbers on all architectures, and constants of linux/landlock.h.
_CREATE_RULESET = 444
_RESTRICT_SELF = 446
_CREATE_RULESET_VERSION = 1
_FS_MAKE_BLOCK = 1 << 11
_SCOPE_SIGNAL = 1 << 1
_SCOPE_ABI = 6
"""First version of Landlock that has scopes."""
_NO_NEW_PRIVILEGES = 38
_DROP_CAPABILITY = 24
_CAPABILITIES = (19, 21, 38)
"""SYS_PTRACE, SYS_ADMIN and PERFMON. With the last two the kernel lets a process read any environment."""
# As a shell does for a program that it cannot find.
_CANNOT_START = 127
_libc = ctypes.CDLL(None, use_errno=True)


class _Ruleset(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("handled_access_fs", "handled_access_net", "scoped")]


def landlock_version() -> int:
    """Return the version of Landlock; -1 if the kernel does not have it or it is disabled."""
    return int(_libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _CREATE_RULESET_VERSION))


def isolate() -> None:
    """Put this process into a Landlock domain of its own.

    Raises:
        OSError: The kernel does not allow it.
    """
    version = landlock_version()
    # A domain needs one restriction. Older kernels have none for signals, and there a right that only root has, to make
    # block devices, does the least harm.
    rules = _Ruleset(0, 0, _SCOPE_SIGNAL) if version >= _SCOPE_ABI else _Ruleset(_FS_MAKE_BLOCK, 0, 0)
    size = ctypes.sizeof(_Ruleset) if version >= _SCOPE_ABI else ctypes.sizeof(ctypes.c_uint64)
    ruleset = _check(_libc.syscall(_CREATE_RULESET, ctypes.byref(rules), ctypes.c_size_t(size), 0))
    for capability in _CAPABILITIES:
        # Fails for other users than root, which do not have them.
        _libc.prctl(_DROP_CAPABILITY, capability, 0, 0, 0)
    _check(_libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    _check(_libc.syscall(_RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)


def _check(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def main() -> None:
    """Isolate this process and replace it with the program."""
    try:
        isolate()
        # The domain survives ``exec``, and children inherit it.
        os.execvp(sys.argv[1], sys.argv[1:])
    except OSError as error:
        print(f"cannot be started: {error}", file=sys.stderr)
        sys.exit(_CANNOT_START)


if __name__ == "__main__":
    main()
