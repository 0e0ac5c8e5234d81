"""A model process as an OS process: started as a program, or forked from a template (workers/runtime/template.py)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from typing import Protocol

from shared.errors import ModelFailed

_STATUS_LIMIT_S = 1.0
"""How long the template may take to tell how a process ended, once it is gone."""


class ChildProcess(Protocol):
    """What is used of asyncio.subprocess.Process."""

    pid: int
    stdout: asyncio.StreamReader | None

    @property
    def returncode(self) -> int | None:
        """How it ended; None: not yet, or nobody knows."""

    def kill(self) -> None:
        """Ends it at once.

        Raises:
            ProcessLookupError: it is gone already.
        """

    async def wait(self) -> int | None:
        """Returns when it is gone, with how it ended."""


async def spawn(
    command: Sequence[str], environment: Mapping[str, str], theirs: socket.socket, option: str = "--fd"
) -> asyncio.subprocess.Process:
    """Starts a program that gets `theirs` as the number after `option`, and whose output is read.

    Raises:
        ModelFailed: there is no such program.
    """
    try:
        return await asyncio.create_subprocess_exec(
            *command,
            f"{option}={theirs.fileno()}",
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
    except OSError as error:
        raise ModelFailed(f"the model process could not be started: {error}") from error


class ForkedProcess:
    """A process that the template forked, known by its pidfd, so that no other process is ever meant."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self.stdout: asyncio.StreamReader | None = None
        self.returncode: int | None = None
        self._pidfd = pidfd
        self._is_gone = asyncio.Event()
        self._is_told = asyncio.Event()
        asyncio.get_running_loop().add_reader(pidfd, self._on_gone)

    def tell(self, status: int | None) -> None:
        """Takes the template's word on how it ended; None: the template is gone itself."""
        self.returncode = status if self.returncode is None else self.returncode
        self._is_told.set()

    def kill(self) -> None:
        """As ChildProcess."""
        if self._is_gone.is_set():
            raise ProcessLookupError(f"process {self.pid} is gone")
        signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def wait(self) -> int | None:
        """As ChildProcess."""
        await self._is_gone.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STATUS_LIMIT_S):
                await self._is_told.wait()
        return self.returncode

    def _on_gone(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        # Where the template died, and this is the container's first process, it is ours to reap.
        with contextlib.suppress(ChildProcessError):
            found = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
            if found is not None:
                self.tell(found.si_status if found.si_code == os.CLD_EXITED else -found.si_status)
        os.close(self._pidfd)
        self._is_gone.set()
