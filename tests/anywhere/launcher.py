"""`python launcher.py OPTIONS COMMAND...`: runs a command as if on a machine that lacks something.

Needs only the standard library of any Python 3.11. OPTIONS is a JSON object; see `LIMITS`. Exits
with SKIPPED and prints one line if this machine can't be restricted in that way.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import platform
import resource
import shutil
import signal
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

SKIPPED = 77
"""Exit status of a check that can't be run, as in Automake."""
OWN_DEVICES = ("null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts", "fd")
_LIBC = ctypes.CDLL(None, use_errno=True)
_NEW_MOUNTS, _NEW_USER, _NEW_NETWORK = 0x0002_0000, 0x1000_0000, 0x4000_0000
_READ_ONLY, _REMOUNT, _BIND, _RECURSIVE, _PRIVATE = 1, 1 << 5, 1 << 12, 1 << 14, 1 << 18
_DETACH = 2
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _PR_SET_PDEATHSIG = 38, 22, 1
_SECCOMP_FILTER = 2
_ALLOW, _REFUSE = 0x7FFF_0000, 0x0005_0000
_LOAD_WORD, _JUMP_IF_EQUAL, _JUMP_IF_SET, _RETURN = 0x20, 0x15, 0x45, 0x06
_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97
_AF_INET6 = 10
_NUMBER_AT, _FIRST_ARGUMENT_AT = 0, 16
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_CALLS = {
    "x86_64": {"unshare": 272, "mount": 165, "clone": 56, "clone3": 435, "socket": 41},
    "aarch64": {"unshare": 97, "mount": 40, "clone": 220, "clone3": 435, "socket": 198},
}
_LANDLOCK = (444, 445, 446)


class CannotRestrict(Exception):
    """This machine does not support the restriction. The message names what is missing."""


def check(status: int, what: str) -> None:
    """Raises CannotRestrict if a C library call failed."""
    if status:
        raise CannotRestrict(f"{what}: {os.strerror(ctypes.get_errno())}")


def mount(source: str, target: Path, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Mounts a file system, as mount(2) does."""
    words = (source.encode(), str(target).encode(), kind.encode() or None)
    status = _LIBC.mount(*words, ctypes.c_ulong(flags), options.encode() or None)
    check(status, f"mount {target}")


def enter_mounts() -> None:
    """Enters a mount namespace. Without root, this also requires a user namespace."""
    if os.geteuid():
        user, group = os.getuid(), os.getgid()
        check(_LIBC.unshare(_NEW_USER | _NEW_MOUNTS), "user namespace")
        for name, text in (("setgroups", "deny"), ("uid_map", user), ("gid_map", group)):
            line = text if isinstance(text, str) else f"{text} {text} 1"
            Path("/proc/self", name).write_text(line, encoding="ascii")
    else:
        check(_LIBC.unshare(_NEW_MOUNTS), "mount namespace")
    mount("none", Path("/"), flags=_RECURSIVE | _PRIVATE)


def limit_shared_memory(size_mb: int) -> None:
    """Mounts a smaller /dev/shm. If `size_mb` is 0, replaces /dev with one that lacks /dev/shm."""
    if size_mb:
        mount("tmpfs", Path("/dev/shm"), "tmpfs", options=f"size={size_mb}m,mode=1777")
        return
    devices = Path("/mnt")
    mount("tmpfs", devices, "tmpfs", options="size=1m,mode=755")
    for name in OWN_DEVICES:
        real, place = Path("/dev", name), devices / name
        if real.is_symlink():
            place.symlink_to(real.readlink())
        elif real.is_dir():
            place.mkdir()
            mount(str(real), place, flags=_BIND | _RECURSIVE)
        elif real.exists():
            place.touch()
            mount(str(real), place, flags=_BIND)
    mount(str(devices), Path("/dev"), flags=_BIND | _RECURSIVE)


def hide_processes() -> None:
    """Shows each user only that user's processes in /proc."""
    mount("proc", Path("/proc"), "proc", options="hidepid=invisible")


def make_read_only(folder: str) -> None:
    """Prevents all users, including root, from writing under a folder."""
    mount(folder, Path(folder), flags=_BIND)
    mount("none", Path(folder), flags=_REMOUNT | _BIND | _READ_ONLY)


def take_ports(ports: Sequence[int]) -> None:
    """Enters a network that contains only this machine, where these ports are taken."""
    check(_LIBC.unshare(_NEW_NETWORK), "network namespace")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        request = struct.pack("16sh22x", b"lo", 0)
        flags = struct.unpack("16sh22x", fcntl.ioctl(asked, _SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(asked, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", flags | _IFF_UP))
    listening = [socket.create_server(("127.0.0.1", port)) for port in ports]
    if os.fork() == 0:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.pause()
    for one in listening:
        one.close()


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_uint16),
        ("if_true", ctypes.c_uint8),
        ("if_false", ctypes.c_uint8),
        ("value", ctypes.c_uint32),
    )


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction)))


