"""What the runner gives up before it runs the code of a class. Linux only, as far as it goes.

It ends with its parent. It is the first that the system kills if memory is short. It has no
capability, so it can't look into other processes even if it runs as root: the system lets a process
read `/proc/<pid>/environ` and the memory only of those that have no more capabilities than itself
(ptrace(2), "Ptrace access mode checking"). Its `/tmp` is its own, and it writes nowhere but there
and below its scratch folder (landlock.py, mounts.py).

`run_confined` does the same for a program, such as the one that installs packages.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
from collections.abc import Sequence
from pathlib import Path

from workers.models.custom.runner import landlock, mounts

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_CAPBSET_DROP = 1, 15, 24
_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITY_VERSION_3 = 0x20080522
_CAPABILITIES = 64
NAME = b"penstock-class"
SHARED_MEMORY = "/dev/shm"
"""Libraries of several processes share memory there."""
DEVICES = "/dev"
"""Their files may be written, as CUDA does with /dev/nvidia*. No rule is about ioctl, so all are
allowed (LANDLOCK_ACCESS_FS_IOCTL_DEV is not handled), and none about reading: CUDA reads
/proc/driver/nvidia and /sys."""
OWN_THREADS = "/proc/self/task"
"""CUDA names its threads there, and does not start if it can't (CUDA_ERROR_OPERATING_SYSTEM). These
are the threads of the process itself, not of those that it starts."""


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Sets(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


def confine(
    scratch: str,
    read_only: Sequence[str] = (),
    denied_ports: Sequence[int] = (),
    max_file_bytes: int = 0,
) -> list[str]:
    """Gives up what the code of a class does not need.

    Args:
        scratch: the folder below which it writes.
        read_only: folders that it reads, which stay where they are if they are below `/tmp`.
        denied_ports: TCP ports to which it does not connect.
        max_file_bytes: the largest file that it writes. 0: no bound.

    Returns:
        What this system has no means for, in words.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is to fill no disk
    if max_file_bytes:
        _, allowed = resource.getrlimit(resource.RLIMIT_FSIZE)
        most = max_file_bytes if allowed < 0 else min(max_file_bytes, allowed)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    _set(_PR_SET_NAME, ctypes.create_string_buffer(NAME))
    _set(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    paths = [Path(one) for one in (scratch, *read_only)]
    writable = [scratch, SHARED_MEMORY, mounts.TMP]
    missing = []
    if not mounts.take_private_tmp(Path(scratch, "tmp"), paths):
        missing.append("no namespace of mounts: it shares /tmp with others")
    missing += _give_up(writable)
    if denied_ports and not landlock.deny_tcp(denied_ports):
        missing.append("no Landlock 4 (Linux 6.7): it can connect to our services")
    return missing


def run_confined(writable: Sequence[str], command: Sequence[str]) -> None:
    """Becomes a program that has no capability, and writes below these folders only."""
    _set(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    _give_up(writable)
    os.execv(command[0], list(command))


def _give_up(writable: Sequence[str]) -> list[str]:
    _set(_PR_SET_NO_NEW_PRIVS, 1)
    for number in range(_CAPABILITIES):
        _set(_PR_CAPBSET_DROP, number)
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).capset(ctypes.byref(_Header(_CAPABILITY_VERSION_3, 0)), (_Sets * 2)())
    abi = landlock.restrict_writes(writable, files_of=[DEVICES, OWN_THREADS])
    if not abi:
        return ["no Landlock: it writes what its user may write, and sees others of its user"]
    if not landlock.scopes_signals(abi):
        return [f"Landlock {abi} (Linux before 6.12): it can end processes of its user"]
    return []


def _set(option: int, value: object) -> None:
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
