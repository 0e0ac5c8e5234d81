"""Ends the processes that this one started, directly or not, once this process is gone.

A program that starts others may be killed, or its terminal may close, before it can stop them. So a
small program, run from this file, waits for the end of the one process that it serves. Then it ends
every process that has the mark of that one in its environment. Children inherit it, so it also
finds those in sessions of their own, and those whose parents are gone.

A signal at the parent's death (PR_SET_PDEATHSIG) would reach direct children only, and would end
them with the thread that started them. This works on Linux only. Elsewhere nothing is marked and
nothing is ended.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
import uuid
from collections.abc import Container

VARIABLE = "STARTED_BY"
"""The environment variable with the marks of all processes above, separated by spaces.

No setting of Penstock, since those are not handed to every child.
"""
GRACE_S = 5.0
"""Time from SIGTERM to SIGKILL."""
LOOK_AGAIN_S = 0.2
"""A process that was being started at the first look has its environment by then."""

_started: tuple[int, str, int] | None = None
"""The reaper that serves this process: its id, as a fork is another process, its mark, and where
the program learns of its children.
"""


def child_marks() -> dict[str, str]:
    """Returns the variables that a child's environment needs to end with this process.

    The first call starts the program that waits for this process's end.
    """
    global _started
    if not _is_supported():
        return {}
    above = os.environ.get(VARIABLE, "").split()
    if _started is None or _started[0] != os.getpid():
        mark = uuid.uuid4().hex
        _started = os.getpid(), mark, _start(mark)
    return {VARIABLE: " ".join([*above, *({_started[1]} - {*above})])}


def add_child(pid: int) -> None:
    """Has the child `pid`, started with `child_marks`, end even if it overwrites its environment.

    Redis does, for its title. The child must not have been waited for.
    """
    if _started is not None:
        # Whoever killed the program keeps what is left.
        with contextlib.suppress(OSError):
            os.write(_started[2], b"%d\n" % pid)


def _is_supported() -> bool:
    return sys.platform == "linux" and hasattr(os, "pidfd_open") and hasattr(os, "posix_spawn")


def _start(mark: str) -> int:
    """Starts the program. Returns the descriptor for the ids of children."""
    # Not marked by anyone: it ends by itself, after the process that it waits for.
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    theirs, ours = os.pipe()
    os.set_blocking(ours, False)
    # Not by subprocess, which warns of a process that still runs at the end.
    os.posix_spawn(
        sys.executable,
        # Without site-packages: it starts in some milliseconds.
        [sys.executable, "-I", "-S", __file__, str(os.getpid()), mark],
        environment,
        file_actions=[
            (os.POSIX_SPAWN_DUP2, theirs, 0),
            (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
            (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
        ],
        setsid=True,
    )
    os.close(theirs)
    return ours


def main(pid: int, mark: str) -> None:
    """Waits for the end of the parent `pid`, then ends all that has its `mark`."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    children = _wait_for_parent(pid)
    kill_at_s = time.monotonic() + GRACE_S
    asked: set[int] = set()
    looks_in_vain = 0
    while looks_in_vain < 2:
        marked = _marked(mark.encode(), excluded=children) | children
        for one, pidfd in marked.items():
            if time.monotonic() > kill_at_s:
                _send(pidfd, signal.SIGKILL)
            elif one not in asked:
                _send(pidfd, signal.SIGTERM)
                # A paused process handles SIGTERM only once it continues.
                _send(pidfd, signal.SIGCONT)
            asked.add(one)
            if one not in children:
                os.close(pidfd)
        looks_in_vain = 0 if marked else looks_in_vain + 1
        time.sleep(LOOK_AGAIN_S)
        _forget_ended(children)


def _wait_for_parent(pid: int) -> dict[int, int]:
    """Returns once the parent `pid` has ended: its children by `add_child` that still run."""
    children: dict[int, int] = {}
    waited_for = [0]
    with contextlib.suppress(ProcessLookupError):
        waited_for.append(os.pidfd_open(pid))
    # Then the id may be another process's by now.
    has_ended = os.getppid() != pid
    while True:
        ready, _, _ = select.select(waited_for, [], [], 0 if has_ended else None)
        if 0 in ready:
            data = os.read(0, 65536)
            _forget_ended(children)
            children.update(_opened(data))
            waited_for = waited_for if data else waited_for[1:]
        elif ready or has_ended:
            return children


def _opened(pids: bytes) -> dict[int, int]:
    parents = {}
    for pid in map(int, pids.split()):
        with contextlib.suppress(ProcessLookupError):
            parents[pid] = os.pidfd_open(pid)
    return parents


def _forget_ended(children: dict[int, int]) -> None:
    for pid, pidfd in list(children.items()):
        if select.select([pidfd], [], [], 0)[0]:
            os.close(children.pop(pid))


def _marked(mark: bytes, excluded: Container[int]) -> dict[int, int]:
    """Opens the processes that have `mark`: their descriptors by their ids."""
    processes = {}
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) in excluded:
            continue
        # It may have ended in the meantime, or be somebody else's.
        with contextlib.suppress(OSError):
            pidfd = os.pidfd_open(int(name))
            if _has_mark(name, mark):
                processes[int(name)] = pidfd
            else:
                os.close(pidfd)
    return processes


def _has_mark(pid: str, mark: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = file.read().split(b"\0")
    except OSError:
        return False
    start = f"{VARIABLE}=".encode()
    return any(mark in one.partition(b"=")[2].split() for one in variables if one.startswith(start))


def _send(pidfd: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, number)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
