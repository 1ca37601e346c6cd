"""Probe of pidfd_getfd, by which servers open memory of expandable segments."""

import os
import subprocess
import sys
from pathlib import Path

_SECONDS = 30.0
_SYSCALL = 438
"""Number of pidfd_getfd, the same on x86-64 and AArch64."""
# A child is no ancestor of this process, so the kernel treats it like an unrelated process of the same user.
PROGRAM = f"""
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
pidfd = os.pidfd_open(int(sys.argv[1]))
if libc.syscall({_SYSCALL}, pidfd, int(sys.argv[2]), 0) < 0:
    sys.exit(os.strerror(ctypes.get_errno()))
"""
PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")


def pidfd_problem() -> str | None:
    """Return why other processes of this user cannot open descriptors of this one. None if they can."""
    read_end, write_end = os.pipe()
    try:
        command = [sys.executable, "-I", "-S", "-c", PROGRAM, str(os.getpid()), str(read_end)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return f"the probe failed: {error}"
    finally:
        os.close(read_end)
        os.close(write_end)
    if result.returncode == 0:
        return None
    reason = (result.stderr.strip().splitlines() or [f"exit code {result.returncode}"])[-1]
    return f"pidfd_getfd: {reason}{_yama_hint()}"


def _yama_hint() -> str:
    try:
        scope = PTRACE_SCOPE.read_text(encoding="ascii").strip()
    except OSError:
        return ""
    return "" if scope == "0" else f", with kernel.yama.ptrace_scope = {scope}"
