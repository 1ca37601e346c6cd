"""Isolate this process and run an agent's program: ``python -I -S launcher.py OPTIONS PROGRAM ARGUMENT...``.

OPTIONS is a JSON object with ``namespace`` (true or false), ``memory`` (bytes) and ``cpu`` (seconds). null: no limit.

A Landlock domain (Linux 5.13) keeps the program and its children from every process outside of it: they cannot read its
environment (``/proc/PID/environ``), memory or file descriptors, and from Linux 6.12 on not signal it. Files, network
and the program's own children are not restricted. No privileges are needed. The domain needs ``no_new_privs``, so that
set-user-id programs such as ``sudo`` do not work. Root loses the capabilities that a domain does not stop.

A namespace of processes besides makes every process that the program has started end with it, also one that left the
program's session. Three processes take part: this one waits, the second is the first process of the namespace, and the
third becomes the program. The kernel ends whatever is left when the second one ends.
"""

import ctypes
import json
import os
import resource
import signal
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
_NEW_MOUNTS = 0x00020000
_NEW_USER = 0x10000000
_NEW_PROCESSES = 0x20000000
_PRIVATE = (1 << 18) | (1 << 14)
"""MS_PRIVATE and MS_REC."""
_PARENT_DEATH_SIGNAL = 1
# As a shell does for a program that it cannot find.
_CANNOT_START = 127
_libc = ctypes.CDLL(None, use_errno=True)


class _Ruleset(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("handled_access_fs", "handled_access_net", "scoped")]


def landlock_version() -> int:
    """Return the version of Landlock; -1 if the kernel does not have it or it is disabled."""
    return int(_libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _CREATE_RULESET_VERSION))


def isolate() -> None:
    """Put this process into a Landlock domain of its own; ``OSError`` if the kernel does not allow it."""
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


def limit(memory: int | None, cpu: int | None) -> None:
    """Limit the address space in bytes and the CPU time in seconds of this process and of each of its children."""
    for kind, value in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_CPU, cpu)):
        if value is not None:
            resource.setrlimit(kind, (value, value))


def enter_namespace() -> None:
    """Go on as a child of the first process of new namespaces, in which ``/proc`` shows their processes alone.

    The calling process never returns: it ends with the status of the child.
    """
    user, group = os.getuid(), os.getgid()
    _check(_libc.unshare(_NEW_USER | _NEW_PROCESSES | _NEW_MOUNTS))
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)
    _become_child()
    _check(_libc.mount(b"none", b"/", None, _PRIVATE, None))
    _check(_libc.mount(b"proc", b"/proc", b"proc", 0, None))
    _become_child()


def _become_child() -> None:
    """Return in a new child; this process waits for it, and ends as it does."""
    child = os.fork()
    if child == 0:
        # Killed with its parent, which may be killed by its process group alone.
        _libc.prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        return
    pid, status = os.wait()
    # The first process of a namespace inherits every orphan.
    while pid != child:
        pid, status = os.wait()
    code = os.waitstatus_to_exitcode(status)
    # As a shell does for a program that was killed by a signal.
    os._exit(code if code >= 0 else 128 - code)


def _check(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def main() -> None:
    """Isolate this process and replace it, or a child, with the program."""
    options = json.loads(sys.argv[1])
    try:
        if options["namespace"]:
            # Before the domain, in which older kernels allow no mount.
            enter_namespace()
        isolate()
        limit(options["memory"], options["cpu"])
        # The domain and the limits survive ``exec``, and children inherit them.
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        print(f"cannot be started: {error}", file=sys.stderr)
        sys.exit(_CANNOT_START)


if __name__ == "__main__":
    main()
