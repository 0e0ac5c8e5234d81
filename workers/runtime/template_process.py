"""The template process: loads libraries and weights, and forks model processes on request.

It runs no model, starts no thread and does not initialize CUDA, because none of these survives a
fork. If a library does so anyway, the forked process executes its program again. That is as slow as
without a template, and as safe.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import socket
import sys
from pathlib import Path
from typing import Any, NamedTuple

from workers.runtime.template_protocol import (
    ForkRequest,
    ForkResult,
    ProcessEnded,
    TemplateReady,
    receive_request,
    send,
)

TEMPLATE_NAME = "penstock-forks"
MODEL_PROCESS_NAME = "penstock-model"
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_SIGKILL = 9


class ForkedChild(NamedTuple):
    """What a forked process gets: its socket, its device, and whether the fork is sound."""

    fd: int
    device: str
    is_sound: bool


class ForkServer:
    """Forks on request until `control` is closed."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._pids: dict[int, int] = {}  # by pidfd

    def run(self, loaded: TemplateReady) -> ForkedChild | None:
        """Reports what is loaded, then forks.

        Returns in each forked process, and returns None in the template.
        """
        gc.collect()
        gc.freeze()  # a collection would write to all objects, and so copy the shared pages
        with contextlib.suppress(ConnectionError):
            send(self._control, loaded)
            return self._serve(loaded.is_alone)
        return None

    def _serve(self, is_alone: bool) -> ForkedChild | None:
        poller = select.poll()
        poller.register(self._control, select.POLLIN)
        while True:
            for fd, _ in poller.poll():
                if fd != self._control.fileno():
                    poller.unregister(fd)
                    self._reap(fd)
                    continue
                order, given = receive_request(self._control)
                if order is None:
                    return None
                connection, output = given
                pidfd = self._fork(order, connection, output)
                if pidfd is None:
                    return self._as_child(connection, output, order.device, is_alone)
                poller.register(pidfd, select.POLLIN)

    def _fork(self, order: ForkRequest, connection: int, output: int) -> int | None:
        """Forks. Returns the pidfd of the child, or None in the child."""
        pid = os.fork()
        if pid == 0:
            return None
        os.close(connection)
        os.close(output)
        pidfd = os.pidfd_open(pid)
        self._pids[pidfd] = pid
        send(self._control, ForkResult(order.number, pid), [pidfd])
        return pidfd

    def _as_child(self, connection: int, output: int, device: str, is_alone: bool) -> ForkedChild:
        """Closes everything that belongs to the template in the forked process."""
        self._control.close()
        for pidfd in self._pids:
            os.close(pidfd)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        return ForkedChild(connection, device, is_alone and not _has_broken_cuda())

    def _reap(self, pidfd: int) -> None:
        pid = self._pids.pop(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        send(self._control, ProcessEnded(pid, os.waitstatus_to_exitcode(status)))


def is_alone() -> bool:
    """Whether this process has only one thread."""
    return len(list(Path("/proc/self/task").iterdir())) == 1


def _has_broken_cuda() -> bool:
    """Whether CUDA was initialized before the fork."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda._is_in_bad_fork())


def start_anew(child: ForkedChild) -> None:
    """Executes the program again with the same socket and device. Never returns."""
    os.set_inheritable(child.fd, True)
    os.execv(
        sys.executable,
        [sys.executable, *sys.orig_argv[1:], f"--fd={child.fd}", f"--device={child.device}"],
    )


def name_process(name: str) -> None:
    """Sets the name that `ps` and `top` show, at most 15 characters. Linux only."""
    _prctl(_PR_SET_NAME, ctypes.create_string_buffer(name.encode()))


def die_with_parent() -> None:
    """Makes the system kill this process when its parent dies.

    Forked processes are not affected. Linux only.
    """
    _prctl(_PR_SET_PDEATHSIG, _SIGKILL)


def _prctl(option: int, value: Any) -> None:
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
