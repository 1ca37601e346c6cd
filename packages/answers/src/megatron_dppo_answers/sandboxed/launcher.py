"""Set up a sandbox and run one program in it: ``python -I -S launcher.py STATUS_FD < job.json``.

Four processes take part. The *launcher* reads the job and writes the maps of the new user namespace. The *maker* enters
new namespaces (user, mount, process ids, IPC, host name, and network unless it is allowed), builds a root of read-only
mounts, and starts *init*, the process 1 of the namespace. Init starts the *program* and exits with it; the kernel then
kills whatever the program has left. Without namespaces the launcher starts the program itself. A program that may use
the network is kept from the services of this machine (``local_services``).

``ready`` is written to STATUS_FD when the setup is complete. STATUS_FD is closed when the launcher exits. The exit code
is the program's, or 128 + the signal that ended it.
"""

import contextlib
import ctypes
import functools
import json
import os
import resource
import runpy
import signal
import sys
from collections.abc import Callable
from typing import Any

# Flags of unshare(2), from linux/sched.h.
_NEW_MOUNTS = 0x00020000
_NEW_HOST = 0x04000000
_NEW_IPC = 0x08000000
_NEW_USER = 0x10000000
_NEW_PIDS = 0x20000000
_NEW_NETWORK = 0x40000000
# Flags of mount(2).
_NOSUID = 2
_NODEV = 4
_INODES_PER_MB = 256
"""Files and folders in ``/box`` for each MiB, as many as there are pages of 4 KiB."""
_BIND = 4096
_REC = 16384
_PRIVATE = 1 << 18
# Number and arguments of mount_setattr(2), which libc may not export.
_MOUNT_SETATTR = 442
_RECURSIVE = 0x8000
_CWD = -100
_ATTR_READ_ONLY = 1
_ATTR_NOSUID = 2
# Options of prctl(2).
_DEATH_SIGNAL = 1
_SUBREAPER = 36
_NO_NEW_PRIVILEGES = 38
Job = dict[str, Any]
"""The job as JSON: see ``sandbox.RunningProgram``."""
NOBODY = 65534
_libc = ctypes.CDLL(None, use_errno=True)


class _Attributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns")]


def _check(result: int, what: str) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def _mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    arguments = [source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), data.encode() or None]
    _check(_libc.mount(*arguments), f"mount {target}")


def _die_with_parent() -> None:
    _check(_libc.prctl(_DEATH_SIGNAL, signal.SIGKILL), "prctl")


def _make_root(job: Job) -> None:
    """Build a root with read-only mounts of what an interpreter needs and a writable ``/box`` in memory."""
    root = job["root"]
    # Private, so that no mount below reaches the host.
    _mount("none", "/", flags=_REC | _PRIVATE)
    _mount("none", root, "tmpfs", _NOSUID | _NODEV, "size=1m,mode=755")
    for path in job["visible"]:
        if os.path.islink(path):
            os.symlink(os.readlink(path), root + path)
        elif os.path.isdir(path):
            os.makedirs(root + path, exist_ok=True)
            _mount(path, root + path, flags=_BIND | _REC)
    os.makedirs(f"{root}/dev")
    for device in ("/dev/null", "/dev/urandom"):
        # A bind mount needs a file to be mounted on.
        open(root + device, "w").close()
        _mount(device, root + device, flags=_BIND)
    os.makedirs(f"{root}/box")
    if not os.path.exists(f"{root}/tmp"):  # The interpreter may be installed below /tmp.
        os.symlink("box", f"{root}/tmp")
    read_only = _Attributes(_ATTR_READ_ONLY | _ATTR_NOSUID, 0, 0, 0)
    _check(_libc.syscall(_MOUNT_SETATTR, _CWD, root.encode(), _RECURSIVE, ctypes.byref(read_only), 32), "mount_setattr")
    # An inode takes about 1 KiB of kernel memory that ``size`` does not count.
    inodes = _INODES_PER_MB * job["disk_mb"]
    _mount("none", f"{root}/box", "tmpfs", _NOSUID | _NODEV, f"size={job['disk_mb']}m,nr_inodes={inodes},mode=755")
    os.chroot(root)
    os.chdir("/box")


