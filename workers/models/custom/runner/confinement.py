"""What the runner gives up before it runs the code of a class. Linux only, as far as it goes.

It ends with its parent. It is the first that the system kills if memory is short. It has no
capability, so it can't look into other processes even if it runs as root: the system lets a process
read `/proc/<pid>/environ` and the memory only of those that have no more capabilities than itself
(ptrace(2), "Ptrace access mode checking").
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_NO_NEW_PRIVS, _PR_CAPBSET_DROP = 1, 15, 38, 24
_CAPABILITY_VERSION_3 = 0x20080522
_CAPABILITIES = 64
NAME = b"penstock-class"


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Sets(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


def confine() -> None:
    """Gives up what the code of a class does not need."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_NAME, ctypes.create_string_buffer(NAME), 0, 0, 0)
        libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        for number in range(_CAPABILITIES):
            libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)
        libc.capset(ctypes.byref(_Header(_CAPABILITY_VERSION_3, 0)), (_Sets * 2)())
