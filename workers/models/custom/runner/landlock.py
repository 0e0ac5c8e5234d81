"""Landlock: a process that gives up writing anywhere but below some folders (landlock(7)).

Reading is not restricted. A process that is restricted can't look into processes outside, so it
reads no `/proc/<pid>/environ` and no memory of theirs, whoever owns them. From ABI 6 on (Linux
6.12) it sends them no signal, and has no abstract Unix socket of theirs. What it starts inherits
this, and nothing takes it back.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from functools import cache
from typing import Any

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""Numbers of the system calls, equal on all architectures."""
_VERSION = 1
_PATH_BENEATH, _NET_PORT = 1, 2
_CONNECT_TCP = 1 << 1
_NET_FROM_ABI = 4
_PORTS = range(1 << 16)
_WRITE_FILE, _REFER, _TRUNCATE = 1 << 1, 1 << 13, 1 << 14
_MAKE_AND_REMOVE = sum(1 << bit for bit in range(4, 13))
_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 1 << 0, 1 << 1
_SIGNALS_FROM_ABI = 6


class _Ruleset(ctypes.Structure):
    _fields_ = (
        ("handled_fs", ctypes.c_uint64),
        ("handled_net", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    )


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


class _NetPort(ctypes.Structure):
    _fields_ = (("allowed", ctypes.c_uint64), ("port", ctypes.c_uint64))


def abi_version() -> int:
    """The version of Landlock that the system has. 0: none."""
    return max(0, _call(_CREATE_RULESET, None, 0, _VERSION))


def restrict_writes(folders: Sequence[str], files_of: Sequence[str] = ()) -> int:
    """Lets this process change files below these folders only.

    `no_new_privs` must be set.

    Args:
        folders: all below may be written, made and removed. One that is missing is left out.
        files_of: folders whose files may be written, but not made or removed. They stay open: a
            rule is about an inode, and one of /proc is made anew once nobody has it open.

    Returns:
        The version of Landlock, or 0 if nothing was restricted.
    """
    abi = abi_version()
    if not abi:
        return 0
    writes = _WRITE_FILE | (_TRUNCATE if abi >= 3 else 0)
    handled = writes | _MAKE_AND_REMOVE | (_REFER if abi >= 2 else 0)
    scoped = _SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS if abi >= _SIGNALS_FROM_ABI else 0
    ruleset = _Ruleset(handled, 0, scoped)
    size = {True: 24, False: 16 if abi >= 4 else 8}[abi >= _SIGNALS_FROM_ABI]
    fd = _call(_CREATE_RULESET, ctypes.byref(ruleset), size, 0)
    if fd < 0:
        return 0
    try:
        for folder in folders:
            _allow(fd, folder, handled)
        for folder in files_of:
            _allow(fd, folder, writes, stays_open=True)
        return abi if _call(_RESTRICT_SELF, fd, 0) == 0 else 0
    finally:
        os.close(fd)


def deny_tcp(ports: Sequence[int]) -> bool:
    """Keeps this process from connecting to these TCP ports, on any machine.

    Landlock has lists of what is allowed only, so all others are allowed one by one: 0.2 s. It also
    refuses to move a file from one folder to another (EXDEV) by every rule set that does not allow
    it, even one about ports alone, so this one allows it everywhere.

    Returns:
        Whether it was done: from ABI 4 on (Linux 6.7).
    """
    if abi_version() < _NET_FROM_ABI:
        return False
    ruleset = _Ruleset(_REFER, _CONNECT_TCP, 0)
    fd = _call(_CREATE_RULESET, ctypes.byref(ruleset), 16, 0)
    if fd < 0:
        return False
    try:
        _allow(fd, "/", _REFER)
        rule = _NetPort(_CONNECT_TCP, 0)
        for port in _PORTS:
            if port not in ports:
                rule.port = port
                _call(_ADD_RULE, fd, _NET_PORT, ctypes.byref(rule), 0)
        return _call(_RESTRICT_SELF, fd, 0) == 0
    finally:
        os.close(fd)


def scopes_signals(abi: int) -> bool:
    """Returns whether this version keeps signals inside."""
    return abi >= _SIGNALS_FROM_ABI


def _allow(ruleset: int, folder: str, access: int, *, stays_open: bool = False) -> None:
    try:
        fd = os.open(folder, os.O_PATH | os.O_CLOEXEC | os.O_DIRECTORY)
    except OSError:
        return
    try:
        rule = _PathBeneath(access, fd)
        _call(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(rule), 0)
    finally:
        if not stays_open:
            os.close(fd)


def _call(number: int, *arguments: object) -> int:
    """A system call. -1 if it fails, or if this is no Linux."""
    syscall = _syscall()
    if syscall is None:
        return -1
    words = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    return int(syscall(ctypes.c_long(number), *words))


@cache
def _syscall() -> Any:
    try:
        syscall = ctypes.CDLL(None, use_errno=True).syscall
    except (AttributeError, OSError):
        return None
    syscall.restype = ctypes.c_long
    return syscall
