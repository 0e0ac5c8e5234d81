"""True if other processes of the same user may look into this one."""

from __future__ import annotations

import contextlib
import ctypes

_PR_SET_DUMPABLE = 4


def deny_inspection() -> None:
    """Makes the system refuse `/proc/<pid>/environ` and memory of this process to others.

    Also to those of the same user, unless they have a capability for it (PR_SET_DUMPABLE in
    prctl(2)). Forks inherit it, programs that they start do not. Linux only.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
