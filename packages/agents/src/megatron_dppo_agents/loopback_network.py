"""A network namespace in which nothing but the endpoint can be reached. It needs root, or ``CAP_SYS_ADMIN``."""

import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
# Constants of linux/sched.h and linux/if.h.
_NEW_NETWORK = 0x40000000
_SET_FLAGS = 0x8914
_UP_AND_RUNNING = 0x41


class LoopbackNetwork:
    """Network namespace with a loopback device alone, until ``close``; ``OSError`` if it is not allowed."""

    def __init__(self) -> None:
        self._descriptor = _run_in_thread(_create)

    @property
    def path(self) -> str:
        """Path of the namespace, as container tools take it."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def listen(self, address: tuple[str, int]) -> socket.socket:
        """Return a socket that listens on an address of the namespace. It can be used by any thread."""
        return _run_in_thread(lambda: self._listen(address))

    def close(self) -> None:
        """Close the namespace; it ends with its last process and socket."""
        os.close(self._descriptor)

    def _listen(self, address: tuple[str, int]) -> socket.socket:
        _check(_libc.setns(self._descriptor, _NEW_NETWORK))
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        return socket.create_server(address, family=family, backlog=socket.SOMAXCONN)


def _create() -> int:
    """Move this thread to a new namespace and return a descriptor of it."""
    _check(_libc.unshare(_NEW_NETWORK))
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh14x", b"lo", _UP_AND_RUNNING))
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY)


def _run_in_thread(function: Callable[[], T]) -> T:
    """Run a function in a thread that ends with it: a namespace is that of a thread, and a socket's that of its thread.

    The process's other threads stay where they are.
    """
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(function).result()


_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
