"""Kills this process's direct and indirect children once the process is gone.

A program that starts others might be killed, or its terminal might close, before it can stop them.
So a small program, run from this file, waits until that process exits. It then kills every process
whose environment contains its mark. Children inherit the mark, so this also covers children in
other sessions and children whose parents are gone.

A signal sent when the parent dies (PR_SET_PDEATHSIG) would reach only direct children, and would
kill them when the thread that started them exits. The reaper works only on Linux. Elsewhere,
nothing is marked and nothing is killed.
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
"""Environment variable with the marks of all ancestor processes, separated by spaces.

Not a Penstock setting, because settings aren't passed to every child.
"""
GRACE_S = 5.0
"""Time from SIGTERM to SIGKILL."""
LOOK_AGAIN_S = 0.2
"""Time until the second check. By then, a process that was still starting during the first check
has set up its environment.
"""

_started: tuple[int, str, int] | None = None
"""This process's reaper: the process ID (a fork is a different process), its mark, and the
descriptor used to notify the reaper of children.
"""


def child_marks() -> dict[str, str]:
    """Returns the environment variables a child needs to be killed along with this process.

    The first call starts the program that waits for this process to exit.
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
    """Registers the child `pid`, started with `child_marks`, in case it overwrites its environment.

    Redis does so to set its process title. Call this before waiting for the child.
    """
    if _started is not None:
        # If the reaper was killed, the parent's children are left running.
        with contextlib.suppress(OSError):
            os.write(_started[2], b"%d\n" % pid)


def _is_supported() -> bool:
    return sys.platform == "linux" and hasattr(os, "pidfd_open") and hasattr(os, "posix_spawn")


def _start(mark: str) -> int:
    """Starts the program. Returns the descriptor that children's IDs are written to."""
    # The reaper has no mark because it exits on its own, after the process that it waits for.
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    theirs, ours = os.pipe()
    os.set_blocking(ours, False)
    # Not started with subprocess, which would warn at exit that the process is still running.
    os.posix_spawn(
        sys.executable,
        # Without site-packages, it starts within a few milliseconds.
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
    """Waits for the parent `pid` to exit, then kills all processes with its `mark`."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    children = _wait_for_parent(pid)
    kill_at_s = time.monotonic() + GRACE_S
    signaled: set[int] = set()
    looks_in_vain = 0
    while looks_in_vain < 2:
        marked = _open_marked(mark.encode(), excluded=children) | children
        for marked_pid, pidfd in marked.items():
            if time.monotonic() > kill_at_s:
                _send(pidfd, signal.SIGKILL)
            elif marked_pid not in signaled:
                _send(pidfd, signal.SIGTERM)
                # A paused process handles SIGTERM only after it is resumed.
                _send(pidfd, signal.SIGCONT)
            signaled.add(marked_pid)
            if marked_pid not in children:
                os.close(pidfd)
        looks_in_vain = 0 if marked else looks_in_vain + 1
        time.sleep(LOOK_AGAIN_S)
        _forget_ended(children)


def _wait_for_parent(pid: int) -> dict[int, int]:
    """Waits for the parent `pid` to exit. Returns the registered children still running."""
    children: dict[int, int] = {}
    waited_for = [0]
    with contextlib.suppress(ProcessLookupError):
        waited_for.append(os.pidfd_open(pid))
    # By then, the ID may belong to another process.
    has_ended = os.getppid() != pid
    while True:
        ready, _, _ = select.select(waited_for, [], [], 0 if has_ended else None)
        if 0 in ready:
            data = os.read(0, 65536)
            _forget_ended(children)
            children.update(_open_processes(data))
            waited_for = waited_for if data else waited_for[1:]
        elif ready or has_ended:
            return children


def _open_processes(pids: bytes) -> dict[int, int]:
    parents = {}
    for pid in map(int, pids.split()):
        with contextlib.suppress(ProcessLookupError):
            parents[pid] = os.pidfd_open(pid)
    return parents


def _forget_ended(children: dict[int, int]) -> None:
    for pid, pidfd in list(children.items()):
        if select.select([pidfd], [], [], 0)[0]:
            os.close(children.pop(pid))


def _open_marked(mark: bytes, excluded: Container[int]) -> dict[int, int]:
    """Opens the processes that have `mark`. Returns their descriptors, keyed by ID."""
    processes = {}
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) in excluded:
            continue
        # The process may have exited by now, or it may belong to a different user.
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
    return any(
        mark in variable.partition(b"=")[2].split()
        for variable in variables
        if variable.startswith(start)
    )


def _send(pidfd: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, number)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