def _limit(job: Job) -> None:
    limits = {
        resource.RLIMIT_AS: job["memory_mb"] << 20,
        resource.RLIMIT_CPU: job["cpu_seconds"],
        resource.RLIMIT_FSIZE: job["disk_mb"] << 20,
        resource.RLIMIT_NPROC: job["processes"],
        resource.RLIMIT_NOFILE: job["open_files"],
        resource.RLIMIT_CORE: 0,
    }
    for kind, value in limits.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def _program(job: Job, status: int, user: int | None) -> None:
    """Replace this process with the program."""
    os.setsid()
    for name, text in job["files"].items():
        with open(name, "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(text)
    if user is not None:
        for path in (".", *job["files"]):
            os.chown(path, user, user)
    inputs = os.open(job["stdin_file"], os.O_RDONLY) if job["stdin_fd"] is None else job["stdin_fd"]
    outputs = 1 if job["stdout_fd"] is None else job["stdout_fd"]
    nowhere = os.open("/dev/null", os.O_WRONLY)
    os.dup2(outputs, 1)
    os.dup2(inputs, 0)
    os.dup2(nowhere, 2)
    os.dup2(status, 3)
    os.closerange(4, 1 << 16)
    if user is not None:
        # Groups first and the user last: afterwards the right to change the others is gone.
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    _limit(job)
    # No setuid program may give privileges back.
    _check(_libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "prctl")
    if job["network"]:
        job["deny_connections"]()
    for number in range(1, signal.NSIG):
        # 32 and 33 are those of the C library's threads.
        if number not in (signal.SIGKILL, signal.SIGSTOP, 32, 33):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.write(3, b"ready")
    # ``execve`` closes it: the program must not hold the status pipe open.
    os.set_inheritable(3, False)
    os.execve(job["argv"][0], job["argv"], {**job["env"], "HOME": os.getcwd(), "TMPDIR": os.getcwd()})


def _wait(pid: int) -> int:
    """Return the exit code of a child, and reap other children that end meanwhile."""
    while True:
        child, status = os.wait()
        if child == pid:
            return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def _child(run: Callable[[], None]) -> int:
    """Fork, and run the function in the child, which never returns. Exit code 125 reports a failed setup."""
    pid = os.fork()
    if pid:
        return pid
    try:
        _die_with_parent()
        run()
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}".encode())
    os._exit(125)


def _end_with(run: Callable[[], None]) -> None:
    """Run the function in a child, and exit as the child does."""
    pid = _child(run)
    # Only the program may hold the pipes: a reader waits until the last writer has closed its end.
    os.closerange(0, 1 << 16)
    os._exit(_wait(pid))


def _make(job: Job, status: int, user: int | None, to_launcher: int, from_launcher: int) -> None:
    flags = _NEW_USER | _NEW_MOUNTS | _NEW_PIDS | _NEW_IPC | _NEW_HOST | (0 if job["network"] else _NEW_NETWORK)
    _check(_libc.unshare(flags), "unshare")
    os.write(to_launcher, b"1")
    if os.read(from_launcher, 1) != b"1":
        raise OSError("the user namespace has no maps")
    _make_root(job)
    _end_with(lambda: _end_with(lambda: _program(job, status, user)))


def _map_users(pid: int) -> None:
    """Map the users of the namespace. Only the launcher, outside of it, may write the maps.

    As root: 0 for the setup, and an unprivileged 1 for the program, which is nobody outside. Otherwise the user itself
    becomes 1.
    """
    if os.getuid() == 0:
        maps = {"uid_map": f"0 0 1\n1 {NOBODY} 1", "gid_map": f"0 0 1\n1 {NOBODY} 1"}
    else:
        # The kernel lets an unprivileged user write gid_map only after this.
        maps = {"setgroups": "deny", "uid_map": f"1 {os.getuid()} 1", "gid_map": f"1 {os.getgid()} 1"}
    for name, text in maps.items():
        with open(f"/proc/{pid}/{name}", "w") as file:
            file.write(text)


def _in_namespaces(job: Job, status: int) -> int:
    user = 1 if os.getuid() == 0 else None
    here, to_launcher = os.pipe()
    from_launcher, there = os.pipe()
    pid = _child(lambda: _make(job, status, user, to_launcher, from_launcher))
    os.close(to_launcher)
    if os.read(here, 1) == b"1":
        _map_users(pid)
        os.write(there, b"1")
    os.close(there)
    return _wait(pid)


def _without(job: Job, status: int) -> int:
    user = NOBODY if os.getuid() == 0 else None
    os.chdir(job["root"])
    code = _wait(_child(lambda: _program(job, status, user)))
    _end_children()
    return code


def _end_children() -> None:
    """Kill children until none is left; orphans become children of this process (``_SUBREAPER``)."""
    while True:
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", encoding="latin-1") as file:
                if int(file.read().rpartition(")")[2].split()[1]) == os.getpid():
                    os.kill(int(name), signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return


def main() -> None:
    """Read the job and run it."""
    status = int(sys.argv[1])
    _die_with_parent()
    _check(_libc.prctl(_SUBREAPER, 1, 0, 0, 0), "prctl")  # Orphaned descendants become children of this process.
    job = json.loads(sys.stdin.buffer.read())
    if job["network"]:
        # Before the root changes. By path, since ``-I`` leaves the folder of this file out of the search path.
        services = runpy.run_path(os.path.join(os.path.dirname(os.path.abspath(__file__)), "local_services.py"))
        job["deny_connections"] = functools.partial(services["deny_connections"], services["listening_ports"]())
    os._exit((_in_namespaces if job["namespaces"] else _without)(job, status))


if __name__ == "__main__":
    main()
