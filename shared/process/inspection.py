"""Prevents other processes of the same user from inspecting this process."""

from __future__ import annotations

import contextlib
import ctypes

_PR_SET_DUMPABLE = 4


def deny_inspection() -> None:
    """Makes the kernel deny other processes access to `/proc/<pid>/environ` and our memory.

    This includes processes of the same user, unless they have the required capability
    (PR_SET_DUMPABLE in prctl(2)). Forked processes inherit this protection, but programs that they
    execute do not. Linux only.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
