"""Processes and threads as listed by Linux in /proc. Any of them may exit at any time."""

from __future__ import annotations

import contextlib
from pathlib import Path


def list_tree(pid: int) -> list[int]:
    """Returns a process and all its descendants.

    On systems other than Linux, returns only the process itself.
    """
    children: list[str] = []
    for started in Path(f"/proc/{pid}/task").glob("*/children"):  # one file per thread
        with contextlib.suppress(OSError):
            children += started.read_text(encoding="ascii").split()
    return [pid, *(below for child in children for below in list_tree(int(child)))]


def list_threads(pid: int) -> list[str]:
    """Returns the names of a process's threads except the main one."""
    names: list[str] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        if task.name != str(pid):
            with contextlib.suppress(OSError):
                names.append((task / "comm").read_text(encoding="utf-8").strip())
    return names
