"""A function that runs in a new process and session, connected to this process by a pipe."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Self


class ChildProcess:
    """Runs `function` from entering to leaving the context, at the latest.

    Args:
        function: gets `args`, and then its end of the pipe.
    """

    def __init__(self, function: Callable[..., None], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, self._there = context.Pipe()
        self._process = context.Process(target=_run, args=(function, args, self._there))

    def __enter__(self) -> Self:
        self._process.start()
        self._there.close()
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None, "it was started"
        return self._process.pid

    def send(self, message: object = None) -> None:
        self._pipe.send(message)

    async def receive(self, limit_s: float) -> Any:
        """Returns the next message.

        Raises:
            EOFError: the process has exited.
            TimeoutError: there was no message in time.
        """
        async with asyncio.timeout(limit_s):
            return await asyncio.to_thread(self._pipe.recv)


def _run(function: Callable[..., None], args: tuple[Any, ...], pipe: Connection) -> None:
    os.setsid()
    with suppress(EOFError):  # the parent is gone
        function(*args, pipe)
