"""Keep a program that may use the network from the services of this machine: the trainer's endpoint, its servers.

Landlock (Linux 6.7) knows ports, not addresses: the program may connect to every TCP port but those on which some
process of this machine listened when it was started. Landlock does not see Multipath TCP, SMC and data in the first
packet (TCP Fast Open). A seccomp filter denies these, and io_uring, which no such filter sees.
"""

import contextlib
import ctypes
import errno
import os
from collections.abc import Iterable, Iterator

# System calls, with the same numbers on all architectures, and constants of linux/landlock.h.
_CREATE_RULESET = 444
_ADD_RULE = 445
_RESTRICT_SELF = 446
_CREATE_RULESET_VERSION = 1
_RULE_NET_PORT = 2
_CONNECT_TCP = 1 << 1
_NET_ABI = 4
"""First version of Landlock that has rules for ports."""
_SCOPE_ABSTRACT_UNIX_SOCKET = 1 << 0
_SCOPE_ABI = 6
"""First version of Landlock that has scopes."""

# linux/seccomp.h, linux/filter.h and linux/audit.h.
_SET_SECCOMP = 22
_FILTER = 2
_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
_LOAD = 0x20
_IF_EQUAL = 0x15
_IF_AT_LEAST = 0x35
_IF_ANY_BIT = 0x45
_RETURN = 0x06
# Offsets in ``struct seccomp_data``. Each argument takes 8 bytes.
_NUMBER = 0
_ARCHITECTURE = 4
_ARGUMENTS = 16
_X32 = 0x40000000
"""System calls of the x32 ABI, which have the architecture of x86-64, begin here."""
_FAST_OPEN = 0x20000000
_FAMILIES = (2, 10)
"""IPv4 and IPv6."""
_OTHER_FAMILIES = (1, 16)
"""Unix sockets, and netlink for the resolver of names."""
_PROTOCOLS = (0, 1, 6, 17, 58)
"""The default of the socket's type, ICMP, TCP, UDP and ICMPv6."""
_CALLS = {
    "x86_64": (0xC000003E, {"socket": 41, "sendto": 44, "sendmsg": 46, "sendmmsg": 307, "io_uring_setup": 425}),
    "aarch64": (0xC00000B7, {"socket": 198, "sendto": 206, "sendmsg": 211, "sendmmsg": 269, "io_uring_setup": 425}),
}
"""Identifier and system calls by architecture."""
_LISTENING = "0A"
_libc = ctypes.CDLL(None, use_errno=True)


class _Ruleset(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("handled_access_fs", "handled_access_net", "scoped")]


class _PortRule(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed_access", ctypes.c_uint64), ("port", ctypes.c_uint64)]


class _Instruction(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32)]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction))]


def listening_ports() -> list[int]:
    """Return the TCP ports on which processes of this machine listen, in this process's network namespace."""
    ports = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/net/{name}") as file:
            rows = [line.split() for line in file.readlines()[1:]]
            ports |= {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == _LISTENING}
    return sorted(ports)


def deny_connections(ports: Iterable[int]) -> None:
    """Deny this process and its children connections to TCP ports, for good. Needs ``no_new_privs``.

    Without Landlock 4 (Linux 6.7) nothing is denied: docs/rewards.md.

    Raises:
        OSError: The kernel has Landlock and does not allow it.
    """
    version = _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _CREATE_RULESET_VERSION)
    if version < _NET_ABI:
        return
    has_scopes = version >= _SCOPE_ABI
    rules = _Ruleset(0, _CONNECT_TCP, _SCOPE_ABSTRACT_UNIX_SOCKET if has_scopes else 0)
    size = ctypes.sizeof(_Ruleset) if has_scopes else 2 * ctypes.sizeof(ctypes.c_uint64)
    ruleset = _check(_libc.syscall(_CREATE_RULESET, ctypes.byref(rules), ctypes.c_size_t(size), 0))
    rule = _PortRule(_CONNECT_TCP, 0)
    denied = set(ports)
    arguments = (_ADD_RULE, ruleset, _RULE_NET_PORT, ctypes.byref(rule), 0)
    for port in range(1, 1 << 16):  # there are no ranges
        if port not in denied:
            rule.port = port
            _check(_libc.syscall(*arguments))
    _check(_libc.syscall(_RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)
    _deny_what_landlock_does_not_see()


def _deny_what_landlock_does_not_see() -> None:
    if os.uname().machine not in _CALLS:
        return
    instructions = list(_filter(*_CALLS[os.uname().machine]))
    array = (_Instruction * len(instructions))(*instructions)
    _check(_libc.prctl(_SET_SECCOMP, _FILTER, ctypes.byref(_Program(len(array), array)), 0, 0))


def _filter(architecture: int, calls: dict[str, int]) -> Iterator[_Instruction]:
    """Yield a filter of system calls. Jumps are counted from the next instruction."""

    def deny_if(code: int, value: int) -> Iterator[_Instruction]:
        yield _Instruction(code, 0, 1, value)
        yield _Instruction(_RETURN, 0, 0, _ERRNO | errno.EPERM)

    def only_if(offset: int, values: tuple[int, ...]) -> Iterator[_Instruction]:
        """Deny other values than these of an argument."""
        yield _Instruction(_LOAD, 0, 0, offset)
        for index, value in enumerate(values):
            yield _Instruction(_IF_EQUAL, len(values) - index, 0, value)
        yield _Instruction(_RETURN, 0, 0, _ERRNO | errno.EPERM)

    def on_call(name: str, part: list[_Instruction]) -> Iterator[_Instruction]:
        yield _Instruction(_LOAD, 0, 0, _NUMBER)
        yield _Instruction(_IF_EQUAL, 0, len(part), calls[name])
        yield from part

    yield from only_if(_ARCHITECTURE, (architecture,))
    yield _Instruction(_LOAD, 0, 0, _NUMBER)
    yield from deny_if(_IF_AT_LEAST, _X32)
    yield from deny_if(_IF_EQUAL, calls["io_uring_setup"])
    for name, index in (("sendto", 3), ("sendmsg", 2), ("sendmmsg", 3)):
        flags = _Instruction(_LOAD, 0, 0, _ARGUMENTS + 8 * index)
        yield from on_call(name, [flags, *deny_if(_IF_ANY_BIT, _FAST_OPEN)])
    yield from on_call("socket", [*only_if(_ARGUMENTS, (*_FAMILIES, *_OTHER_FAMILIES))])
    protocols = [*only_if(_ARGUMENTS + 16, _PROTOCOLS)]
    for family in _FAMILIES:
        skip = [_Instruction(_LOAD, 0, 0, _ARGUMENTS), _Instruction(_IF_EQUAL, 0, len(protocols), family)]
        yield from on_call("socket", [*skip, *protocols])
    yield _Instruction(_RETURN, 0, 0, _ALLOW)


def _check(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