def refusals(names: Sequence[str]) -> list[tuple[int, int, int, int]]:
    """The system calls to block: number, error, and what the first argument must be.

    The forms are (number, error, 0, 0) for any argument, (…, _JUMP_IF_SET, bits), and (…,
    _JUMP_IF_EQUAL, value).
    """
    calls = _CALLS.get(platform.machine())
    if calls is None:
        raise CannotRestrict(f"no system call numbers of {platform.machine()}")
    found = []
    if "landlock" in names:
        found += [(number, _ENOSYS, 0, 0) for number in _LANDLOCK]
    if "namespaces" in names:
        found += [(calls["unshare"], _EPERM, 0, 0), (calls["mount"], _EPERM, 0, 0)]
        # clone3's flags are in memory. The C library then falls back to clone.
        found.append((calls["clone3"], _ENOSYS, 0, 0))
        found.append((calls["clone"], _EPERM, _JUMP_IF_SET, _NEW_USER))
    if "ipv6" in names:
        found.append((calls["socket"], _EAFNOSUPPORT, _JUMP_IF_EQUAL, _AF_INET6))
    return found


def refuse_calls(names: Sequence[str]) -> None:
    """Blocks system calls, as a kernel without these features does (seccomp(2))."""
    code = []
    for number, error, test, value in refusals(names):
        code.append((_LOAD_WORD, 0, 0, _NUMBER_AT))
        if test:
            code.append((_JUMP_IF_EQUAL, 0, 3, number))
            code.append((_LOAD_WORD, 0, 0, _FIRST_ARGUMENT_AT))
            code.append((test, 0, 1, value))
        else:
            code.append((_JUMP_IF_EQUAL, 0, 1, number))
        code.append((_RETURN, 0, 0, _REFUSE | error))
    code.append((_RETURN, 0, 0, _ALLOW))
    instructions = (_Instruction * len(code))(*(_Instruction(*one) for one in code))
    program = _Program(len(code), instructions)
    check(_LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
    status = _LIBC.prctl(_PR_SET_SECCOMP, _SECCOMP_FILTER, ctypes.byref(program), 0, 0)
    check(status, "seccomp filter")


def limit_files(count: int) -> None:
    """Sets both limits on open files."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, count))


def set_umask(mask: int) -> None:
    """Sets the permissions withheld from new files."""
    os.umask(mask)


def become(user: int) -> None:
    """Switches to a user without privileges or groups."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)


def mount_memory(folder: str) -> None:
    """Mounts an in-memory file system at a folder. It disappears with the mount namespace."""
    mount("tmpfs", Path(folder), "tmpfs", options="size=6g,mode=1777")


def unmount(folder: str) -> None:
    """Unmounts a file system, even if a program is still using it."""
    check(_LIBC.umount2(folder.encode(), _DETACH), f"unmount {folder}")


LIMITS: dict[str, Callable[[Any], None]] = {
    "shared_memory_mb": limit_shared_memory,
    "read_only": make_read_only,
    "ports": take_ports,
    "hides_processes": lambda _: hide_processes(),
    "cores": lambda cores: os.sched_setaffinity(0, cores),
    "open_files": limit_files,
    "umask": set_umask,
    "user": become,
    "refuses": refuse_calls,
}
"""Functions that apply the options, in this order."""
_NEED_MOUNTS = {"shared_memory_mb", "read_only", "hides_processes"}


def main(words: Sequence[str]) -> None:
    """Applies the options, then replaces itself with the command."""
    options, command = json.loads(words[0]), words[1:]
    try:
        if _NEED_MOUNTS & options.keys():
            enter_mounts()
        for name, apply in LIMITS.items():
            if name in options:
                apply(options[name])
    except (CannotRestrict, OSError) as error:
        print(f"skipped: {error}", flush=True)
        sys.exit(SKIPPED)
    os.execv(shutil.which(command[0]) or command[0], list(command))


if __name__ == "__main__":
    main(sys.argv[1:])
