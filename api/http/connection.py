"""Cancels a request's work when the caller hangs up or may no longer wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from starlette.requests import Request

from api.errors import ClientGone
from shared.errors import PenstockError

CHECK_S = 2.0
"""Interval at which a waiting caller is checked again."""
CONNECTION = "penstock.connection"
"""Set by the server in a request's scope. Without it, the caller never hangs up."""
T = TypeVar("T")


class Connection(Protocol):
    """The caller's connection. Implemented by api/server.py."""

    is_lost: bool
    on_lost: set[Callable[[], None]]
    """Called once if the connection is lost."""


async def while_connected(
    request: Request, work: Coroutine[Any, Any, T], check: Callable[[], object] | None = None
) -> T:
    """Awaits `work`, and cancels it as soon as the caller hangs up.

    Args:
        check: called every CHECK_S, if given. It raises PenstockError once the caller may no longer
            wait, which also cancels `work`.

    Raises:
        PenstockError: raised by `check`.
    """
    task = asyncio.current_task()
    assert task is not None, "routes run in tasks; this is a bug"
    watch = _Watch(request.scope.get(CONNECTION), check, task)
    try:
        return await work
    except asyncio.CancelledError:
        # Clears only the cancellation requested here. The server also cancels tasks when it shuts
        # down.
        if watch.refused is not None and task.uncancel() == 0:
            raise watch.refused from None
        raise
    finally:
        watch.stop()


class _Watch:
    """Cancels a request's task once its caller hangs up or may no longer wait.

    If the connection is already lost, it does so in the next event loop iteration, by which time
    any work that does not wait has finished. A task that waits for the server's disconnect message
    would cost CPU time in every request.
    """

    def __init__(
        self,
        connection: Connection | None,
        check: Callable[[], object] | None,
        task: asyncio.Task[Any],
    ) -> None:
        self.refused: PenstockError | None = None
        """The error that canceled the task. None if it was not canceled."""
        self._connection = connection
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.Handle | None = None
        if connection is not None and connection.is_lost:
            self._timer = self._loop.call_soon(self._hang_up)
        elif check is not None:
            self._timer = self._loop.call_later(CHECK_S, self._check_again, check)
        if connection is not None:
            connection.on_lost.add(self._hang_up)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._connection is not None:
            self._connection.on_lost.discard(self._hang_up)

    def _hang_up(self) -> None:
        self._cancel(ClientGone())

    def _check_again(self, check: Callable[[], object]) -> None:
        try:
            check()
        except PenstockError as error:
            self._cancel(error)
        else:
            self._timer = self._loop.call_later(CHECK_S, self._check_again, check)

    def _cancel(self, reason: PenstockError) -> None:
        if self.refused is None:
            self.refused = reason
            self._task.cancel()
